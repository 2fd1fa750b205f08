// Kernels that give the same bits as torch's own, sooner. Each does torch's additions in torch's order; what is new is
// that several independent sums run side by side, that vectors are used where the order allows it, and that nothing is
// done that the result does not depend on.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "draws.hpp"
#include "statistics.hpp"
#include "threads.hpp"

namespace {

// ------------------------------------------------------------------------------------------- draws, by the block

// Two draws make a number of 53 bits: 21 of the first above all 32 of the second.
FOR_EACH_PROCESSOR void compare(const uint32_t* drawn, float* out, int64_t count, int64_t below) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t number = (static_cast<int64_t>(drawn[2 * i] & 0x1fffffu) << 32) | drawn[2 * i + 1];
    out[i] = number < below ? 1.0f : 0.0f;
  }
}

// ----------------------------------------------------------------------------------- batch norm, eight channels a time

constexpr int kLanes = 8;
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef double Doubles __attribute__((vector_size(8 * kLanes)));

INLINE Floats load(const float* from) {
  Floats row;
  std::memcpy(&row, from, sizeof row);
  return row;
}

// Rows become columns.
INLINE void transpose(Floats* rows) {
  Floats pairs[kLanes], fours[kLanes];
  for (int i = 0; i < kLanes; i += 2) {
    pairs[i] = __builtin_shufflevector(rows[i], rows[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    pairs[i + 1] = __builtin_shufflevector(rows[i], rows[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < kLanes; i += 4) {
    for (int k = 0; k < 2; ++k) {
      fours[i + 2 * k] = __builtin_shufflevector(pairs[i + k], pairs[i + k + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      fours[i + 2 * k + 1] = __builtin_shufflevector(pairs[i + k], pairs[i + k + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = __builtin_shufflevector(fours[i], fours[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    rows[i + 4] = __builtin_shufflevector(fours[i], fours[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// Each lane adds up one channel, in double and in the order of memory: its numbers, or the squares, still in float, of
// how far they are from the middle.
template <bool squares>
INLINE Doubles added(const float* const* channels, int64_t batch, int64_t stride, int64_t image, Floats middle) {
  Doubles sum{};
  for (int64_t n = 0; n < batch; ++n) {
    const int64_t start = n * stride;
    int64_t i = 0;
    for (; i + kLanes <= image; i += kLanes) {
      Floats rows[kLanes];
      for (int k = 0; k < kLanes; ++k) {
        rows[k] = load(channels[k] + start + i);
      }
      transpose(rows);
      for (int k = 0; k < kLanes; ++k) {
        const Floats away = rows[k] - middle;
        sum += __builtin_convertvector(squares ? away * away : rows[k], Doubles);
      }
    }
    for (; i < image; ++i) {
      Floats row;
      for (int k = 0; k < kLanes; ++k) {
        row[k] = channels[k][start + i];
      }
      const Floats away = row - middle;
      sum += __builtin_convertvector(squares ? away * away : row, Doubles);
    }
  }
  return sum;
}

struct Norm {
  const float *input, *weight, *bias;  // weight and bias may be missing
  float *running_mean, *running_var;   // and these
  float *out, *mean, *scale;
  int64_t batch, channels, image;
  double momentum, epsilon;
  int64_t fused;  // whether torch's shift (1) and result (2) are rounded once, not twice
};

FOR_EACH_PROCESSOR void normalize(const Norm& norm, int64_t first) {
  const int64_t stride = norm.channels * norm.image, count = norm.batch * norm.image;
  const int lanes = static_cast<int>(std::min<int64_t>(kLanes, norm.channels - first));
  const float* channels[kLanes];
  for (int k = 0; k < kLanes; ++k) {
    channels[k] = norm.input + (first + std::min(k, lanes - 1)) * norm.image;
  }
  const Doubles sum = added<false>(channels, norm.batch, stride, norm.image, Floats{});
  Floats mean;
  for (int k = 0; k < kLanes; ++k) {
    mean[k] = static_cast<float>(sum[k] / static_cast<double>(count));
  }
  const Doubles squares = added<true>(channels, norm.batch, stride, norm.image, mean);
  for (int k = 0; k < lanes; ++k) {
    const int64_t c = first + k;
    keep_statistics(norm, c, mean[k], squares[k], count);
    const float factor = norm.weight != nullptr ? norm.scale[c] * norm.weight[c] : norm.scale[c];
    const float bias = norm.bias != nullptr ? norm.bias[c] : 0.0f;
    const float shift = (norm.fused & 1) != 0 ? std::fma(-mean[k], factor, bias) : bias - mean[k] * factor;
    for (int64_t n = 0; n < norm.batch; ++n) {
      const float* from = channels[k] + n * stride;
      float* to = norm.out + n * stride + c * norm.image;
      if ((norm.fused & 2) != 0) {
        for (int64_t i = 0; i < norm.image; ++i) {
          to[i] = std::fma(from[i], factor, shift);
        }
      } else {
        for (int64_t i = 0; i < norm.image; ++i) {
          to[i] = from[i] * factor + shift;
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------- max pooling, a row at a time

struct Pool {
  const float* input;
  float* out;
  int64_t* where;
  int64_t planes, height, width, out_height, out_width;
  int64_t kernel[2], stride[2], padding[2], dilation[2];
};

// The first place at or after the edge that a window starts with.
INLINE int64_t inside(int64_t start, int64_t dilation) {
  return start >= 0 ? start : start + (-start + dilation - 1) / dilation * dilation;
}

constexpr int64_t kAtATime = 512;  // places that are kept beside the results: no row is too long for the stack

// The places of a row of windows, from one to before another.
FOR_EACH_PROCESSOR void pool_row(const Pool& pool, int64_t number, int64_t line, int64_t from, int64_t to) {
  int32_t place[kAtATime];
  const int64_t step = pool.stride[1];
  const float* plane = pool.input + number * pool.height * pool.width;
  const int64_t top = line * pool.stride[0] - pool.padding[0];
  const int64_t row_start = (number * pool.out_height + line) * pool.out_width + from, count = to - from;
  float* most = pool.out + row_start;
  for (int64_t x = 0; x < count; ++x) {
    const int64_t left = inside((from + x) * step - pool.padding[1], pool.dilation[1]);
    most[x] = -std::numeric_limits<float>::infinity();
    place[x] = static_cast<int32_t>(inside(top, pool.dilation[0]) * pool.width + left);
  }
  for (int64_t i = 0; i < pool.kernel[0]; ++i) {
    const int64_t y = top + i * pool.dilation[0];
    if (y < 0 || y >= pool.height) {
      continue;
    }
    const float* row = plane + y * pool.width;
    for (int64_t j = 0; j < pool.kernel[1]; ++j) {
      const int64_t offset = from * step + j * pool.dilation[1] - pool.padding[1];
      const int64_t first = offset >= 0 ? 0 : (-offset + step - 1) / step;
      const int64_t last = std::min(count, offset >= pool.width ? 0 : (pool.width - 1 - offset) / step + 1);
      const int32_t at = static_cast<int32_t>(y * pool.width + offset);
      for (int64_t x = first; x < last; ++x) {
        const float value = row[offset + x * step];
        const bool better = (value > most[x]) | (value != value);
        most[x] = better ? value : most[x];
        place[x] = better ? at + static_cast<int32_t>(x * step) : place[x];
      }
    }
  }
  std::copy(place, place + count, pool.where + row_start);
}

void max_pool(const Pool& pool, int64_t number) {
  for (int64_t line = 0; line < pool.out_height; ++line) {
    for (int64_t from = 0; from < pool.out_width; from += kAtATime) {
      pool_row(pool, number, line, from, std::min(from + kAtATime, pool.out_width));
    }
  }
}

}  // namespace

extern "C" {

// Whether torch's threads were found; without them all work is done by the one that calls.
int64_t lowtide_has_threads() {
  return parallel != nullptr;
}

void lowtide_batch_norm(const Norm* norm, int64_t threads) {
  share((norm->channels + kLanes - 1) / kLanes, threads, [=](int64_t piece) { normalize(*norm, piece * kLanes); });
}

void lowtide_max_pool(const Pool* pool, int64_t threads) {
  share(pool->planes, threads, [=](int64_t piece) { max_pool(*pool, piece); });
}

// Fills `out` with ones where a draw of 53 bits is less than `below`, else with zeros; the state goes on as in torch.
// Returns 0, or 1 with nothing changed where this is no state that torch can have saved.
int64_t lowtide_bernoulli(Saved* state, float* out, int64_t count, int64_t below) {
  if (!Twister::is_sound(*state)) {
    return 1;
  }
  Twister twister(*state);
  uint32_t drawn[kWords + 1];
  int64_t held = 0;
  while (count > 0) {
    held += twister.draw(drawn + held, 2 * count - held);
    compare(drawn, out, held / 2, below);
    out += held / 2;
    count -= held / 2;
    drawn[0] = drawn[held - 1];  // half a number, where there is an odd one
    held %= 2;
  }
  twister.save(*state);
  return 0;
}

}  // extern "C"
