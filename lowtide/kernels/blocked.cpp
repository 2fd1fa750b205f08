// Batch norm of tensors in blocks of 16 channels, alone or with what is added to it and the ReLU behind it. Each channel's
// numbers are added up as torch does it in plain order: its sums over an image have eight lanes, those over images are in
// double. What lies side by side here are 16 channels, so that no sum depends on another one.

#include <cmath>
#include <cstdint>

#include "statistics.hpp"
#include "threads.hpp"

namespace {

constexpr int kBlock = 16;  // channels
constexpr int kLanes = 8;   // of torch's sums over an image

struct Norm {
  const float *input, *weight, *bias, *added;  // all but the input may be missing
  float *running_mean, *running_var;           // and these
  float *out, *mean, *scale;
  int64_t images, channels, image;
  double momentum, epsilon;
  int64_t rectified, fused;  // fused: whether torch's shift (1) and result (2) are rounded once, not twice
};

struct Back {
  const float *gradient, *input, *weight, *bias, *mean, *scale;
  const float* result;  // of the ReLU: the gradient counts where it is above zero; may be missing
  float *out, *weight_gradient, *bias_gradient;
  int64_t images, channels, image;
  int64_t again;  // whether the gradient counts where the batch norm, made again, is above zero
  int64_t fused;  // as in Norm; and torch's gradient (4), and its sums behind the last eight places of an image (8)
};

struct Line {
  float shift[kBlock], factor[kBlock];
};

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
  const float* start = norm.input + first * norm.image;
  double sum[kBlock] = {};
  for (int64_t n = 0; n < norm.images; ++n) {
    const float* x = start + n * norm.channels * norm.image;
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
    const float* x = start + n * norm.channels * norm.image;
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
  for (int64_t n = 0; n < norm.images; ++n) {
    const int64_t at = (n * norm.channels + first) * norm.image;
    const float *x = norm.input + at, *more = adds ? norm.added + at : nullptr;
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

// The gradient of one place, for all channels of the block: zero where the ReLU was not above zero.
template <bool once, bool again, bool seen>
INLINE void counted(const Back& back, const Line& to, int64_t at, float* made) {
  for (int k = 0; k < kBlock; ++k) {
    const float gradient = back.gradient[at + k];
    if (again) {
      made[k] = along<once>(back.input[at + k], to.factor[k], to.shift[k]) <= 0.0f ? 0.0f : gradient;
    } else if (seen) {
      made[k] = back.result[at + k] <= 0.0f ? 0.0f : gradient;
    } else {
      made[k] = gradient;
    }
  }
}

struct Sums {
  double gradient[kBlock], product[kBlock];
};

// One place more in a lane of the sums; `first`: the lane begins with it; `fused`: the product is not rounded before.
template <bool once, bool again, bool seen>
INLINE void add_place(const Back& back, const Line& to, const float* mean, int64_t at, bool first, bool fused,
                      float* gradients, float* products) {
  float one[kBlock];
  counted<once, again, seen>(back, to, at, one);
  for (int k = 0; k < kBlock; ++k) {
    const float away = back.input[at + k] - mean[k];
    gradients[k] = first ? one[k] : gradients[k] + one[k];
    products[k] = first ? away * one[k] : fused ? std::fma(away, one[k], products[k]) : products[k] + away * one[k];
  }
}

// What an image adds: eight lanes, each with every eighth place, and then these in torch's order. Fewer places than
// lanes are added up one by one.
template <bool once, bool again, bool seen>
INLINE void add_image(const Back& back, const Line& to, const float* mean, int64_t at, Sums& sums) {
  float gradients[kLanes][kBlock], products[kLanes][kBlock];
  const int64_t end = at + back.image * kBlock;
  if (back.image < kLanes) {
    for (int64_t place = at; place < end; place += kBlock) {
      add_place<once, again, seen>(back, to, mean, place, place == at, false, gradients[0], products[0]);
    }
  } else {
    int64_t place = at;
    for (int lane = 0; lane < kLanes; ++lane, place += kBlock) {
      add_place<once, again, seen>(back, to, mean, place, true, false, gradients[lane], products[lane]);
    }
    for (; place + kLanes * kBlock <= end; place += kLanes * kBlock) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const int64_t here = place + lane * kBlock;
        add_place<once, again, seen>(back, to, mean, here, false, false, gradients[lane], products[lane]);
      }
    }
    for (int lane = 0; place < end; ++lane, place += kBlock) {
      const bool fused = (back.fused & 8) != 0;
      add_place<once, again, seen>(back, to, mean, place, false, fused, gradients[lane], products[lane]);
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

template <bool once, bool again, bool seen>
INLINE void propagate(const Back& back, int64_t block) {
  const int64_t first = block * kBlock, count = back.images * back.image;
  const float *mean = back.mean + first, *scale = back.scale + first, *weight = from(back.weight, first);
  const Line to = line(mean, scale, weight, from(back.bias, first), back.fused);
  Sums sums = {};
  for (int64_t n = 0; n < back.images; ++n) {
    add_image<once, again, seen>(back, to, mean, (n * back.channels + first) * back.image, sums);
  }
  float slope[kBlock], middle[kBlock], factor[kBlock];
  for (int k = 0; k < kBlock; ++k) {
    slope[k] = static_cast<float>(sums.product[k]) * scale[k] * scale[k] / static_cast<float>(count);
    middle[k] = static_cast<float>(sums.gradient[k] / static_cast<double>(count));
    factor[k] = weight != nullptr ? weight[k] : 1.0f;
    back.weight_gradient[first + k] = static_cast<float>(sums.product[k] * scale[k]);
    back.bias_gradient[first + k] = static_cast<float>(sums.gradient[k]);
  }
  float one[kBlock];
  for (int64_t n = 0; n < back.images; ++n) {
    const int64_t at = (n * back.channels + first) * back.image;
    for (int64_t i = at; i < at + kBlock * back.image; i += kBlock) {
      counted<once, again, seen>(back, to, i, one);
      for (int k = 0; k < kBlock; ++k) {
        const float away = back.input[i + k] - mean[k], above = one[k] - middle[k];
        const float rest = (back.fused & 4) != 0 ? std::fma(-away, slope[k], above) : above - away * slope[k];
        back.out[i + k] = rest * scale[k] * factor[k];
      }
    }
  }
}

template <bool once>
INLINE void propagate(const Back& back, int64_t block) {
  if (back.again != 0) {
    propagate<once, true, false>(back, block);
  } else if (back.result != nullptr) {
    propagate<once, false, true>(back, block);
  } else {
    propagate<once, false, false>(back, block);
  }
}

FOR_EACH_PROCESSOR void propagate_any(const Back& back, int64_t block) {
  if ((back.fused & 2) != 0) {
    propagate<true>(back, block);
  } else {
    propagate<false>(back, block);
  }
}

}  // namespace

extern "C" {

void lowtide_blocked_norm(const Norm* norm, int64_t threads) {
  share(norm->channels / kBlock, threads, [=](int64_t block) { normalize(*norm, block); });
}

void lowtide_blocked_norm_backward(const Back* back, int64_t threads) {
  share(back->channels / kBlock, threads, [=](int64_t block) { propagate_any(*back, block); });
}

}  // extern "C"
