// The quickest sequence of runs within a budget, proven: A* from the end of the step to its start.
//
// A state is the set of items that are still to be made: values that a later run reads, flags of ops that have yet to
// run for the first time, saved states of the random generator. A move is one way to run an op: it makes some items and
// needs others. Seen from the end, what is alive at a run is known, and so are its bytes.

#include "doors.hpp"
#include "settings.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstdint>
#include <limits>
#include <queue>
#include <type_traits>
#include <vector>

using Word = uint64_t;

extern "C" struct Game {
  Int moves, items, ops, pairs;    // how many there are
  Int words;                       // of 64 bits, in every set
  const Int *op, *ticks, *weight;  // move -> its op; its cost; bytes that it needs besides what is alive before it
  const Int *pair_start, *pair_made, *pair_read, *pair_bytes;  // move -> results that may take an argument's bytes
  const Int *lazy;                 // move -> whether it makes nothing but its flag and takes no bytes
  const Int *bytes;                // of each item
  const Int *op_ticks;             // of each op
  const Word *makes, *needs;       // move -> items
  const Word *waits;               // move -> items that must be gone: flags of ops that may not run after it
  const Word *holds;               // move -> items that must be there: flags of ops that must run before it
  const Word *sole;                // items that only one op makes
  const Word *asks, *may;          // item -> ops that must run, or may run, before it is there
  const Word *lacks;               // item -> flags without which it can't be made any more
  const Word *start;               // what must be there when the step ends, and all flags
};

namespace {

// Whether none of these sets has a member beyond so many.
bool below(const Word *sets, Int rows, Int words, Int members) {
  for (Int k = 0; k < rows * words; ++k) {
    const Int held = std::clamp<Int>(members - k % words * 64, 0, 64);
    if (held < 64 && sets[k] >> held != 0) return false;
  }
  return true;
}

// Whether every number of a game is one that the search can follow.
bool fits(const Game &g) {
  if (g.moves < 0 || g.moves > std::numeric_limits<int16_t>::max() || g.items < 0 || g.ops < 0) return false;
  if (g.items > 64 * g.words || g.ops > 64 * g.words || g.pairs < 0 || !ragged(g.pair_start, g.moves, g.pairs))
    return false;
  if (!within(g.op, g.moves, 0, g.ops) || !within(g.pair_read, g.pairs, 0, g.items)) return false;
  for (const Int *numbers : {g.ticks, g.weight})
    if (!within(numbers, g.moves, 0, MOST)) return false;
  if (!within(g.bytes, g.items, 0, MOST) || !within(g.op_ticks, g.ops, 0, MOST)) return false;
  if (!within(g.pair_bytes, g.pairs, 0, MOST)) return false;
  for (const Word *sets : {g.makes, g.needs, g.waits, g.holds})
    if (!below(sets, g.moves, g.words, g.items)) return false;
  for (const Word *sets : {g.asks, g.may})
    if (!below(sets, g.items, g.words, g.ops)) return false;
  return below(g.lacks, g.items, g.words, g.items) && below(g.sole, 1, g.words, g.items) &&
         below(g.start, 1, g.words, g.items);
}

constexpr Int NOTHING_FITS = -1, GAVE_UP = -2;
constexpr Int MOST_STATES = 1 << 30;  // numbered with 32 bits
using Clock = std::chrono::steady_clock;

template <int W> struct Set {
  std::array<Word, W> words{};

  Set() = default;
  Set(const Word *from, Int row) { std::copy(from + row * W, from + (row + 1) * W, words.begin()); }
  bool operator==(const Set &) const = default;
  bool empty() const { return *this == Set(); }
  bool has(Int item) const { return words[item / 64] >> (item % 64) & 1; }
  Set operator|(const Set &o) const { return each_word(o, [](Word a, Word b) { return a | b; }); }
  Set operator&(const Set &o) const { return each_word(o, [](Word a, Word b) { return a & b; }); }
  Set operator-(const Set &o) const { return each_word(o, [](Word a, Word b) { return a & ~b; }); }

  template <class Join> Set each_word(const Set &o, Join join) const {
    Set result;
    for (int w = 0; w < W; ++w) result.words[w] = join(words[w], o.words[w]);
    return result;
  }
  template <class Visit> void each(Visit visit) const {
    for (int w = 0; w < W; ++w)
      for (Word rest = words[w]; rest; rest &= rest - 1) visit(w * 64 + std::countr_zero(rest));
  }
  Int sum(const Int *of) const {
    Int total = 0;
    each([&](Int item) { total += of[item]; });
    return total;
  }
};

template <int W> class Search {
 public:
  // With `peak_only` a path costs its peak and nothing else; otherwise its ticks, and its peak is within `budget`.
  Search(const Game &game, Int budget, bool peak_only)
      : g(game), budget(budget), peak_only(peak_only), sole(g.sole, 0) {
    for (Int m = 0; m < g.moves; ++m) moves.push_back({{g.makes, m}, {g.needs, m}, {g.waits, m}, {g.holds, m}});
    for (Int item = 0; item < g.items; ++item) {
      asks.emplace_back(g.asks, item), may.emplace_back(g.may, item), lacks.emplace_back(g.lacks, item);
    }
    find_lazy();
    State end{Set<W>(g.start, 0), 0};
    const bool possible = reachable(end);
    const Int least = std::max(end.items.sum(g.bytes), largest_op(end.ops));
    if (peak_only) end.cost = least;
    if (possible && (peak_only || least <= budget)) add(end, -1, -1, 0);
  }

  // The length of the best sequence, or why there is none. `answer`: a cost that no sequence is below; states met.
  Int run(Int limit, Clock::time_point until, Int *sequence, Int room, Int *answer) {
    for (Int expanded = 1; !queue.empty(); ++expanded) {
      const Entry top = queue.top();
      queue.pop();
      if (done[top.node]) continue;
      done[top.node] = 1;
      answer[0] = top.cost, answer[1] = (Int)nodes.size();
      if (nodes[top.node].items.empty()) return write(top.node, sequence, room);
      if ((Int)nodes.size() > limit || (expanded % 1024 == 0 && Clock::now() > until)) return GAVE_UP;
      expand(top.node);
    }
    answer[1] = (Int)nodes.size();
    return NOTHING_FITS;
  }

 private:
  struct Move { Set<W> makes, needs, waits, holds; };
  struct State { Set<W> items; Int cost; Set<W> ops; };  // ops: those that must still run
  struct Node { Set<W> items; Int cost; int32_t parent; int16_t move, chosen; };
  struct Child { State state; Int move, chosen; };
  struct Entry {
    Int cost, left;
    int32_t node;
    bool operator<(const Entry &o) const { return cost != o.cost ? cost > o.cost : left > o.left; }
  };

  // The most bytes that one of these ops needs by itself.
  Int largest_op(const Set<W> &ops) {
    Int largest = 0;
    ops.each([&](Int op) {
      Int least = std::numeric_limits<Int>::max();
      for (Int m = 0; m < g.moves; ++m)
        if (g.op[m] == op) least = std::min(least, moves[m].needs.sum(g.bytes) + g.weight[m] - saving(m, {}));
      largest = std::max(largest, least);
    });
    return largest;
  }

  // A first run that makes nothing but its flag and takes no bytes, such as the update of a parameter, is lazy: seen
  // from the end it only adds to what is alive. It is made together with the first move that depends on it.
  void find_lazy() {
    for (Int m = 0; m < g.moves; ++m)
      if (g.lazy[m]) lazy.push_back(m);
    for (Int m = 0; m < g.moves; ++m)
      if (feeders_of(moves[m].makes, Set<W>(g.start, 0)).size() > MOST_FEEDERS)
        std::erase_if(lazy, [&](Int u) { return !(moves[u].needs & moves[m].makes).empty(); });
    is_lazy.assign(g.moves, 0);
    for (Int u : lazy) is_lazy[u] = 1;
  }

  // The lazy moves yet to be made that need something of this.
  const std::vector<Int> &feeders_of(const Set<W> &made, const Set<W> &items) {
    feeders.clear();
    for (Int u : lazy)
      if (!(moves[u].makes & items).empty() && !(moves[u].needs & made).empty()) feeders.push_back(u);
    return feeders;
  }

  // Where the moves from a state lead, or only where one leads by which nothing is lost.
  void expand(int32_t index) {
    const State from{nodes[index].items, nodes[index].cost};
    const Int bytes = from.items.sum(g.bytes);
    // A move that must be made, will not be made again and needs no more bytes than it makes is best made at once.
    const auto at_once = [&](const State &to, Int m) {
      const bool once = (moves[m].makes - sole).empty() && !ever(to.items, g.op[m]);
      return once && to.items.sum(g.bytes) <= bytes && (!peak_only || to.cost <= from.cost);
    };
    for (Int u : lazy) {
      State to = from;
      if (make(to, u) && at_once(to, u)) return add(to, index, u, 0);
    }
    children.clear();
    for (Int m = 0; m < g.moves; ++m) {
      if (is_lazy[m]) continue;
      const Int subsets = Int(1) << feeders_of(moves[m].makes, from.items).size();
      for (Int chosen = 0; chosen < subsets; ++chosen) {
        State to = from;
        path.clear();
        if (!make_with(to, m, chosen)) continue;
        Set<W> others;  // what the lazy ones need besides
        for (Int u : path) others = others | (moves[u].needs - moves[m].makes - moves[m].needs - from.items);
        if (others.empty() && at_once(to, m)) return add(to, index, m, chosen);
        children.push_back({to, m, chosen});
      }
    }
    for (const Child &child : children) add(child.state, index, child.move, child.chosen);
  }

  // Make the chosen feeders of a move, whatever else must come first, and the move; all of them are in `path`.
  bool make_with(State &state, Int m, Int chosen) {
    if (chosen) {
      const std::vector<Int> candidates = feeders_of(moves[m].makes, state.items);
      for (std::size_t k = 0; k < candidates.size(); ++k)
        if (chosen >> k & 1 && !make_lazy(state, candidates[k])) return false;
    }
    return clear_way(state, m) && make(state, m);
  }

  bool make_lazy(State &state, Int u) {
    if ((moves[u].makes & state.items).empty()) return true;
    return clear_way(state, u) && make(state, u);
  }

  bool clear_way(State &state, Int m) {
    for (Int u : lazy)
      if (u != m && (!(moves[m].waits & moves[u].makes).empty() || !(moves[u].holds & moves[m].makes).empty()))
        if (!make_lazy(state, u)) return false;
    return true;
  }

  // One move; false if it is not allowed here, makes nothing that is wanted, or does not fit.
  bool make(State &state, Int m) {
    const Move &move = moves[m];
    if ((move.makes & state.items).empty() || !(move.waits & state.items).empty()) return false;
    if (!(move.holds - state.items).empty()) return false;
    const Set<W> after = state.items - move.makes;
    state.items = after | move.needs;
    const Int used = state.items.sum(g.bytes) + g.weight[m] - saving(m, after);
    if (!peak_only && used > budget) return false;
    state.cost = peak_only ? std::max(state.cost, used) : state.cost + g.ticks[m];
    path.push_back(m);
    return reachable(state);
  }

  // Find the ops that must still run; false if one of them has had its only chance.
  bool reachable(State &state) const {
    Set<W> flags;
    state.ops = {};
    state.items.each([&](Int item) { state.ops = state.ops | asks[item], flags = flags | lacks[item]; });
    return (flags - state.items).empty();
  }

  // Whether an op may still run before this state.
  bool ever(const Set<W> &items, Int op) const {
    bool found = false;
    items.each([&](Int item) { found |= may[item].has(op); });
    return found;
  }

  // The bytes of results that sit on arguments which die here, paired greedily as in lives.hpp.
  Int saving(Int m, const Set<W> &after) {
    Int total = 0;
    paired.clear();
    for (Int k = g.pair_start[m]; k < g.pair_start[m + 1]; ++k) {
      bool taken = after.has(g.pair_read[k]);
      for (Int j : paired) taken |= g.pair_read[j] == g.pair_read[k] || g.pair_made[j] == g.pair_made[k];
      if (taken) continue;
      paired.push_back(k);
      total += g.pair_bytes[k];
    }
    return total;
  }

  void add(const State &state, int32_t parent, Int move, Int chosen) {
    if (2 * nodes.size() >= table.size()) grow();
    int32_t &slot = find(state.items);
    if (slot >= 0 && nodes[slot].cost <= state.cost) return;
    const Node node{state.items, state.cost, parent, (int16_t)move, (int16_t)chosen};
    if (slot < 0) {
      slot = (int32_t)nodes.size();
      nodes.push_back(node), done.push_back(0);
    } else {
      nodes[slot] = node;
    }
    const Int left = state.ops.sum(g.op_ticks);
    queue.push({peak_only ? state.cost : state.cost + left, left, slot});
  }

  int32_t &find(const Set<W> &items) {
    Word hash = 0;
    for (Word word : items.words) hash = (hash ^ word) * 0x9E3779B97F4A7C15ull, hash ^= hash >> 32;
    std::size_t at = hash & (table.size() - 1);
    while (table[at] >= 0 && nodes[table[at]].items != items) at = (at + 1) & (table.size() - 1);
    return table[at];
  }

  void grow() {
    table.assign(std::max<std::size_t>(256, 2 * table.size()), -1);
    for (std::size_t n = 0; n < nodes.size(); ++n) find(nodes[n].items) = (int32_t)n;
  }

  // The search went from the end to the start, so the way back is the sequence.
  Int write(int32_t node, Int *sequence, Int room) {
    Int length = 0;
    for (; nodes[node].move >= 0; node = nodes[node].parent) {
      State state{nodes[nodes[node].parent].items, 0};
      path.clear();
      if (is_lazy[nodes[node].move]) path.push_back(nodes[node].move);
      else make_with(state, nodes[node].move, nodes[node].chosen);
      if (length + (Int)path.size() > room) return GAVE_UP;
      length = std::copy(path.rbegin(), path.rend(), sequence + length) - sequence;
    }
    return length;
  }

  const Game &g;
  const Int budget;
  const bool peak_only;
  const Set<W> sole;
  std::vector<Move> moves;
  std::vector<Set<W>> asks, may, lacks;
  std::vector<Int> lazy, feeders, path, paired;
  std::vector<uint8_t> is_lazy, done;
  std::vector<Node> nodes;
  std::vector<int32_t> table;  // hash of items -> node
  std::vector<Child> children;
  std::priority_queue<Entry> queue;
};

}  // namespace

extern "C" Int lowtide_exact(const Game *g, Int budget, Int limit, double seconds, Int peak_only, Int *sequence,
                             Int room, Int *answer) {
  if (g->words < 1 || g->words > 8 || !fits(*g) || room < 0 || limit > MOST_STATES) return REFUSED;
  const auto span = std::chrono::duration<double>(seconds < 1e7 ? std::max(seconds, 0.0) : 1e7);
  const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(span);
  const auto solve = [&](auto words) {
    return answered([&] {
      return Search<words()>(*g, budget, peak_only).run(limit, until, sequence, room, answer);
    });
  };
  switch (g->words) {
    case 1: return solve(std::integral_constant<int, 1>());
    case 2: return solve(std::integral_constant<int, 2>());
    case 4: return solve(std::integral_constant<int, 4>());
    case 8: return solve(std::integral_constant<int, 8>());
  }
  return REFUSED;
}
