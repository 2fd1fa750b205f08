// Changes of a sequence that keep it valid: shaving its peak, pruning and dropping runs, moving its copies.
//
// A copy to another place and back is three ops of the sequence: *send* starts to copy a value away, *leave* waits until it
// is there, *fetch* starts to copy it back. Between send and fetch stand *tokens*, values without bytes. So the lives of
// values say what copies hold, and nothing below knows more of them than their time, which is no sum: `retime` lets
// copies begin as early, and be waited for as late, as the budget has room.
#pragma once

#include "clock.hpp"
#include "lives.hpp"
#include "settings.hpp"

#include <deque>

namespace {

// How to shave.
struct Manner {
  Int batch, rounds, room, smallest, work;
  double penalty, most_seconds;
  const double *weight;  // of each value: how dear it is to let go
  double rate = 0;       // the price of a second of copying, in seconds: some of it hides behind ops, some does not
};

struct Planner {
  const Problem &g;
  Int work = 0;
  Profile profile;
  Lives lives;
  Closure closure;

  explicit Planner(const Problem &problem) : g(problem) {}

  Int measure(const Sequence &sequence) {
    work += (Int)sequence.size();
    return profile.measure(g, sequence);
  }

  // The seconds of all ops, and what copies take from them while they run.
  double seconds(const Sequence &sequence) const {
    double total = 0;
    for (Int op : sequence) total += g.seconds[op];
    return total;
  }

  // What an op is held to cost where the time of copies is not known yet.
  double price(Int op, double rate) const {
    return g.kind[op] == SEND || g.kind[op] == FETCH ? g.seconds[op] + rate * (g.latency[g.lane[op]] + g.transfer[op])
                                                     : g.seconds[op];
  }

  // The value that a copy moves.
  Int moved(Int op) const { return g.kind[op] == FETCH ? g.makes[g.make_start[op]] : g.reads[g.read_start[op]]; }

  void tighten(Sequence &sequence);
  double retime(const Sequence &tight, Int budget, Sequence *out);

  Int made_bytes(Int op) const {
    Int sum = 0;
    for (Int k = g.make_start[op]; k < g.make_start[op + 1]; ++k) sum += g.bytes[g.makes[k]];
    return sum;
  }

  // The op that reads the keeper of a row in the place of this reader; -1: none.
  Int instead(Int row, Int reader) const {
    for (Int k = g.instead_start[row]; k < g.instead_start[row + 1]; ++k)
      if (g.instead_of[k] == reader) return g.instead_op[k];
    return -1;
  }

  // A way to be without a value from its last use before the peak to its next one.
  struct Eviction {
    enum Way { again, restored, replaced } way;
    double score;
    Int value, from, to;
    Int row = -1;  // of the alternatives, unless the value is made again
  };

  // Lower the peak to the budget: at the highest place take the idle value with the least seconds for the bytes that it
  // frees above the budget: make it again before its next reader, or keep something else until then; a batch of them at
  // a time. False where the sequence becomes longer than the room; then it is as it was.
  bool shave(Sequence &sequence, Int budget, const Manner &how) {
    const Sequence before = sequence;
    const Int end = work + how.work;
    double total = seconds(sequence);
    touched.resize(g.values), next.resize(g.values), reads_after.resize(g.values);
    for (Int round = 0; round < how.rounds; ++round) {
      const Int peak = measure(sequence);
      if (sequence.empty() || peak <= budget || total > how.most_seconds || work > end) break;
      const Int top = std::max_element(profile.bytes.begin(), profile.bytes.end()) - profile.bytes.begin();
      look_around(sequence, top, budget);
      choose(sequence, top, budget, how);
      if (chosen.empty()) break;
      Int freed = 0;
      std::size_t used = 0;
      while (used < chosen.size() && freed < peak - budget && (used == 0 || chosen[used].score <= TOGETHER * chosen[0].score))
        freed += g.bytes[chosen[used++].value];
      chosen.resize(used);
      total += apply(sequence);
      if ((Int)sequence.size() > how.room) {
        sequence = before;
        return false;
      }
    }
    return true;
  }

  // Drop runs whose results nobody reads before they are made again.
  void prune(Sequence &sequence) {
    work += (Int)sequence.size();
    runs_of.assign(g.ops, 0), first_of.assign(g.ops, 0);
    for (Int place = (Int)sequence.size() - 1; place >= 0; --place)
      runs_of[sequence[place]]++, first_of[sequence[place]] = place;
    alive.assign(g.required, g.required + g.values);
    dropped.assign(sequence.size(), 0);
    bool any = false;
    for (Int place = (Int)sequence.size() - 1; place >= 0; --place) {
      const Int op = sequence[place];
      if ((g.kind[op] == SEND || g.kind[op] == LEAVE) && first_of[op] != place) {  // it is elsewhere already
        dropped[place] = 1, any = true;
        continue;
      }
      bool useful = runs_of[op] == 1 ? !g.optional[op] : g.pinned[op] && first_of[op] == place;
      for (Int k = g.make_start[op]; k < g.make_start[op + 1] && !useful; ++k) useful = alive[g.makes[k]];
      if (!useful) {
        dropped[place] = 1, runs_of[op]--, any = true;
        continue;
      }
      for (Int k = g.make_start[op]; k < g.make_start[op + 1]; ++k) alive[g.makes[k]] = 0;
      for (Int k = g.read_start[op]; k < g.read_start[op + 1]; ++k) alive[g.reads[k]] = 1;
    }
    if (!any) return;
    Int kept = 0;
    for (std::size_t place = 0; place < sequence.size(); ++place)
      if (!dropped[place]) sequence[kept++] = sequence[place];
    sequence.resize(kept);
  }

  // Places of runs that could go: repeats, and runs that make again what was made before.
  void repeats(const Sequence &sequence, std::vector<Int> &places) {
    runs_of.assign(g.ops, 0);
    places.clear();
    for (Int place = 0; place < (Int)sequence.size(); ++place) {
      const Int op = sequence[place];
      if (runs_of[op]++ || g.restoring[op]) places.push_back(place);
    }
  }

  void drop(Sequence &sequence, const std::vector<Int> &candidates, Int budget);

 private:
  std::vector<Int> touched, next, reads_after, runs_of, first_of;
  std::vector<Byte> alive, dropped;
  std::vector<double> above, count;
  std::vector<Eviction> chosen;
  std::vector<std::pair<Int, Sequence>> inserts;

  // Where each value was touched before the top, where it is read next, and the bytes above the budget between places.
  void look_around(const Sequence &sequence, Int top, Int budget) {
    const Int n = (Int)sequence.size();
    above.assign(n + 1, 0), count.assign(n + 1, 0);
    for (Int place = 0; place < n; ++place) {
      const Int over = std::max<Int>(0, profile.bytes[place] - budget);
      above[place + 1] = above[place] + (double)over, count[place + 1] = count[place] + (over > 0);
    }
    lives.find(g, sequence);
    std::fill(touched.begin(), touched.end(), -1), std::fill(next.begin(), next.end(), -1);
    std::fill(reads_after.begin(), reads_after.end(), 0);
    for (Int place = 0; place <= top; ++place) {
      const Int op = sequence[place];
      for (Int k = g.read_start[op]; k < g.read_start[op + 1]; ++k) touched[g.reads[k]] = place;
      for (Int k = g.make_start[op]; k < g.make_start[op + 1]; ++k) touched[g.makes[k]] = place;
    }
    for (Int place = n - 1; place > top; --place) {
      const Int op = sequence[place];
      for (Int k = g.make_start[op]; k < g.make_start[op + 1]; ++k) next[g.makes[k]] = -1, reads_after[g.makes[k]] = 0;
      for (Int k = g.read_start[op]; k < g.read_start[op + 1]; ++k) next[g.reads[k]] = place, reads_after[g.reads[k]]++;
    }
    work += 3 * n;
  }

  double area(Int from, Int to, Int bytes) const {
    return std::min(above[to] - above[from + 1], (double)bytes * (count[to] - count[from + 1]));
  }

  void choose(const Sequence &sequence, Int top, Int budget, const Manner &how) {
    chosen.clear();
    for (Int value = 0; value < g.values; ++value) {
      const Int from = touched[value], to = next[value];
      if (g.bytes[value] <= how.smallest || from < 0 || to < 0 || from >= top || g.required[value]) continue;
      if (g.maker[value] < 0) continue;
      const double all = area(from, to, g.bytes[value]);
      if (all <= 0) continue;
      Eviction best{Eviction::again, INFINITY, value, from, to};
      closure.begin(g);
      if (closure.add(g, lives, value, to, 3000)) {
        work += (Int)closure.ops.size();
        best.score = how.weight[value] * again_seconds(value, to, budget, all, how) / all;
      }
      for (Int row = g.row_start[value]; row < g.row_start[value + 1]; ++row) consider(sequence, row, best, how);
      if (best.score < INFINITY) chosen.push_back(best);
    }
    const std::size_t keep = std::min<std::size_t>(how.batch, chosen.size());
    std::partial_sort(chosen.begin(), chosen.begin() + keep, chosen.end(), [](const Eviction &a, const Eviction &b) {
      return a.score != b.score ? a.score < b.score : a.value < b.value;
    });
    chosen.resize(keep);
  }

  // Seconds of the closure, dearer where its own bytes would stand out above the budget.
  double again_seconds(Int value, Int to, Int budget, double all, const Manner &how) const {
    const double penalty = how.penalty;
    double seconds = 0;
    Int widest = 0;
    for (Int op : closure.ops) {
      seconds += price(op, how.rate);
      if (penalty <= 0) continue;
      Int width = g.temporaries[op] + made_bytes(op);
      for (Int k = g.read_start[op]; k < g.read_start[op + 1]; ++k)
        if (!lives.at(g, g.reads[k], to)) width += g.bytes[g.reads[k]];
      widest = std::max(widest, width);
    }
    if (penalty > 0) {
      const double excess = (double)(profile.bytes[to] - profile.made[to] - g.bytes[value] + widest - budget);
      if (excess > 0) seconds *= 1 + penalty * excess * (double)closure.ops.size() / all;
    }
    return seconds;
  }

  // Whether the ops of a row that make its value again would find before a place what they read.
  bool restorable(Int row, Int place) const {
    for (Int k = g.restore_start[row]; k < g.restore_start[row + 1]; ++k)
      for (Int j = g.read_start[g.restores[k]]; j < g.read_start[g.restores[k] + 1]; ++j) {
        const Int read = g.reads[j];
        bool there = read == g.keeper[row] || lives.at(g, read, place);
        for (Int earlier = g.restore_start[row]; earlier < k && !there; ++earlier)
          for (Int i = g.make_start[g.restores[earlier]]; i < g.make_start[g.restores[earlier] + 1]; ++i)
            there |= g.makes[i] == read;
        if (!there) return false;
      }
    return true;
  }

  void consider(const Sequence &sequence, Int row, Eviction &best, const Manner &how) const {
    const Int value = best.value, keeper = g.keeper[row], reader = sequence[best.to];
    const bool stored = lives.at(g, keeper, best.to);
    if (!stored && g.store_start[row] == g.store_start[row + 1]) return;
    double seconds = 0;
    for (Int k = g.store_start[row]; k < g.store_start[row + 1] && !stored; ++k) seconds += price(g.stores[k], how.rate);
    Eviction::Way way;
    if (g.restore_start[row] < g.restore_start[row + 1]) {
      if (!restorable(row, best.to)) return;
      double back = 0;
      for (Int k = g.restore_start[row]; k < g.restore_start[row + 1]; ++k) back += price(g.restores[k], how.rate);
      seconds += back;
      way = Eviction::restored;
    } else if (const Int other = instead(row, reader); other >= 0 && reads_after[value] == 1) {
      seconds += g.seconds[other] - g.seconds[reader];
      way = Eviction::replaced;
    } else {
      return;
    }
    const double all = area(best.from, best.to, g.bytes[value] - (stored ? 0 : g.bytes[keeper]));
    if (all <= 0) return;
    const double score = how.weight[value] * std::max(seconds, 1e-12) / all;
    if (score < best.score) best.score = score, best.way = way, best.row = row;
  }

  // Carry out what was chosen, from the end of the sequence to its beginning; the seconds that it adds.
  double apply(Sequence &sequence) {
    std::sort(chosen.begin(), chosen.end(), [](const Eviction &a, const Eviction &b) {
      return a.to != b.to ? a.to > b.to : a.value < b.value;
    });
    double added = 0;
    inserts.clear();
    for (std::size_t k = 0; k < chosen.size();) {
      const Int place = chosen[k].to;
      Sequence first;
      closure.begin(g);
      for (; k < chosen.size() && chosen[k].to == place; ++k) {
        const Eviction &one = chosen[k];
        if (one.way == Eviction::again) {
          closure.add(g, lives, one.value, place, INT64_MAX);
          continue;
        }
        if (!lives.at(g, g.keeper[one.row], place))
          inserts.push_back({one.from + 1, Sequence(g.stores + g.store_start[one.row], g.stores + g.store_start[one.row + 1])});
        if (one.way == Eviction::replaced) {
          const Int other = instead(one.row, sequence[place]);
          if (other < 0) continue;  // another one of its arguments has been replaced before
          added += g.seconds[other] - g.seconds[sequence[place]];
          sequence[place] = other;
        } else {
          first.insert(first.end(), g.restores + g.restore_start[one.row], g.restores + g.restore_start[one.row + 1]);
        }
      }
      const Sequence &again = closure.in_order(g);
      first.insert(first.end(), again.begin(), again.end());
      if (!first.empty()) inserts.push_back({place, first});
    }
    std::stable_sort(inserts.begin(), inserts.end(), [](const auto &a, const auto &b) { return a.first > b.first; });
    for (const auto &[place, ops] : inserts) {
      for (Int op : ops) added += g.seconds[op];
      sequence.insert(sequence.begin() + place, ops.begin(), ops.end());
    }
    return added;
  }
};

// Drop the runs at these places, in this order, each with the runs that only served it, while the profile stays within
// the budget: a value whose second run is gone lives on from the run before.
void Planner::drop(Sequence &sequence, const std::vector<Int> &candidates, Int budget) {
  const Int length = (Int)sequence.size();
  measure(sequence);
  std::vector<Int> &bytes = profile.bytes, &saved = profile.saved;
  // The events of each value in order: runs that make it and runs that read it.
  struct Event { Int place; bool makes; };
  std::vector<Int> start(g.values + 1, 0);
  for (Int op : sequence) {
    for (Int k = g.read_start[op]; k < g.read_start[op + 1]; ++k) start[g.reads[k] + 1]++;
    for (Int k = g.make_start[op]; k < g.make_start[op + 1]; ++k) start[g.makes[k] + 1]++;
  }
  for (Int value = 0; value < g.values; ++value) start[value + 1] += start[value];
  std::vector<Event> events(start[g.values]);
  std::vector<Int> fill(start.begin(), start.end() - 1);
  std::vector<Byte> is_first(length, 0), seen(g.ops, 0), active(length, 1);
  for (Int place = 0; place < length; ++place) {
    const Int op = sequence[place];
    is_first[place] = !seen[op], seen[op] = 1;
    for (Int k = g.read_start[op]; k < g.read_start[op + 1]; ++k) events[fill[g.reads[k]]++] = {place, false};
    for (Int k = g.make_start[op]; k < g.make_start[op + 1]; ++k) events[fill[g.makes[k]]++] = {place, true};
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
    return k >= start[value + 1] && g.required[value] ? length : end;
  };
  struct Change { Int from, to, by; };
  std::vector<Change> changes;
  std::vector<std::pair<Int, Int>> unsaved;
  std::vector<Int> removed, queue;
  for (Int candidate : candidates) {
    if (!active[candidate]) continue;
    changes.clear(), removed.clear(), unsaved.clear();
    queue.assign(1, candidate);
    bool fine = true;
    for (std::size_t head = 0; head < queue.size() && fine; ++head) {
      const Int place = queue[head], op = sequence[place];
      if (!active[place]) continue;
      for (Int k = g.make_start[op]; k < g.make_start[op + 1] && fine; ++k) {
        const Int value = g.makes[k], event = find(value, place);
        const Int end = end_of(value, event);
        if (end <= place) continue;
        Int before = event - 1, reader = -1;
        for (; before >= start[value]; --before) {
          if (!active[events[before].place]) continue;
          if (reader < 0) reader = events[before].place;
          if (events[before].makes) break;
        }
        if (before < start[value]) { fine = false; break; }
        if (reader + 1 <= place - 1) changes.push_back({reader + 1, place - 1, g.bytes[value]});
        if (saved[reader] > 0) unsaved.emplace_back(reader, saved[reader]);
        // At its own place the value was counted as made, and is counted on as living through.
        changes.push_back({place, place, g.bytes[value]});
      }
      if (!fine) break;
      Int own = g.temporaries[op] - saved[place];
      for (Int k = g.make_start[op]; k < g.make_start[op + 1]; ++k) own += g.bytes[g.makes[k]];
      changes.push_back({place, place, -own});
      active[place] = 0;
      removed.push_back(place);
      for (Int k = g.read_start[op]; k < g.read_start[op + 1]; ++k) {
        const Int value = g.reads[k];
        if (g.maker[value] < 0) continue;
        const Int event = find(value, place);
        bool later = false;
        Int after = event + 1;
        for (; after < start[value + 1]; ++after) {
          if (!active[events[after].place]) continue;
          later = !events[after].makes;
          break;
        }
        if (later || (after >= start[value + 1] && g.required[value])) continue;
        Int before = event - 1, reader = -1, made = -1;
        for (; before >= start[value]; --before) {
          if (!active[events[before].place]) continue;
          if (reader < 0) reader = events[before].place;
          if (events[before].makes) { made = events[before].place; break; }
        }
        if (made < 0) continue;
        changes.push_back({reader + 1, place, -g.bytes[value]});
        if (reader != made) continue;
        const Int maker = sequence[made];
        bool useful = is_first[made] && g.pinned[maker];
        for (Int j = g.make_start[maker]; j < g.make_start[maker + 1] && !useful; ++j)
          useful = end_of(g.makes[j], find(g.makes[j], made)) > made;
        if (!useful) queue.push_back(made);
      }
    }
    if (fine) {
      for (const auto &change : changes) {
        work += change.to - change.from + 1;
        for (Int place = change.from; place <= change.to; ++place) bytes[place] += change.by;
      }
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
    if (active[place]) sequence[kept++] = sequence[place];
  sequence.resize(kept);
}

// Put copies where they hold the least: what is fetched right before its reader, what leaves right after its last use.
void Planner::tighten(Sequence &sequence) {
  const Int length = (Int)sequence.size();
  work += 2 * length;
  std::vector<Int> touched(g.values, -1), made(g.values, -1), next(g.values, -1);
  struct Key { Int place, side, op; };
  std::vector<Key> copies;
  for (Int place = 0; place < length; ++place) {
    const Int op = sequence[place];
    const Byte kind = g.kind[op];
    if (kind == SEND || kind == LEAVE) {
      const Int value = moved(op);
      copies.push_back({kind == SEND ? made[value] : touched[value], kind == SEND ? 2 : 3, op});
      continue;
    }
    for (Int k = g.read_start[op]; k < g.read_start[op + 1]; ++k) touched[g.reads[k]] = place;
    for (Int k = g.make_start[op]; k < g.make_start[op + 1]; ++k) touched[g.makes[k]] = made[g.makes[k]] = place;
  }
  for (Int place = length - 1; place >= 0; --place) {
    const Int op = sequence[place];
    const Byte kind = g.kind[op];
    if (kind == FETCH) {
      const Int reader = next[moved(op)];
      copies.push_back({reader < 0 ? place : reader, 0, op});
      next[moved(op)] = -1;
    } else if (kind == RUN) {
      for (Int k = g.read_start[op]; k < g.read_start[op + 1]; ++k) next[g.reads[k]] = place;
    }
  }
  std::stable_sort(copies.begin(), copies.end(), [](const Key &a, const Key &b) {
    return a.place != b.place ? a.place < b.place : a.side < b.side;
  });
  Sequence tight;
  tight.reserve(sequence.size());
  std::size_t k = 0;
  for (Int place = -1; place < length; ++place) {
    for (; k < copies.size() && copies[k].place == place && copies[k].side == 0; ++k) tight.push_back(copies[k].op);
    if (place >= 0 && g.kind[sequence[place]] == RUN) tight.push_back(sequence[place]);
    for (; k < copies.size() && copies[k].place == place; ++k) tight.push_back(copies[k].op);
  }
  sequence.swap(tight);
}

// The seconds of a tight sequence whose copies begin as early and are waited for as late as the budget has room; it goes
// to `out`. Backwards, what is fetched is fetched so much sooner that it is there in time, one after the other; forwards,
// what leaves stays until it is elsewhere. Every op finds the bytes of both within the budget.
double Planner::retime(const Sequence &tight, Int budget, Sequence *out) {
  const Int length = (Int)tight.size();
  measure(tight);
  std::vector<double> begins(length + 1, 0);
  std::vector<Int> held(profile.bytes), touched(g.values, -1), earliest(length, 0);
  for (Int place = 0; place < length; ++place) {
    const Int op = tight[place];
    begins[place + 1] = begins[place] + (g.kind[op] == RUN ? g.seconds[op] : 0);
    if (g.kind[op] == FETCH) earliest[place] = touched[moved(op)] + 1;
    for (Int k = g.read_start[op]; k < g.read_start[op + 1]; ++k) touched[g.reads[k]] = place;
    for (Int k = g.make_start[op]; k < g.make_start[op + 1]; ++k) touched[g.makes[k]] = place;
  }
  std::vector<Int> last(g.values, -1), dies(length, -1);  // where what leaves is read for the last time, maybe later
  for (Int place = length - 1; place >= 0; --place) {
    const Int op = tight[place];
    if (g.kind[op] == LEAVE) dies[place] = std::max(place, last[moved(op)]);
    if (g.kind[op] == SEND || g.kind[op] == LEAVE) continue;
    for (Int k = g.make_start[op]; k < g.make_start[op + 1]; ++k) last[g.makes[k]] = -1;
    for (Int k = g.read_start[op]; k < g.read_start[op + 1]; ++k)
      if (last[g.reads[k]] < 0) last[g.reads[k]] = place;
  }
  std::vector<std::pair<Int, Int>> fetches;  // the place that each begins before, and the op; the last first
  double busy[MOST_LANES];
  std::fill(busy, busy + MOST_LANES, INFINITY);
  for (Int place = length - 1; place >= 0; --place) {
    const Int op = tight[place];
    if (g.kind[op] != FETCH) continue;
    double &lane = busy[g.lane[op]];
    const Int bytes = g.bytes[moved(op)];
    const double start = std::min(begins[place], lane) - g.latency[g.lane[op]] - g.transfer[op];
    Int to = place;
    for (; to > earliest[place] && begins[to] > start && held[to - 1] + bytes <= budget; --to) held[to - 1] += bytes;
    lane = std::max(start, begins[to]);
    fetches.emplace_back(to, op);
    work += place - to + 1;
  }
  std::stable_sort(fetches.begin(), fetches.end(), [](const auto &a, const auto &b) { return a.first > b.first; });

  Clock clock(g);
  std::vector<double> arrival(g.values, 0), gone(g.values, 0);  // of what comes, and of what goes
  std::vector<Byte> pending(g.values, 0);
  std::deque<Int> leaving;
  std::vector<Int> from(g.values, 0), due(length + 2, 0);
  Int waiting = 0, now = 0;  // bytes of what is on its way out and would be gone
  auto put = [&](Int op) {
    if (out) out->push_back(op);
  };
  auto leave = [&] {
    const Int op = leaving.front(), value = moved(op);
    leaving.pop_front();
    clock.wait(gone[value]);
    pending[value] = 0;
    (from[value] > now ? due[from[value]] : waiting) -= g.bytes[value];
    put(op);
  };
  if (out) out->clear();
  for (Int place = 0; place < length; ++place) {
    now = place, waiting += due[place];
    while (!leaving.empty() && (gone[moved(leaving.front())] <= clock.now || held[place] + waiting > budget)) leave();
    for (; !fetches.empty() && fetches.back().first == place; fetches.pop_back()) {
      const Int op = fetches.back().second;
      while (pending[moved(op)]) leave();
      arrival[moved(op)] = clock.copy(op);
      put(op);
    }
    const Int op = tight[place];
    if (g.kind[op] == FETCH) continue;
    if (g.kind[op] == LEAVE) {
      leaving.push_back(op), pending[moved(op)] = 1;
      from[moved(op)] = dies[place] + 1, due[dies[place] + 1] += g.bytes[moved(op)];
      continue;
    }
    for (Int k = g.make_start[op]; k < g.make_start[op + 1]; ++k)
      while (pending[g.makes[k]]) leave();
    for (Int k = g.over_start[op]; k < g.over_start[op + 1]; ++k)  // a result may take its bytes
      while (pending[g.over_read[k]]) leave();
    for (Int k = g.read_start[op]; k < g.read_start[op + 1]; ++k) clock.wait(arrival[g.reads[k]]);
    if (g.kind[op] == SEND) gone[moved(op)] = clock.copy(op);
    else clock.run(g.seconds[op]);
    put(op);
  }
  while (!leaving.empty()) leave();
  work += 2 * length;
  return clock.now;
}

}  // namespace
