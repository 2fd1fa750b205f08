// Batch norm over groups of examples: each is normalised by its own statistics, mixed with given ones where there are.
//
// Of a group's numbers x of one channel, with mean m and variance v, and the given mean g and variance h, the share s
// of the group's counts: M = s m + (1 - s) g and V = s v + (1 - s) h + s (1 - s) (m - g)^2, the mean and variance of
// the mixture. What is returned for each example of the group is m, M and 1 / sqrt(V + epsilon).

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "threads.hpp"

namespace {

struct Norm {
  const float *input, *weight, *bias, *given_mean, *given_var;
  float *out, *saved;      // as the input, or none; three numbers for each example and channel
  double* sums;            // three for each channel: of the numbers, of their squares, and how many; none: saved is known
  int64_t batch, channels, image, group;
  double share, epsilon;
};

struct Back {
  const float *gradient, *input, *weight, *given_mean, *saved;
  float *out, *weight_gradient, *bias_gradient;  // out or the others: none
  float* terms;  // two for each example and channel, of which out is made; none: both are made at once
  int64_t batch, channels, image, group;
  double share;
};

constexpr int kLanes = 16;

double total(const double* lanes) {
  double sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    sum += lanes[lane];
  }
  return sum;
}

// The sum of f(i) for i from 0 to count, in lanes.
template <typename Function>
inline __attribute__((always_inline)) double added(int64_t count, const Function& f) {
  double lanes[kLanes] = {};
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += f(i + lane);
    }
  }
  for (int64_t i = whole; i < count; ++i) {
    lanes[0] += f(i);
  }
  return total(lanes);
}

FOR_EACH_PROCESSOR double sum(const float* x, int64_t count) {
  return added(count, [=](int64_t i) { return static_cast<double>(x[i]); });
}

FOR_EACH_PROCESSOR double squares(const float* x, int64_t count, float mean) {
  return added(count, [=](int64_t i) { return static_cast<double>(x[i] - mean) * (x[i] - mean); });
}

FOR_EACH_PROCESSOR double products(const float* g, const float* x, int64_t count, float mean) {
  return added(count, [=](int64_t i) { return static_cast<double>(g[i]) * (x[i] - mean); });
}

FOR_EACH_PROCESSOR void scale(const float* x, int64_t count, float mean, float factor, float shift, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    out[i] = (x[i] - mean) * factor + shift;
  }
}

FOR_EACH_PROCESSOR void spread(
    const float* g, const float* x, int64_t count, float mean, float factor, float shift, float slope, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    out[i] = g[i] * factor + shift + (x[i] - mean) * slope;
  }
}

void normalize(const Norm& n, int64_t channel) {
  const double count = static_cast<double>(n.group * n.image), share = n.given_mean == nullptr ? 1 : n.share;
  const double given = n.given_mean == nullptr ? 0 : n.given_mean[channel];
  const double given_var = n.given_mean == nullptr ? 0 : n.given_var[channel];
  const float weight = n.weight == nullptr ? 1 : n.weight[channel], bias = n.bias == nullptr ? 0 : n.bias[channel];
  double all = 0, all_squares = 0;
  const auto at = [&](int64_t example) { return (example * n.channels + channel) * n.image; };
  if (n.sums == nullptr) {
    for (int64_t k = 0; k < n.batch; ++k) {
      const float* saved = n.saved + 3 * (k * n.channels + channel);
      scale(n.input + at(k), n.image, saved[1], saved[2] * weight, bias, n.out + at(k));
    }
    return;
  }
  for (int64_t first = 0; first < n.batch; first += n.group) {
    double mean = 0, var = 0;
    for (int64_t k = first; k < first + n.group; ++k) {
      mean += sum(n.input + at(k), n.image) / count;
    }
    for (int64_t k = first; k < first + n.group; ++k) {
      var += squares(n.input + at(k), n.image, static_cast<float>(mean)) / count;
    }
    all += mean * count;
    all_squares += (var + mean * mean) * count;
    const double middle = share * mean + (1 - share) * given;
    const double wide = share * var + (1 - share) * given_var + share * (1 - share) * (mean - given) * (mean - given);
    const double inverse = 1 / std::sqrt(wide + n.epsilon);
    for (int64_t k = first; k < first + n.group; ++k) {
      float* saved = n.saved + 3 * (k * n.channels + channel);
      saved[0] = static_cast<float>(mean);
      saved[1] = static_cast<float>(middle);
      saved[2] = static_cast<float>(inverse);
      if (n.out != nullptr) {
        scale(n.input + at(k), n.image, saved[1], saved[2] * weight, bias, n.out + at(k));
      }
    }
  }
  double* sums = n.sums + channel;
  sums[0] = all;
  sums[n.channels] = all_squares;
  sums[2 * n.channels] = static_cast<double>(n.batch * n.image);
}

void differentiate(const Back& n, int64_t channel) {
  const double count = static_cast<double>(n.group * n.image), share = n.given_mean == nullptr ? 1 : n.share;
  const double given = n.given_mean == nullptr ? 0 : n.given_mean[channel];
  const double weight = n.weight == nullptr ? 1 : n.weight[channel];
  double all = 0, all_products = 0;
  const auto at = [&](int64_t example) { return (example * n.channels + channel) * n.image; };
  if (n.weight_gradient == nullptr) {
    for (int64_t k = 0; k < n.batch; ++k) {
      const float *saved = n.saved + 3 * (k * n.channels + channel), *terms = n.terms + 2 * (k * n.channels + channel);
      spread(n.gradient + at(k), n.input + at(k), n.image, saved[0],
             static_cast<float>(weight * static_cast<double>(saved[2])), terms[0], terms[1], n.out + at(k));
    }
    return;
  }
  for (int64_t first = 0; first < n.batch; first += n.group) {
    const float* saved = n.saved + 3 * (first * n.channels + channel);
    const double mean = saved[0], inverse = saved[2];
    double of_gradient = 0, of_products = 0;
    for (int64_t k = first; k < first + n.group; ++k) {
      of_gradient += sum(n.gradient + at(k), n.image);
      of_products += products(n.gradient + at(k), n.input + at(k), n.image, saved[1]);
    }
    all += of_gradient;
    all_products += of_products * inverse;
    const double by_var = -0.5 * weight * inverse * inverse * inverse * of_products;
    const double by_mean = -weight * inverse * of_gradient;
    const double shift = share / count * (by_mean + 2 * (1 - share) * (mean - given) * by_var);
    const double slope = 2 * share / count * by_var;
    for (int64_t k = first; k < first + n.group; ++k) {
      if (n.terms != nullptr) {
        n.terms[2 * (k * n.channels + channel)] = static_cast<float>(shift);
        n.terms[2 * (k * n.channels + channel) + 1] = static_cast<float>(slope);
      } else {
        spread(n.gradient + at(k), n.input + at(k), n.image, static_cast<float>(mean),
               static_cast<float>(weight * inverse), static_cast<float>(shift), static_cast<float>(slope),
               n.out + at(k));
      }
    }
  }
  n.weight_gradient[channel] = static_cast<float>(all_products);
  n.bias_gradient[channel] = static_cast<float>(all);
}

}  // namespace

extern "C" {

void lowtide_grouped_norm(const Norm* norm, int64_t threads) {
  share(norm->channels, threads, [=](int64_t channel) { normalize(*norm, channel); });
}

void lowtide_grouped_norm_backward(const Back* back, int64_t threads) {
  share(back->channels, threads, [=](int64_t channel) { differentiate(*back, channel); });
}

}  // extern "C"
