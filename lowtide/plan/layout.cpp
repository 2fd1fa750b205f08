// The inner loops of layout: first fit, and a search for offsets below a height.
//
// Think of time as the ground and of bytes as height: a buffer is a box over the times of its life, and boxes are
// piled so that none meets another. Times are half open: [first, last).

#include "doors.hpp"
#include "settings.hpp"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <queue>
#include <stdexcept>
#include <utility>
#include <vector>

namespace {

// Whether each box is there for a while, and not after so many times.
bool boxes(Int count, const Int *first, const Int *last, const Int *bytes, Int times) {
  if (count < 0 || times < 0 || !within(first, count, 0, times) || !within(bytes, count, 0, MOST)) return false;
  for (Int box = 0; box < count; ++box)
    if (last[box] <= first[box] || last[box] > times) return false;
  return true;
}

struct Box { Int offset, end, first, last; };

// The boxes that lie already, by offset; a second time for each stretch of time, so that short boxes look at few.
class Pile {
 public:
  explicit Pile(Int until) : width_(until / STRETCHES + 1), stretches_(STRETCHES) {}

  void add(const Box &box) {
    insert(all_, box);
    for (Int k = box.first / width_; k <= (box.last - 1) / width_; ++k) insert(stretches_[k], box);
  }

  // The lowest offset with room for so many bytes all the time.
  Int fit(Int first, Int last, Int bytes) const {
    const Int from = first / width_, to = (last - 1) / width_;
    Int low = 0;
    for (const Box &box : from == to ? stretches_[from] : all_) {
      if (box.last <= first || box.first >= last) continue;
      if (box.offset - low >= bytes) break;
      low = std::max(low, box.end);
    }
    return low;
  }

 private:
  Int width_;
  std::vector<Box> all_;
  std::vector<std::vector<Box>> stretches_;

  static void insert(std::vector<Box> &boxes, const Box &box) {
    auto lower = [](const Box &a, const Box &b) { return a.offset < b.offset; };
    boxes.insert(std::upper_bound(boxes.begin(), boxes.end(), box, lower), box);
  }
};

// Depth-first search for a pile below a height, from the ground up.
//
// The skyline is how high the pile is at each time. A valley is a run of times of equal height between higher
// ones. On a time of a valley lies next a box that fits between its walls, or there is a hole; a hole is too deep
// where what is still to come at that time has no room above it. So each step takes the narrowest valley, and in it
// the time with the most to come, and tries the boxes that may lie there, the one of highest priority first.
// Boxes that cannot lie on a dead end gain priority, for the rest of the search and for the next one.
class Skyline {
 public:
  Skyline(Int count, const Int *first, const Int *last, const Int *bytes, Int times, Int height,
          const double *weight, Int *blamed)
      : offset(count, -1), count_(count), times_(times), height_(height), first_(first), last_(last),
        bytes_(bytes), weight_(weight), blamed_(blamed), top_(times, 0), still_(times, 0), starts_(times + 1, 0),
        starting_(count), before_(count + 1), after_(count + 1) {
    for (Int box = 0; box < count; ++box) {
      starts_[first[box] + 1]++;
      for (Int t = first[box]; t < last[box]; ++t) still_[t] += bytes[box];
    }
    for (Int t = 0; t < times; ++t) starts_[t + 1] += starts_[t];
    std::vector<Int> next(starts_.begin(), starts_.end() - 1);
    for (Int box = 0; box < count; ++box) starting_[next[first[box]]++] = box;
    for (Int box = 0; box <= count; ++box) before_[(box + 1) % (count + 1)] = box, after_[box] = (box + 1) % (count + 1);
    note_valleys(0, times);
  }

  std::vector<Int> offset;  // of each box; -1 while it does not lie

  // 1: all boxes lie; 0: not after so many steps; -1: no pile is as low as that.
  int run(Int steps) {
    if (!count_) return 1;
    open();
    while (!path_.empty()) {
      Step &step = path_.back();
      if (step.box >= 0) take(step);
      if (step.hole || dead(step)) {
        if (step.hole) set_top(step.hole_from, step.hole_to, step.floor);
        choices_.resize(step.begin);
        path_.pop_back();
        continue;
      }
      if (steps-- == 0) return 0;
      if (step.next < choices_.size()) {
        put(step, choices_[step.next++]);
        if (after_[count_] == count_) return 1;
      } else {
        step.hole = true;
        set_top(step.hole_from, step.hole_to, step.wall);
      }
      open();
    }
    return -1;
  }

 private:
  struct Step {
    Int floor, wall;         // height of the valley, and of where a hole in it ends
    Int time;                // the one with the most to come
    Int hole_from, hole_to;  // times of the hole that is the last resort
    std::size_t begin, next; // of its choices, and the one to try next
    Int box = -1;            // that lies
    bool hole = false;       // is there
  };

  const Int count_, times_, height_;
  const Int *first_, *last_, *bytes_;
  const double *weight_;
  Int *blamed_;
  std::vector<Int> top_;                // the skyline
  std::vector<Int> still_;              // bytes still to come at each time
  std::vector<Int> starts_, starting_;  // time -> boxes that start there
  std::vector<Int> before_, after_;     // a ring of the boxes that do not lie, and of `count_`
  std::vector<Step> path_;
  std::vector<Int> choices_, boxes_, covers_;
  using Valley = std::pair<Int, Int>;  // width and first time
  std::priority_queue<Valley, std::vector<Valley>, std::greater<Valley>> valleys_;  // some are gone by now

  // The run of times with the skyline of this one, and whether it is a valley.
  bool valley_at(Int time, Int &left, Int &right) const {
    left = time, right = time + 1;
    while (left > 0 && still_[left - 1] && top_[left - 1] == top_[time]) --left;
    while (right < times_ && still_[right] && top_[right] == top_[time]) ++right;
    return wall(left - 1) > top_[time] && wall(right) > top_[time];
  }

  Int wall(Int time) const {
    return time < 0 || time >= times_ || !still_[time] ? INT64_MAX : top_[time];
  }

  void note_valleys(Int from, Int to) {
    for (Int t = std::max<Int>(from - 1, 0); t < std::min(to + 1, times_);) {
      Int left = t, right = t + 1;
      if (still_[t] && valley_at(t, left, right)) valleys_.emplace(right - left, left);
      t = right;
    }
  }

  Valley narrowest() {
    for (;; valleys_.pop()) {
      if (valleys_.empty()) throw std::logic_error("no valley");
      const auto [width, first] = valleys_.top();
      Int left, right;
      if (!still_[first] || !valley_at(first, left, right)) continue;
      if (left == first && right - left == width) return valleys_.top();
    }
  }

  void set_top(Int from, Int to, Int height) {
    std::fill(top_.begin() + from, top_.begin() + to, height);
    note_valleys(from, to);
  }

  void open() {
    const auto [width, left] = narrowest();
    const Int right = left + width;
    Step step{top_[left], std::min(wall(left - 1), wall(right)), left, 0, 0, choices_.size(), choices_.size()};
    boxes_.clear(), covers_.assign(width + 1, 0);
    for (Int k = starts_[left]; k < starts_[right]; ++k) {
      const Int box = starting_[k];
      if (offset[box] >= 0 || last_[box] > right) continue;
      boxes_.push_back(box), covers_[first_[box] - left]++, covers_[last_[box] - left]--;
    }
    for (Int k = 1; k <= width; ++k) covers_[k] += covers_[k - 1];
    for (Int t = left + 1; t < right; ++t) {
      const Int more = still_[t] - still_[step.time];
      if (more > 0 || (more == 0 && covers_[t - left] < covers_[step.time - left])) step.time = t;
    }
    step.hole_from = step.time, step.hole_to = step.time + 1;
    for (Int box : boxes_) {
      if (first_[box] <= step.time && step.time < last_[box])
        choices_.push_back(box);
      else if (covers_[step.time - left])  // another box of the valley may carry one over the hole
        step.wall = std::min(step.wall, step.floor + bytes_[box]);
    }
    if (step.begin == choices_.size()) {
      while (step.hole_from > left && !covers_[step.hole_from - 1 - left]) --step.hole_from;
      while (step.hole_to < right && !covers_[step.hole_to - left]) ++step.hole_to;
    }
    auto priority = [&](Int box) { return weight_[box] * (double)(1 + blamed_[box]); };
    std::stable_sort(choices_.begin() + step.begin, choices_.end(),
                     [&](Int a, Int b) { return priority(a) > priority(b); });
    path_.push_back(step);
  }

  // Whether all is tried, and the hole is too deep.
  bool dead(Step &step) {
    while (step.next < choices_.size() && tried(step)) ++step.next;
    if (step.next < choices_.size()) return false;
    bool deep = step.wall == INT64_MAX;
    for (Int t = step.hole_from; t < step.hole_to && !deep; ++t) deep = step.wall + still_[t] > height_;
    if (deep && step.begin == choices_.size())
      for (Int box = after_[count_]; box != count_; box = after_[box])
        if (first_[box] <= step.time && step.time < last_[box]) ++blamed_[box];
    return deep;
  }

  // Whether a box of the same life and size was tried in this step.
  bool tried(const Step &step) const {
    const Int box = choices_[step.next];
    return std::any_of(choices_.begin() + step.begin, choices_.begin() + step.next, [&](Int other) {
      return first_[other] == first_[box] && last_[other] == last_[box] && bytes_[other] == bytes_[box];
    });
  }

  void put(Step &step, Int box) {
    step.box = box, offset[box] = step.floor;
    before_[after_[box]] = before_[box], after_[before_[box]] = after_[box];
    for (Int t = first_[box]; t < last_[box]; ++t) still_[t] -= bytes_[box];
    set_top(first_[box], last_[box], step.floor + bytes_[box]);
  }

  void take(Step &step) {
    const Int box = step.box;
    step.box = -1, offset[box] = -1;
    before_[after_[box]] = after_[before_[box]] = box;
    for (Int t = first_[box]; t < last_[box]; ++t) still_[t] += bytes_[box];
    set_top(first_[box], last_[box], step.floor);
  }
};

}  // namespace

extern "C" {

// Give the buffers in `order` the lowest offsets with room, one after the other; all others that have one keep it.
Int lowtide_first_fit(Int count, const Int *first, const Int *last, const Int *bytes, const Int *order, Int length,
                      Int *offset) {
  if (!boxes(count, first, last, bytes, MOST) || length < 0 || !within(order, length, 0, count)) return REFUSED;
  if (!within(offset, count, -1, MOST)) return REFUSED;
  return answered([&] {
    Int until = 1;
    for (Int box = 0; box < count; ++box) until = std::max(until, last[box]);
    Pile pile(until);
    for (Int box = 0; box < count; ++box)
      if (offset[box] >= 0) pile.add({offset[box], offset[box] + bytes[box], first[box], last[box]});
    for (Int k = 0; k < length; ++k) {
      const Int box = order[k];
      offset[box] = pile.fit(first[box], last[box], bytes[box]);
      pile.add({offset[box], offset[box] + bytes[box], first[box], last[box]});
    }
    return 0;
  });
}

// Offsets below a height, within so many steps: 1 if they are found, -1 if there are none, 0 if neither is known.
Int lowtide_skyline(Int count, const Int *first, const Int *last, const Int *bytes, Int times, Int height, Int steps,
                    const double *weight, Int *blamed, Int *offset) {
  if (!boxes(count, first, last, bytes, times) || !within(bytes, count, 1, MOST)) return REFUSED;
  if (!finite(weight, count) || !within(blamed, count, 0, MOST)) return REFUSED;
  return answered([&]() -> Int {
    Skyline skyline(count, first, last, bytes, times, height, weight, blamed);
    const int found = skyline.run(steps);
    if (found == 1) std::copy(skyline.offset.begin(), skyline.offset.end(), offset);
    return found;
  });
}

}  // extern "C"
