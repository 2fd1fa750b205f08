// What each source of the planner does at its doors: it looks at the numbers that it is given, and lets no exception out.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>

using Int = int64_t;

// What every function that is called from outside answers where it does not take what it was given, or has no memory.
constexpr Int REFUSED = -101, NO_MEMORY = -102;
constexpr Int MOST = Int(1) << 46;  // bytes or ticks of one thing: sums stay below what an integer holds

template <class Work> Int answered(Work work) noexcept {
  try {
    return work();
  } catch (const std::logic_error &) {  // a size or a place that is none
    return REFUSED;
  } catch (const std::exception &) {
    return NO_MEMORY;
  }
}

inline bool within(const Int *numbers, Int count, Int low, Int high) {
  return std::all_of(numbers, numbers + count, [=](Int number) { return low <= number && number < high; });
}

// Whether these are the starts of rows that end with so many items.
inline bool ragged(const Int *start, Int rows, Int items) {
  return start[0] == 0 && start[rows] == items && std::is_sorted(start, start + rows + 1);
}

inline bool finite(const double *numbers, Int count) {
  return std::all_of(numbers, numbers + count, [](double number) { return std::isfinite(number); });
}
