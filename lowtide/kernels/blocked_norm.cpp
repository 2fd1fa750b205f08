// Batch norm of tensors in blocks of 16 channels, alone or with what is added to it and the ReLU behind it. Each channel's
// numbers are added up as torch does it in plain order: its sums over an image have eight lanes, those over images are in
// double. What lies side by side here are 16 channels, so that no sum depends on another one.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "statistics.hpp"
#include "threads.hpp"

namespace {

constexpr int kBlock = 16;  // channels
constexpr int kLanes = 8;   // of torch's sums over an image

// Channels that are read one behind the other from several tensors, as if these had been put together.
struct Part {
  const float* start;
  int64_t channels;
};

// A block of channels: where it begins in the first image, and how far it is to the next.
struct Block {
  const float* start;
  int64_t stride;
};

struct Norm {
  const Part* parts;
  const float *weight, *bias, *added;  // may be missing
  float *running_mean, *running_var;           // and these
  float *out, *mean, *scale;
  int64_t images, channels, image;
  double momentum, epsilon;
  int64_t rectified, fused;  // fused: whether torch's shift (1) and result (2) are rounded once, not twice
};

struct Back {
  const Part* parts;
  const float *gradient, *more, *weight, *bias, *mean, *scale;  // more: is added to the gradient; it may be missing
  const float* result;  // of the ReLU: the gradient counts where it is above zero; may be missing
  float *out, *counted, *weight_gradient, *bias_gradient;  // counted: the sum of both where it counts; may be missing
  int64_t images, channels, image;
  int64_t again;  // whether the gradient counts where the batch norm, made again, is above zero
  int64_t fused;  // as in Norm; and torch's gradient (4), and its sums behind the last eight places of an image (8)
};

struct Line {
  float shift[kBlock], factor[kBlock];
};

INLINE Block find(const Part* part, int64_t block, int64_t image) {
  int64_t first = block * kBlock;
  for (; first >= part->channels; ++part) {
    first -= part->channels;
  }
  return {part->start + first * image, part->channels * image};
}

// What each channel is multiplied with, and what is added then.
INLINE Line line(const float* mean, const float* scale, const float* weight, const float* bias, int64_t fused) {
  Line made;
  for (int k = 0; k < kBlock; ++k) {
    const float factor = weight != nullptr ? scale[k] * weight[k] : scale[k], start = bias != nullptr ? bias[k] : 0.0f;
    made.factor[k] = factor;
    made.shift[k] = (fused & 1) != 0 ? std::fma(-mean[k], factor, start) : start - mean[k] * factor;
  }
  return made;
}

template <bool once>
INLINE float along(float number, float factor, float shift) {
  return once ? std::fma(number, factor, shift) : number * factor + shift;
}

INLINE const float* from(const float* start, int64_t offset) {
  return start == nullptr ? nullptr : start + offset;
}

INLINE void count_statistics(const Norm& norm, int64_t block) {
  const int64_t count = norm.images * norm.image, first = block * kBlock;
  const Block input = find(norm.parts, block, norm.image);
  double sum[kBlock] = {};
  for (int64_t n = 0; n < norm.images; ++n) {
    const float* x = input.start + n * input.stride;
    for (int64_t i = 0; i < norm.image; ++i) {
      for (int k = 0; k < kBlock; ++k) {
        sum[k] += x[kBlock * i + k];
      }
    }
  }
  float mean[kBlock];
  double squares[kBlock] = {};
  for (int k = 0; k < kBlock; ++k) {
    mean[k] = static_cast<float>(sum[k] / static_cast<double>(count));
  }
  for (int64_t n = 0; n < norm.images; ++n) {
    const float* x = input.start + n * input.stride;
    for (int64_t i = 0; i < norm.image; ++i) {
      for (int k = 0; k < kBlock; ++k) {
        const float away = x[kBlock * i + k] - mean[k];
        squares[k] += away * away;
      }
    }
  }
  for (int k = 0; k < kBlock; ++k) {
    keep_statistics(norm, first + k, mean[k], squares[k], count);
  }
}

template <bool once, bool adds, bool rectifies>
INLINE void apply(const Norm& norm, int64_t block) {
  const int64_t first = block * kBlock;
  const Line to = line(norm.mean + first, norm.scale + first, from(norm.weight, first), from(norm.bias, first), norm.fused);
  const Block input = find(norm.parts, block, norm.image);
  for (int64_t n = 0; n < norm.images; ++n) {
    const int64_t at = (n * norm.channels + first) * norm.image;
    const float *x = input.start + n * input.stride, *more = adds ? norm.added + at : nullptr;
    float* y = norm.out + at;
    for (int64_t i = 0; i < norm.image * kBlock; i += kBlock) {
      for (int k = 0; k < kBlock; ++k) {
        float made = along<once>(x[i + k], to.factor[k], to.shift[k]);
        made = adds ? made + more[i + k] : made;
        y[i + k] = rectifies && made < 0.0f ? 0.0f : made;  // -0.0 stays, as in torch
      }
    }
  }
}

template <bool once>
INLINE void apply(const Norm& norm, int64_t block) {
  if (norm.added != nullptr) {
    norm.rectified != 0 ? apply<once, true, true>(norm, block) : apply<once, true, false>(norm, block);
  } else {
    norm.rectified != 0 ? apply<once, false, true>(norm, block) : apply<once, false, false>(norm, block);
  }
}

FOR_EACH_PROCESSOR void normalize(const Norm& norm, int64_t block) {
  count_statistics(norm, block);
  if ((norm.fused & 2) != 0) {
    apply<true>(norm, block);
  } else {
    apply<false>(norm, block);
  }
}

// What a gradient is made of: whether another one is added, and where it counts.
enum class Counts { always, made_again, seen };

// The gradient of one place, for all channels of the block: zero where the ReLU was not above zero.
template <bool once, bool two, Counts counts>
INLINE void count(const Back& back, const Line& to, const float* x, int64_t at, float* made) {
  for (int k = 0; k < kBlock; ++k) {
    const float gradient = two ? back.gradient[at + k] + back.more[at + k] : back.gradient[at + k];
    if (counts == Counts::made_again) {
      made[k] = along<once>(x[k], to.factor[k], to.shift[k]) <= 0.0f ? 0.0f : gradient;
    } else if (counts == Counts::seen) {
      made[k] = back.result[at + k] <= 0.0f ? 0.0f : gradient;
    } else {
      made[k] = gradient;
    }
  }
}

struct Sums {
  double gradient[kBlock], product[kBlock];
};

// The sums over one image, as torch adds them up: eight lanes, each with every eighth place, and then these in its order.
// Fewer places than lanes are added up one by one.
template <bool once, bool two, Counts counts>
struct Image {
  const Back& back;
  const Line& to;
  const float* mean;
  float gradients[kLanes][kBlock], products[kLanes][kBlock];

  // One place more in a lane; `first`: the lane begins with it; `fused`: the product is not rounded before.
  INLINE void add(const float* x, int64_t at, int lane, bool first, bool fused) {
    float one[kBlock];
    count<once, two, counts>(back, to, x, at, one);
    if (back.counted != nullptr) {
      for (int k = 0; k < kBlock; ++k) {
        back.counted[at + k] = one[k];
      }
    }
    float *sum = gradients[lane], *product = products[lane];
    for (int k = 0; k < kBlock; ++k) {
      const float away = x[k] - mean[k];
      sum[k] = first ? one[k] : sum[k] + one[k];
      product[k] = first ? away * one[k] : fused ? std::fma(away, one[k], product[k]) : product[k] + away * one[k];
    }
  }

  INLINE void add_all(const float* x, int64_t at, Sums& sums) {
    const int64_t places = back.image;
    if (places < kLanes) {
      for (int64_t place = 0; place < places; ++place) {
        add(x + place * kBlock, at + place * kBlock, 0, place == 0, false);
      }
    } else {
      for (int lane = 0; lane < kLanes; ++lane) {
        add(x + lane * kBlock, at + lane * kBlock, lane, true, false);
      }
      int64_t place = kLanes;
      for (; place + kLanes <= places; place += kLanes) {
        for (int lane = 0; lane < kLanes; ++lane) {
          add(x + (place + lane) * kBlock, at + (place + lane) * kBlock, lane, false, false);
        }
      }
      for (int lane = 0; place < places; ++lane, ++place) {
        add(x + place * kBlock, at + place * kBlock, lane, false, (back.fused & 8) != 0);
      }
      for (int apart : {4, 2, 1}) {
        for (int lane = 0; lane < apart; ++lane) {
          for (int k = 0; k < kBlock; ++k) {
            gradients[lane][k] += gradients[lane + apart][k];
            products[lane][k] += products[lane + apart][k];
          }
        }
      }
    }
    for (int k = 0; k < kBlock; ++k) {
      sums.gradient[k] += gradients[0][k];
      sums.product[k] += products[0][k];
    }
  }
};

template <bool once, bool two, Counts counts>
INLINE void propagate(const Back& back, int64_t block) {
  const int64_t first = block * kBlock, places = back.images * back.image;
  const float *mean = back.mean + first, *scale = back.scale + first, *weight = from(back.weight, first);
  const Line to = line(mean, scale, weight, from(back.bias, first), back.fused);
  const Block input = find(back.parts, block, back.image);
  Sums sums = {};
  Image<once, two, counts> image{back, to, mean, {}, {}};
  for (int64_t n = 0; n < back.images; ++n) {
    image.add_all(input.start + n * input.stride, (n * back.channels + first) * back.image, sums);
  }
  float slope[kBlock], middle[kBlock], factor[kBlock];
  for (int k = 0; k < kBlock; ++k) {
    slope[k] = static_cast<float>(sums.product[k]) * scale[k] * scale[k] / static_cast<float>(places);
    middle[k] = static_cast<float>(sums.gradient[k] / static_cast<double>(places));
    factor[k] = weight != nullptr ? weight[k] : 1.0f;
    back.weight_gradient[first + k] = static_cast<float>(sums.product[k] * scale[k]);
    back.bias_gradient[first + k] = static_cast<float>(sums.gradient[k]);
  }
  float one[kBlock];
  for (int64_t n = 0; n < back.images; ++n) {
    const int64_t at = (n * back.channels + first) * back.image;
    const float* x = input.start + n * input.stride;
    for (int64_t i = 0; i < kBlock * back.image; i += kBlock) {
      if (back.counted != nullptr) {
        std::copy_n(back.counted + at + i, kBlock, one);
      } else {
        count<once, two, counts>(back, to, x + i, at + i, one);
      }
      for (int k = 0; k < kBlock; ++k) {
        const float away = x[i + k] - mean[k], above = one[k] - middle[k];
        const float rest = (back.fused & 4) != 0 ? std::fma(-away, slope[k], above) : above - away * slope[k];
        back.out[at + i + k] = rest * scale[k] * factor[k];
      }
    }
  }
}

template <bool once, bool two>
INLINE void propagate(const Back& back, int64_t block) {
  if (back.again != 0) {
    propagate<once, two, Counts::made_again>(back, block);
  } else if (back.result != nullptr) {
    propagate<once, two, Counts::seen>(back, block);
  } else {
    propagate<once, two, Counts::always>(back, block);
  }
}

FOR_EACH_PROCESSOR void propagate_once(const Back& back, int64_t block) {
  back.more != nullptr ? propagate<true, true>(back, block) : propagate<true, false>(back, block);
}

FOR_EACH_PROCESSOR void propagate_twice(const Back& back, int64_t block) {
  back.more != nullptr ? propagate<false, true>(back, block) : propagate<false, false>(back, block);
}

}  // namespace

extern "C" {

void lowtide_blocked_norm(const Norm* norm, int64_t threads) {
  share(norm->channels / kBlock, threads, [=](int64_t block) { normalize(*norm, block); });
}

void lowtide_blocked_norm_backward(const Back* back, int64_t threads) {
  share(back->channels / kBlock, threads, [=](int64_t block) {
    (back->fused & 2) != 0 ? propagate_once(*back, block) : propagate_twice(*back, block);
  });
}

}  // extern "C"
