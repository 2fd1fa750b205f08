// The inner loops of the planner: the memory profile of a sequence of ops, shaving its peak, deleting repeated runs.
//
// A sequence is a list of op numbers, some of them more than once. A value lives from a run that makes it to its last
// reader before the next run that makes it again; it is freed there. What may overwrite a dying argument does.

#include <algorithm>
#include <cstdint>
#include <vector>

using Int = int64_t;
using Byte = uint8_t;

extern "C" struct Problem {
  Int ops, values;
  const Int *read_start, *reads;      // op -> values that it reads
  const Int *make_start, *makes;      // op -> values that it makes
  const Int *over_start, *over_made, *over_read;  // op -> pairs: made may take the bytes of read
  const Int *bytes;                   // of each value; 0 for what is there all the time
  const Int *maker;                   // of each value; -1 for an input
  const Int *killer;                  // op that writes over an input for good; -1
  const Int *extra;                   // bytes inside each op
  const double *seconds;              // of each op
  const Byte *required;               // values that outlive the step
  const Byte *pinned;                 // ops whose first run must stay where it is
  const Byte *repeatable;             // ops that may run again
};

namespace {

// What dies and what is made at each place of a sequence.
struct Profile {
  std::vector<Int> bytes;   // in use while the op at each place runs
  std::vector<Int> saved;   // bytes that are saved there because a result sits on a dying argument
  std::vector<Byte> alive;
  std::vector<Int> change, made, used;

  Int measure(const Problem &g, const std::vector<Int> &sequence) {
    const Int length = (Int)sequence.size();
    bytes.assign(length, 0), saved.assign(length, 0), change.assign(length, 0), made.assign(length, 0);
    alive.assign(g.required, g.required + g.values);
    for (Int place = length - 1; place >= 0; --place) {
      const Int op = sequence[place];
      Int delta = 0, sum = 0;
      for (Int k = g.make_start[op]; k < g.make_start[op + 1]; ++k) {
        const Int value = g.makes[k];
        sum += g.bytes[value];
        if (alive[value]) alive[value] = 0, delta += g.bytes[value];
      }
      saved[place] = saving(g, op);
      for (Int k = g.read_start[op]; k < g.read_start[op + 1]; ++k) {
        const Int value = g.reads[k];
        if (!alive[value]) alive[value] = 1, delta -= g.bytes[value];
      }
      change[place] = delta;
      made[place] = sum;
    }
    Int now = 0, peak = 0;
    for (Int place = 0; place < length; ++place) {
      bytes[place] = now + made[place] - saved[place] + g.extra[sequence[place]];
      peak = std::max(peak, bytes[place]);
      now += change[place];
    }
    return peak;
  }

  // Called when `alive` says what is alive right after the op: arguments that are not are dying.
  Int saving(const Problem &g, Int op) {
    Int total = 0;
    used.clear();
    for (Int k = g.over_start[op]; k < g.over_start[op + 1]; ++k) {
      if (alive[g.over_read[k]]) continue;
      bool taken = false;
      for (Int j : used) taken |= g.over_read[j] == g.over_read[k] || g.over_made[j] == g.over_made[k];
      if (taken) continue;
      used.push_back(k);
      total += g.bytes[g.over_made[k]];
    }
    return total;
  }
};

// Where each value is alive: for each run that makes it, from that place to its last reader.
struct Lives {
  std::vector<Int> start, first, last, filled;
  std::vector<Int> killed_at;  // of inputs: the place of the op that writes over it, or the end

  void find(const Problem &g, const std::vector<Int> &sequence) {
    const Int length = (Int)sequence.size();
    start.assign(g.values + 1, 0), killed_at.assign(g.values, length);
    for (Int op : sequence)
      for (Int k = g.make_start[op]; k < g.make_start[op + 1]; ++k) start[g.makes[k] + 1]++;
    for (Int value = 0; value < g.values; ++value) start[value + 1] += start[value];
    filled.assign(start.begin(), start.end() - 1);
    first.assign(start[g.values], 0), last.assign(start[g.values], 0);
    std::vector<Int> place_of(g.ops, -1);
    for (Int place = 0; place < length; ++place) {
      const Int op = sequence[place];
      if (place_of[op] < 0) place_of[op] = place;
      for (Int k = g.read_start[op]; k < g.read_start[op + 1]; ++k) {
        const Int value = g.reads[k];
        if (g.maker[value] >= 0) last[filled[value] - 1] = place;
      }
      for (Int k = g.make_start[op]; k < g.make_start[op + 1]; ++k) {
        const Int value = g.makes[k];
        first[filled[value]] = last[filled[value]] = place;
        filled[value]++;
      }
    }
    for (Int value = 0; value < g.values; ++value) {
      if (g.maker[value] < 0 && g.killer[value] >= 0) killed_at[value] = place_of[g.killer[value]];
      if (g.required[value] && filled[value] > start[value]) last[filled[value] - 1] = length;
    }
  }

  bool at(const Problem &g, Int value, Int place) const {
    if (g.maker[value] < 0) return killed_at[value] >= place;
    for (Int k = start[value]; k < filled[value]; ++k)
      if (first[k] < place && last[k] >= place) return true;
    return false;
  }
};

// The ops that must run again before `place` so that a value is there: the value's maker and what that lacks.
struct Closure {
  std::vector<Int> ops, mark;
  Int stamp = 0;

  void begin(const Problem &g) {
    if ((Int)mark.size() != g.ops) mark.assign(g.ops, 0), stamp = 0;
    ++stamp;
    ops.clear();
  }

  bool add(const Problem &g, const Lives &lives, Int value, Int place, Int limit) {
    std::size_t next = ops.size();
    if (!enter(g, g.maker[value])) return false;
    for (; next < ops.size(); ++next) {
      if ((Int)ops.size() > limit) return false;
      const Int op = ops[next];
      for (Int k = g.read_start[op]; k < g.read_start[op + 1]; ++k) {
        const Int read = g.reads[k];
        if (lives.at(g, read, place)) continue;
        if (g.maker[read] < 0 || !enter(g, g.maker[read])) return false;
      }
    }
    return true;
  }

  bool enter(const Problem &g, Int op) {
    if (!g.repeatable[op]) return false;
    if (mark[op] != stamp) mark[op] = stamp, ops.push_back(op);
    return true;
  }
};

}  // namespace

extern "C" {

Int lowtide_profile(const Problem *g, const Int *given, Int length, Int *bytes) {
  std::vector<Int> sequence(given, given + length);
  Profile profile;
  const Int peak = profile.measure(*g, sequence);
  std::copy(profile.bytes.begin(), profile.bytes.end(), bytes);
  return peak;
}

// Lower the peak to the budget: at the highest place take the idle value with the least seconds of recomputation for
// the bytes that it frees above the budget, and make it again before its next reader; `batch` of them at a time.
// Returns the new length, or minus one with the sequence unchanged where the room is too small; `reached` is the peak.
Int lowtide_shave(const Problem *g, Int *given, Int length, Int room, Int budget, Int batch, double penalty,
                  const double *weight, Int rounds, double most_seconds, Int smallest, Int *reached) {
  std::vector<Int> sequence(given, given + length);
  Profile profile;
  Lives lives;
  Closure closure;
  double total = 0;
  for (Int op : sequence) total += g->seconds[op];
  std::vector<Int> touched(g->values), next(g->values);
  std::vector<double> above, count;
  std::vector<std::pair<double, Int>> chosen;
  Int best_peak = INT64_MAX;
  for (Int round = 0; round < rounds; ++round) {
    const Int peak = profile.measure(*g, sequence);
    best_peak = std::min(best_peak, peak);
    if (peak <= budget || total > most_seconds) break;
    const Int n = (Int)sequence.size();
    const Int top = std::max_element(profile.bytes.begin(), profile.bytes.end()) - profile.bytes.begin();
    above.assign(n + 1, 0), count.assign(n + 1, 0);
    for (Int place = 0; place < n; ++place) {
      const Int over = std::max<Int>(0, profile.bytes[place] - budget);
      above[place + 1] = above[place] + (double)over, count[place + 1] = count[place] + (over > 0);
    }
    lives.find(*g, sequence);
    std::fill(touched.begin(), touched.end(), -1), std::fill(next.begin(), next.end(), -1);
    for (Int place = 0; place <= top; ++place) {
      const Int op = sequence[place];
      for (Int k = g->read_start[op]; k < g->read_start[op + 1]; ++k) touched[g->reads[k]] = place;
      for (Int k = g->make_start[op]; k < g->make_start[op + 1]; ++k) touched[g->makes[k]] = place;
    }
    for (Int place = n - 1; place > top; --place) {
      const Int op = sequence[place];
      for (Int k = g->make_start[op]; k < g->make_start[op + 1]; ++k) next[g->makes[k]] = -1;
      for (Int k = g->read_start[op]; k < g->read_start[op + 1]; ++k) next[g->reads[k]] = place;
    }
    chosen.clear();
    for (Int value = 0; value < g->values; ++value) {
      const Int from = touched[value], to = next[value];
      if (g->bytes[value] <= smallest || from < 0 || to < 0 || from >= top || g->required[value]) continue;
      closure.begin(*g);
      if (!closure.add(*g, lives, value, to, 3000)) continue;
      const double area = std::min(above[to] - above[from + 1], (double)g->bytes[value] * (count[to] - count[from + 1]));
      if (area <= 0) continue;
      double seconds = 0;
      Int widest = 0;
      for (Int op : closure.ops) {
        seconds += g->seconds[op];
        Int width = g->extra[op];
        for (Int k = g->make_start[op]; k < g->make_start[op + 1]; ++k) width += g->bytes[g->makes[k]];
        for (Int k = g->read_start[op]; k < g->read_start[op + 1]; ++k)
          if (!lives.at(*g, g->reads[k], to)) width += g->bytes[g->reads[k]];
        widest = std::max(widest, width);
      }
      if (penalty > 0) {
        const double excess = (double)(profile.bytes[to] - profile.made[to] - g->bytes[value] + widest - budget);
        if (excess > 0) seconds *= 1 + penalty * excess * (double)closure.ops.size() / area;
      }
      chosen.emplace_back(weight[value] * seconds / area, value);
    }
    if (chosen.empty()) break;
    const std::size_t keep = std::min<std::size_t>(batch, chosen.size());
    std::partial_sort(chosen.begin(), chosen.begin() + keep, chosen.end());
    chosen.resize(keep);
    Int freed = 0;
    const Int need = peak - budget;
    std::size_t used = 0;
    while (used < chosen.size() && freed < need && (used == 0 || chosen[used].first <= 1.5 * chosen[0].first))
      freed += g->bytes[chosen[used++].second];
    chosen.resize(used);
    std::sort(chosen.begin(), chosen.end(), [&](const auto &a, const auto &b) {
      return next[a.second] != next[b.second] ? next[a.second] > next[b.second] : a.second < b.second;
    });
    for (std::size_t k = 0; k < chosen.size();) {
      const Int place = next[chosen[k].second];
      closure.begin(*g);
      for (; k < chosen.size() && next[chosen[k].second] == place; ++k)
        closure.add(*g, lives, chosen[k].second, place, INT64_MAX);
      std::sort(closure.ops.begin(), closure.ops.end());
      for (Int op : closure.ops) total += g->seconds[op];
      sequence.insert(sequence.begin() + place, closure.ops.begin(), closure.ops.end());
    }
    if ((Int)sequence.size() > room) return -1;
  }
  *reached = profile.measure(*g, sequence);
  std::copy(sequence.begin(), sequence.end(), given);
  return (Int)sequence.size();
}

// Drop the runs at these places, in this order, each with the runs that only served it, while the profile stays within
// the budget: a value whose second run is gone lives on from the run before. Returns the new length.
Int lowtide_delete(const Problem *g, Int *given, Int length, const Int *candidates, Int number, Int budget) {
  std::vector<Int> sequence(given, given + length);
  Profile profile;
  profile.measure(*g, sequence);
  std::vector<Int> &bytes = profile.bytes, &saved = profile.saved;
  // The events of each value in order: runs that make it and runs that read it.
  struct Event { Int place; bool makes; };
  std::vector<Int> start(g->values + 1, 0);
  for (Int op : sequence) {
    for (Int k = g->read_start[op]; k < g->read_start[op + 1]; ++k) start[g->reads[k] + 1]++;
    for (Int k = g->make_start[op]; k < g->make_start[op + 1]; ++k) start[g->makes[k] + 1]++;
  }
  for (Int value = 0; value < g->values; ++value) start[value + 1] += start[value];
  std::vector<Event> events(start[g->values]);
  std::vector<Int> fill(start.begin(), start.end() - 1);
  std::vector<Byte> is_first(length, 0), seen(g->ops, 0), active(length, 1);
  for (Int place = 0; place < length; ++place) {
    const Int op = sequence[place];
    is_first[place] = !seen[op], seen[op] = 1;
    for (Int k = g->read_start[op]; k < g->read_start[op + 1]; ++k) events[fill[g->reads[k]]++] = {place, false};
    for (Int k = g->make_start[op]; k < g->make_start[op + 1]; ++k) events[fill[g->makes[k]]++] = {place, true};
  }
  auto find = [&](Int value, Int place) {
    Int low = start[value], high = start[value + 1];
    while (low < high) {
      const Int middle = (low + high) / 2;
      if (events[middle].place < place) low = middle + 1; else high = middle;
    }
    return low;
  };
  // The last place up to which the value made at this event is read; `length` if it outlives the step.
  auto end_of = [&](Int value, Int event) {
    Int end = events[event].place, k = event + 1;
    for (; k < start[value + 1]; ++k) {
      if (!active[events[k].place]) continue;
      if (events[k].makes) break;
      end = events[k].place;
    }
    return k >= start[value + 1] && g->required[value] ? length : end;
  };
  struct Change { Int from, to, by; };
  std::vector<Change> changes;
  std::vector<std::pair<Int, Int>> unsaved;
  std::vector<Int> removed, queue;
  for (Int c = 0; c < number; ++c) {
    if (!active[candidates[c]]) continue;
    changes.clear(), removed.clear(), unsaved.clear();
    queue.assign(1, candidates[c]);
    bool fine = true;
    for (std::size_t head = 0; head < queue.size() && fine; ++head) {
      const Int place = queue[head], op = sequence[place];
      if (!active[place]) continue;
      for (Int k = g->make_start[op]; k < g->make_start[op + 1] && fine; ++k) {
        const Int value = g->makes[k], event = find(value, place);
        const Int end = end_of(value, event);
        if (end <= place) continue;
        Int before = event - 1, reader = -1;
        for (; before >= start[value]; --before) {
          if (!active[events[before].place]) continue;
          if (reader < 0) reader = events[before].place;
          if (events[before].makes) break;
        }
        if (before < start[value]) { fine = false; break; }
        if (reader + 1 <= place - 1) changes.push_back({reader + 1, place - 1, g->bytes[value]});
        if (saved[reader] > 0) unsaved.emplace_back(reader, saved[reader]);
        // At its own place the value was counted as made, and is counted on as living through.
        changes.push_back({place, place, g->bytes[value]});
      }
      if (!fine) break;
      Int own = g->extra[op] - saved[place];
      for (Int k = g->make_start[op]; k < g->make_start[op + 1]; ++k) own += g->bytes[g->makes[k]];
      changes.push_back({place, place, -own});
      active[place] = 0;
      removed.push_back(place);
      for (Int k = g->read_start[op]; k < g->read_start[op + 1]; ++k) {
        const Int value = g->reads[k];
        if (g->maker[value] < 0) continue;
        const Int event = find(value, place);
        bool later = false;
        Int after = event + 1;
        for (; after < start[value + 1]; ++after) {
          if (!active[events[after].place]) continue;
          later = !events[after].makes;
          break;
        }
        if (later || (after >= start[value + 1] && g->required[value])) continue;
        Int before = event - 1, reader = -1, made = -1;
        for (; before >= start[value]; --before) {
          if (!active[events[before].place]) continue;
          if (reader < 0) reader = events[before].place;
          if (events[before].makes) { made = events[before].place; break; }
        }
        if (made < 0) continue;
        changes.push_back({reader + 1, place, -g->bytes[value]});
        if (reader != made) continue;
        const Int maker = sequence[made];
        bool useful = is_first[made] && g->pinned[maker];
        for (Int j = g->make_start[maker]; j < g->make_start[maker + 1] && !useful; ++j)
          useful = end_of(g->makes[j], find(g->makes[j], made)) > made;
        if (!useful) queue.push_back(made);
      }
    }
    if (fine) {
      for (const auto &change : changes)
        for (Int place = change.from; place <= change.to; ++place) bytes[place] += change.by;
      for (const auto &[place, by] : unsaved) bytes[place] += by;
      for (const auto &change : changes)
        for (Int place = change.from; place <= change.to && fine; ++place)
          fine = !active[place] || change.by <= 0 || bytes[place] <= budget;
      for (const auto &[place, by] : unsaved) fine = fine && (!active[place] || bytes[place] <= budget);
      if (!fine) {
        for (const auto &change : changes)
          for (Int place = change.from; place <= change.to; ++place) bytes[place] -= change.by;
        for (const auto &[place, by] : unsaved) bytes[place] -= by;
      } else {
        for (const auto &[place, by] : unsaved) saved[place] = 0;
      }
    }
    if (!fine)
      for (Int place : removed) active[place] = 1;
  }
  Int kept = 0;
  for (Int place = 0; place < length; ++place)
    if (active[place]) given[kept++] = sequence[place];
  return kept;
}

}  // extern "C"
