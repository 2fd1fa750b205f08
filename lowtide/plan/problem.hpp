// A graph with its costs as the inner loops of the planner read it: flat arrays, all of them the caller's.
#pragma once

#include "doors.hpp"

#include <utility>
#include <vector>

using Byte = uint8_t;
using Sequence = std::vector<Int>;

extern "C" struct Problem {
  Int ops, values;
  const Int *read_start, *reads;      // op -> values that it reads
  const Int *make_start, *makes;      // op -> values that it makes
  const Int *over_start, *over_made, *over_read;  // op -> pairs: made may take the bytes of read
  const Int *bytes;                   // of each value; 0 for what is there all the time
  const Int *maker;                   // of each value; -1 for an input
  const Int *killer;                  // op that writes over an input for good; -1
  const Int *temporaries;             // bytes that each op allocates and frees
  const double *seconds;              // of each op
  const Int *row_start;               // value -> rows of alternatives: what may be kept instead of it
  const Int *keeper;                  // of each row: the value that is kept
  const Int *store_start, *stores;    // row -> ops that make the keeper, in order; none: it is made anyway
  const Int *restore_start, *restores;  // row -> ops that make the value again, in order
  const Int *instead_start, *instead_of, *instead_op;  // row -> readers, and the ops that read the keeper in their place
  const Byte *required;               // values that outlive the step
  const Byte *pinned;                 // ops whose first run must stay where it is
  const Byte *repeatable;             // ops that may run again
  const Byte *optional;               // ops that need not run
  const Byte *restoring;              // of these, ops that make a value again from what was kept instead of it
  const Byte *once;                   // values that only a first run makes: what it leaves in parameters and the like
  Int tokens;                         // the first of the values that are tokens
  const Int *fetch, *away;            // of each value: the op that copies it back, and the token that it needs; -1
  const Byte *kind;                   // of each op: RUN, SEND, LEAVE or FETCH
  const Int *lane;                    // of each op that is a copy: the engine that it runs on
  const double *transfer;             // of each op that is a copy: seconds for its bytes
  Int lanes;                          // engines that copy
  const double *latency, *takes;      // of each: seconds before the bytes, and the part of compute's speed that it takes
};

namespace {

enum Kind : Byte { RUN, SEND, LEAVE, FETCH };
constexpr Int MOST_LANES = 8;
constexpr double SLOWEST = 0.05;  // of compute's speed: what copies leave of it at least; FLOOR of engines.py

// Whether every number of a problem is one that the loops below can follow; its flat arrays have these lengths.
bool fits(const Problem &g, Int reads, Int makes, Int overs, Int rows, Int stores, Int restores, Int insteads) {
  const Int ops = g.ops, values = g.values;
  if (ops < 0 || values < 0 || ops > MOST || values > MOST) return false;
  if (!ragged(g.read_start, ops, reads) || !ragged(g.make_start, ops, makes) || !ragged(g.over_start, ops, overs) ||
      !ragged(g.row_start, values, rows) || !ragged(g.store_start, rows, stores) ||
      !ragged(g.restore_start, rows, restores) || !ragged(g.instead_start, rows, insteads))
    return false;
  for (const auto &[numbers, count] : {std::pair{g.reads, reads}, {g.makes, makes}, {g.over_made, overs},
                                       {g.over_read, overs}, {g.keeper, rows}})
    if (!within(numbers, count, 0, values)) return false;
  for (const auto &[numbers, count] :
       {std::pair{g.stores, stores}, {g.restores, restores}, {g.instead_of, insteads}, {g.instead_op, insteads}})
    if (!within(numbers, count, 0, ops)) return false;
  if (!within(g.maker, values, -1, ops) || !within(g.killer, values, -1, ops)) return false;
  if (!within(g.bytes, values, 0, MOST) || !within(g.temporaries, ops, 0, MOST)) return false;
  if (g.tokens < 0 || g.tokens > values || g.lanes < 0 || g.lanes > MOST_LANES) return false;
  if (!within(g.fetch, values, -1, ops) || !within(g.away, values, -1, values)) return false;
  if (!finite(g.transfer, ops) || !finite(g.latency, g.lanes) || !finite(g.takes, g.lanes)) return false;
  for (Int op = 0; op < ops; ++op) {
    const Byte kind = g.kind[op];
    if (kind > FETCH || (kind != RUN && (g.lane[op] < 0 || g.lane[op] >= g.lanes))) return false;
    // What a copy moves is the first that it reads, or that it makes.
    if ((kind == SEND || kind == LEAVE) && g.read_start[op] == g.read_start[op + 1]) return false;
    if (kind == FETCH && g.make_start[op] == g.make_start[op + 1]) return false;
  }
  return finite(g.seconds, ops);
}

}  // namespace
