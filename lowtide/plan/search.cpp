// The search of the planner, and the doors to its inner loops.
//
// Work is counted in places that were looked at, so that a search ends with the same plan on every machine.

#include "planner.hpp"

#include <random>

namespace {

// Ruin and recreate: change a part of a sequence at random, mend it, and keep it if it is no slower than the temperature
// allows.
struct Search {
  Planner planner;
  const Problem &g;
  Int budget, room, smallest;
  double base;  // seconds of the step without recomputation
  double rate = 0;  // the price of a second of copying, in seconds
  std::mt19937_64 engine;
  std::vector<double> weight, noise, gain;
  std::vector<Int> places;

  Search(const Problem &problem, Int budget_, Int room_, Int smallest_, uint64_t seed)
      : planner(problem), g(problem), budget(budget_), room(room_), smallest(smallest_), engine(seed) {
    weight.resize(g.values), noise.resize(g.ops);
    base = 0;
    for (Int op = 0; op < g.ops; ++op) base += g.optional[op] ? 0 : g.seconds[op];
  }

  double chance() { return (double)(engine() >> 11) * 0x1.0p-53; }
  Int below(Int limit) { return (Int)(chance() * (double)limit); }
  template <class Item, std::size_t count>
  Item any(const Item (&items)[count]) { return items[below(count)]; }
  double normal() {
    return std::sqrt(-2 * std::log(1 - chance())) * std::cos(2 * M_PI * chance());
  }

  void run(Sequence &now, Sequence &best, Int work, double temperature, double cooler) {
    double now_seconds = timed(now), best_seconds = timed(best);
    const Int end = planner.work + work;
    const double step = (cooler - temperature) / (double)std::max<Int>(1, work);
    while (planner.work < end) {
      const double margin = base * std::max(1e-12, cooler - step * (double)(end - planner.work));
      Sequence tried = now;
      if (!change(tried)) continue;
      const double took = timed(tried);
      if (took > now_seconds && chance() >= std::exp((now_seconds - took) / margin)) continue;
      now = tried, now_seconds = took;
      if (took < best_seconds) best = tried, best_seconds = took;
    }
  }

  // The seconds of a sequence that fits; with copies, as they come to lie between the ops.
  double timed(const Sequence &sequence) {
    return g.lanes ? planner.retime(sequence, budget, nullptr) : planner.seconds(sequence);
  }

  // False where the changed sequence does not fit.
  bool change(Sequence &tried) {
    for (double &one : weight) one = std::exp(WEIGHT_NOISE * normal());
    Int target = budget;
    switch (below(3)) {
      case 0: ruin(tried); break;
      case 1: target = budget - (Int)((double)budget * DEEP_CUT * std::pow(chance(), 2)); break;
      default:
        target = budget - (Int)((double)budget * SHALLOW_CUT * chance());
        for (double &one : weight) one *= one;
    }
    planner.work += std::max<Int>(1, g.values / 4);
    if (planner.measure(tried) > target) {
      Manner how{any(BATCHES), SHAVING_ROUNDS, room, smallest, INT64_MAX / 2, any(PENALTIES), INFINITY, weight.data()};
      if (g.lanes) how.rate = rate = any(COPY_PRICES);
      if (!planner.shave(tried, target, how)) return false;
      planner.prune(tried);
      if (planner.measure(tried) > budget) return false;
    }
    const double size = any(PRICE_NOISE);
    for (double &one : noise) one = size > 0 ? std::exp(size * normal()) : 1;
    for (Int pass = 0; pass < TIDY_PASSES; ++pass) {
      const std::size_t length = tried.size();
      tidy(tried, noise.data());
      if (tried.size() == length) break;
    }
    if (g.lanes) planner.tighten(tried);
    return true;
  }

  // Drop a few repeated runs, neighbours or scattered, and make what they made dear to let go again.
  void ruin(Sequence &tried) {
    planner.repeats(tried, places);
    if (places.empty()) return;
    const Int total = (Int)places.size(), number = std::min(total, 1 + below(2 + total / RUINED));
    if (chance() < NEIGHBOURS) {
      const Int first = std::max<Int>(0, below(total) - number / 2);
      places.assign(places.begin() + first, places.begin() + std::min(total, first + number));
    } else {
      for (Int k = 0; k < number; ++k) std::swap(places[k], places[k + below(total - k)]);
      places.resize(number);
      std::sort(places.begin(), places.end());
    }
    for (Int place : places) {
      const Int op = tried[place];
      for (Int k = g.make_start[op]; k < g.make_start[op + 1]; ++k) weight[g.makes[k]] = RUINED_WEIGHT;
    }
    for (std::size_t k = places.size(); k-- > 0;) tried.erase(tried.begin() + places[k]);
    planner.prune(tried);
  }

  // Drop repeated runs, the slowest for their bytes first.
  void tidy(Sequence &tried, const double *factor) {
    planner.repeats(tried, places);
    gain.assign(g.ops, -1);
    for (Int place : places) {
      const Int op = tried[place];
      if (gain[op] >= 0) continue;
      Int largest = 1;
      for (Int k = g.make_start[op]; k < g.make_start[op + 1]; ++k) largest = std::max(largest, g.bytes[g.makes[k]]);
      gain[op] = planner.price(op, rate) / (double)largest * (factor ? factor[op] : 1);
    }
    std::stable_sort(places.begin(), places.end(), [&](Int a, Int b) { return gain[tried[a]] > gain[tried[b]]; });
    planner.drop(tried, places, budget);
  }
};

}  // namespace

extern "C" {

// Whether all numbers of a problem are in range: 1, or REFUSED. The functions below take it that they are.
Int lowtide_problem_fits(const Problem *g, Int reads, Int makes, Int overs, Int rows, Int stores, Int restores,
                         Int insteads) {
  return answered([&] { return fits(*g, reads, makes, overs, rows, stores, restores, insteads) ? 1 : REFUSED; });
}

Int lowtide_profile(const Problem *g, const Int *given, Int length, Int *bytes) {
  if (length < 0 || !within(given, length, 0, g->ops)) return REFUSED;
  return answered([&] {
    Planner planner(*g);
    const Int peak = planner.measure(Sequence(given, given + length));
    std::copy(planner.profile.bytes.begin(), planner.profile.bytes.end(), bytes);
    return peak;
  });
}

// Returns the new length, or minus one with the sequence unchanged where the room is too small; `reached` is the peak,
// and `work` what was left of it.
Int lowtide_shave(const Problem *g, Int *given, Int length, Int room, Int budget, Int batch, double penalty, double rate,
                  const double *weight, Int rounds, double most_seconds, Int smallest, Int *work, Int *reached) {
  if (length < 0 || length > room || batch < 1 || !within(given, length, 0, g->ops)) return REFUSED;
  if (!finite(weight, g->values) || !std::isfinite(penalty) || !std::isfinite(rate)) return REFUSED;
  return answered([&]() -> Int {
    Planner planner(*g);
    Sequence sequence(given, given + length);
    const Manner how{batch, rounds, room, smallest, *work, penalty, most_seconds, weight, rate};
    const bool fits = planner.shave(sequence, budget, how);
    *work -= planner.work;
    if (!fits) return -1;
    planner.prune(sequence);
    *reached = planner.measure(sequence);
    std::copy(sequence.begin(), sequence.end(), given);
    return (Int)sequence.size();
  });
}

// The seconds of a sequence whose copies lie as well as the budget lets them, and the sequence as it is then.
Int lowtide_retime(const Problem *g, Int *given, Int length, Int budget, double *seconds) {
  if (length < 0 || !within(given, length, 0, g->ops)) return REFUSED;
  return answered([&]() -> Int {
    Planner planner(*g);
    Sequence tight(given, given + length), found;
    planner.tighten(tight);
    *seconds = planner.retime(tight, budget, &found);
    if ((Int)found.size() > length) return REFUSED;
    std::copy(found.begin(), found.end(), given);
    return (Int)found.size();
  });
}

// Drop repeated runs while the profile stays within the budget. Returns the new length.
Int lowtide_tidy(const Problem *g, Int *given, Int length, Int budget, Int passes) {
  if (length < 0 || !within(given, length, 0, g->ops)) return REFUSED;
  return answered([&] {
    Search search(*g, budget, 0, 0, 0);
    Sequence sequence(given, given + length);
    for (Int pass = 0; pass < passes; ++pass) {
      const std::size_t before = sequence.size();
      search.tidy(sequence, nullptr);
      if (sequence.size() == before) break;
    }
    std::copy(sequence.begin(), sequence.end(), given);
    return (Int)sequence.size();
  });
}

// Search for so much work. `now` and `best` have room for `room` ops each; `lengths` are theirs, before and after.
Int lowtide_search(const Problem *g, Int *now, Int *best, Int *lengths, Int room, Int budget, Int smallest, Int seed,
                   Int work, double temperature, double cooler) {
  if (!within(lengths, 2, 0, room + 1)) return REFUSED;
  if (!within(now, lengths[0], 0, g->ops) || !within(best, lengths[1], 0, g->ops)) return REFUSED;
  return answered([&] {
    Search search(*g, budget, room, smallest, (uint64_t)seed);
    Sequence from(now, now + lengths[0]), found(best, best + lengths[1]);
    search.run(from, found, work, temperature, cooler);
    lengths[0] = (Int)from.size(), lengths[1] = (Int)found.size();
    std::copy(from.begin(), from.end(), now);
    std::copy(found.begin(), found.end(), best);
    return 0;
  });
}

}  // extern "C"
