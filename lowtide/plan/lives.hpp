// What a sequence of ops holds: its profile, where values are alive, and what must run again for one that is not.
//
// A sequence is a list of op numbers, some of them more than once. A value lives from a run that makes it to its last
// reader before the next run that makes it again; it is freed there. What may overwrite a dying argument does. So every
// change below leaves a valid sequence: what reads a value later than foreseen lets it live longer.
#pragma once

#include "problem.hpp"

namespace {

// What dies and what is made at each place of a sequence.
struct Profile {
  std::vector<Int> bytes;   // in use while the op at each place runs
  std::vector<Int> saved;   // bytes that are saved there because a result sits on a dying argument
  std::vector<Byte> alive;
  std::vector<Int> change, made, used;

  Int measure(const Problem &g, const Sequence &sequence) {
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
      bytes[place] = now + made[place] - saved[place] + g.temporaries[sequence[place]];
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
  std::vector<Int> killed_at;  // the place of the op that writes over it for good, or the end

  void find(const Problem &g, const Sequence &sequence) {
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
        if (g.maker[value] >= 0 && filled[value] > start[value]) last[filled[value] - 1] = place;
      }
      for (Int k = g.make_start[op]; k < g.make_start[op + 1]; ++k) {
        const Int value = g.makes[k];
        first[filled[value]] = last[filled[value]] = place;
        filled[value]++;
      }
    }
    for (Int value = 0; value < g.values; ++value) {
      if (g.killer[value] >= 0 && place_of[g.killer[value]] >= 0) killed_at[value] = place_of[g.killer[value]];
      if (g.required[value] && filled[value] > start[value]) last[filled[value] - 1] = length;
    }
  }

  bool at(const Problem &g, Int value, Int place) const {
    if (g.maker[value] < 0) return killed_at[value] >= place;
    if (g.once[value]) return start[value] < filled[value] && first[start[value]] < place && killed_at[value] >= place;
    if (value >= g.tokens) return start[value] < filled[value] && first[start[value]] < place;  // it may last for nothing
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
    if (lives.killed_at[value] < place || !enter(g, way_back(g, lives, value, place))) return false;
    for (; next < ops.size(); ++next) {
      if ((Int)ops.size() > limit) return false;
      const Int op = ops[next];
      for (Int k = g.read_start[op]; k < g.read_start[op + 1]; ++k) {
        const Int read = g.reads[k];
        if (lives.at(g, read, place)) continue;
        if (g.maker[read] < 0 || g.once[read] || lives.killed_at[read] < place) return false;
        if (!enter(g, way_back(g, lives, read, place))) return false;
      }
    }
    return true;
  }

  // The op that makes a value again: what copies it back where it is elsewhere, or its maker.
  Int way_back(const Problem &g, const Lives &lives, Int value, Int place) const {
    return g.away[value] >= 0 && lives.at(g, g.away[value], place) ? g.fetch[value] : g.maker[value];
  }

  // The ops in an order in which each finds what it reads: copies need nothing of the others.
  const Sequence &in_order(const Problem &g) {
    std::sort(ops.begin(), ops.end(), [&](Int a, Int b) {
      const bool first = g.kind[a] == FETCH, second = g.kind[b] == FETCH;
      return first != second ? first : a < b;
    });
    return ops;
  }

  bool enter(const Problem &g, Int op) {
    if (!g.repeatable[op]) return false;
    if (mark[op] != stamp) mark[op] = stamp, ops.push_back(op);
    return true;
  }
};

}  // namespace
