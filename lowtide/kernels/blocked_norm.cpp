// Batch norm of tensors in blocks of 16 channels, alone or with what is added to it and the ReLU behind it. Each channel's
// numbers are added up as torch does it in plain order: its sums over an image have eight lanes, those over images are in
// double. What lies side by side here are 16 channels, so that no sum depends on another one.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

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

// Places of an image that are looked at together: one for each lane of torch's sums.
using Lane = float[kBlock];
using Tile = float[kLanes][kBlock];

// The gradients of so many places: with what is added to them, and zero where the ReLU was not above zero.
INLINE void read_tile(const Back& back, const Line& to, const float* x, int64_t at, int64_t places, Tile& made) {
  const float* gradient = back.gradient + at;
  if (back.more != nullptr) {
    const float* more = back.more + at;
    for (int64_t p = 0; p < places; ++p) {
      for (int k = 0; k < kBlock; ++k) {
        made[p][k] = gradient[kBlock * p + k] + more[kBlock * p + k];
      }
    }
  } else {
    std::memcpy(made, gradient, places * sizeof(Lane));
  }
  if (back.again != 0 && (back.fused & 2) != 0) {
    for (int64_t p = 0; p < places; ++p) {
      for (int k = 0; k < kBlock; ++k) {
        made[p][k] = along<true>(x[kBlock * p + k], to.factor[k], to.shift[k]) <= 0.0f ? 0.0f : made[p][k];
      }
    }
  } else if (back.again != 0) {
    for (int64_t p = 0; p < places; ++p) {
      for (int k = 0; k < kBlock; ++k) {
        made[p][k] = along<false>(x[kBlock * p + k], to.factor[k], to.shift[k]) <= 0.0f ? 0.0f : made[p][k];
      }
    }
  } else if (back.result != nullptr) {
    const float* result = back.result + at;
    for (int64_t p = 0; p < places; ++p) {
      for (int k = 0; k < kBlock; ++k) {
        made[p][k] = result[kBlock * p + k] <= 0.0f ? 0.0f : made[p][k];
      }
    }
  }
}

struct Sums {
  double gradient[kBlock], product[kBlock];
};

// One place more in a lane of the gradients and of their products with the input; lanes begin with -0.0, which adds
// nothing. Torch's compiler has rounded some products before their sum and others with it.
template <bool fused>
INLINE void add_place(const Lane& one, const float* x, const Lane& mean, Lane& gradients, Lane& products) {
  for (int k = 0; k < kBlock; ++k) {
    const float away = x[k] - mean[k];
    gradients[k] += one[k];
    products[k] = fused ? std::fma(away, one[k], products[k]) : products[k] + away * one[k];
  }
}

// What an image adds: eight lanes, each with every eighth place, and then these in torch's order. Fewer places than
// lanes are added up one by one.
INLINE void add_image(const Back& back, const Line& to, const Lane& mean, const float* x, int64_t at, Sums& sums) {
  Tile one, gradients, products;
  std::fill_n(&gradients[0][0], kLanes * kBlock, -0.0f);
  std::fill_n(&products[0][0], kLanes * kBlock, -0.0f);
  const auto keep = [&](int64_t places) {
    if (back.counted != nullptr) {
      std::memcpy(back.counted + at, one, places * sizeof(Lane));
    }
  };
  int64_t left = back.image;
  for (; left >= kLanes; left -= kLanes, x += kLanes * kBlock, at += kLanes * kBlock) {
    read_tile(back, to, x, at, kLanes, one);
    keep(kLanes);
    for (int lane = 0; lane < kLanes; ++lane) {
      add_place<false>(one[lane], x + lane * kBlock, mean, gradients[lane], products[lane]);
    }
  }
  read_tile(back, to, x, at, left, one);
  keep(left);
  const bool one_by_one = back.image < kLanes, fused = !one_by_one && (back.fused & 8) != 0;
  for (int64_t p = 0; p < left; ++p) {
    const int64_t lane = one_by_one ? 0 : p;
    if (fused) {
      add_place<true>(one[p], x + p * kBlock, mean, gradients[lane], products[lane]);
    } else {
      add_place<false>(one[p], x + p * kBlock, mean, gradients[lane], products[lane]);
    }
  }
  for (int apart = one_by_one ? 0 : kLanes / 2; apart > 0; apart /= 2) {
    for (int lane = 0; lane < apart; ++lane) {
      for (int k = 0; k < kBlock; ++k) {
        gradients[lane][k] += gradients[lane + apart][k];
        products[lane][k] += products[lane + apart][k];
      }
    }
  }
  for (int k = 0; k < kBlock; ++k) {
    sums.gradient[k] += gradients[0][k];
    sums.product[k] += products[0][k];
  }
}

// What the gradient of a place of the input depends on besides, for each channel of a block.
struct Slope {
  Lane mean, scale, weight, slope, middle;
};

template <bool fused>
INLINE void write_tile(const Slope& of, const Tile& one, const float* x, int64_t places, float* out) {
  for (int64_t p = 0; p < places; ++p) {
    Lane made;
    for (int k = 0; k < kBlock; ++k) {
      const float away = x[kBlock * p + k] - of.mean[k], above = one[p][k] - of.middle[k];
      made[k] = (fused ? std::fma(-away, of.slope[k], above) : above - away * of.slope[k]) * of.scale[k] * of.weight[k];
    }
    std::memcpy(out + kBlock * p, made, sizeof(made));
  }
}

INLINE void write_image(const Back& back, const Line& to, const Slope& of, const float* x, int64_t at) {
  Tile one;
  for (int64_t left = back.image; left > 0; left -= kLanes, x += kLanes * kBlock, at += kLanes * kBlock) {
    const int64_t places = std::min<int64_t>(kLanes, left);
    if (back.counted != nullptr) {
      std::memcpy(one, back.counted + at, places * sizeof(Lane));
    } else if (places == kLanes) {
      read_tile(back, to, x, at, kLanes, one);
    } else {
      read_tile(back, to, x, at, places, one);
    }
    if ((back.fused & 4) != 0) {
      write_tile<true>(of, one, x, places, back.out + at);
    } else {
      write_tile<false>(of, one, x, places, back.out + at);
    }
  }
}

FOR_EACH_PROCESSOR void propagate(const Back& back, int64_t block) {
  const int64_t first = block * kBlock, places = back.images * back.image, stride = back.channels * back.image;
  const float *scale = back.scale + first, *weight = from(back.weight, first);
  const Line to = line(back.mean + first, scale, weight, from(back.bias, first), back.fused);
  const Block input = find(back.parts, block, back.image);
  Slope of;
  std::memcpy(of.mean, back.mean + first, sizeof(Lane));
  std::memcpy(of.scale, scale, sizeof(Lane));
  Sums sums = {};
  for (int64_t n = 0; n < back.images; ++n) {
    add_image(back, to, of.mean, input.start + n * input.stride, n * stride + first * back.image, sums);
  }
  for (int k = 0; k < kBlock; ++k) {
    of.weight[k] = weight != nullptr ? weight[k] : 1.0f;
    of.slope[k] = static_cast<float>(sums.product[k]) * scale[k] * scale[k] / static_cast<float>(places);
    of.middle[k] = static_cast<float>(sums.gradient[k] / static_cast<double>(places));
    back.weight_gradient[first + k] = static_cast<float>(sums.product[k] * scale[k]);
    back.bias_gradient[first + k] = static_cast<float>(sums.gradient[k]);
  }
  for (int64_t n = 0; n < back.images; ++n) {
    write_image(back, to, of, input.start + n * input.stride, n * stride + first * back.image);
  }
}

}  // namespace

extern "C" {

void lowtide_blocked_norm(const Norm* norm, int64_t threads) {
  share(norm->channels / kBlock, threads, [=](int64_t block) { normalize(*norm, block); });
}

void lowtide_blocked_norm_backward(const Back* back, int64_t threads) {
  share(back->channels / kBlock, threads, [=](int64_t block) { propagate(*back, block); });
}

}  // extern "C"
