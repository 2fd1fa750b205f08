// What torch's batch norm keeps of one channel, from its sums: the same numbers, rounded in the same places.

#pragma once

#include <cmath>
#include <cstdint>

#include "threads.hpp"

namespace {

// `squares` is the sum of squared distances from the mean over `count` elements.
template <typename Norm>
INLINE void keep_statistics(const Norm& norm, int64_t channel, float mean, double squares, int64_t count) {
  const float momentum = static_cast<float>(norm.momentum), rest = 1 - momentum;
  const float away = static_cast<float>(squares);
  const double variance = away / static_cast<float>(count);
  const double sharp = variance != 0 || norm.epsilon != 0 ? 1 / std::sqrt(variance + norm.epsilon) : 0;
  norm.mean[channel] = mean;
  norm.scale[channel] = static_cast<float>(sharp);
  if (norm.running_mean != nullptr) {
    norm.running_mean[channel] = momentum * mean + rest * norm.running_mean[channel];
  }
  if (norm.running_var != nullptr) {
    const double unbiased = away / static_cast<float>(count - 1);
    norm.running_var[channel] = static_cast<float>(momentum * unbiased + rest * norm.running_var[channel]);
  }
}

}  // namespace
