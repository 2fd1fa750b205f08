// The vectors that torch's own kernels are written with, for the processor that torch found: the same functions of a
// number, and sums in the same order. Where torch's compiler may have fused a product and a sum, `fused` says so.

#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cstdint>

#include "threads.hpp"

namespace {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t kWidth = Vec::size();

INLINE Vec load(const float* from, int64_t count) {
  return count == kWidth ? Vec::loadu(from) : Vec::loadu(from, count);
}

INLINE void store(const Vec& row, float* to, int64_t count) {
  if (count == kWidth) {
    row.store(to);
  } else {
    row.store(to, static_cast<int>(count));
  }
}

// A product, or a sum, in this order: of two that are no numbers, processors keep the first.
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
#if defined(CPU_CAPABILITY_AVX512)
#define LOWTIDE_REGISTER "v"
using Lanes = __m512;
#else
#define LOWTIDE_REGISTER "x"
using Lanes = __m256;
#endif
INLINE Vec product(const Vec& a, const Vec& b) {
  Lanes made;
  asm("vmulps %2, %1, %0" : "=" LOWTIDE_REGISTER(made) : LOWTIDE_REGISTER(Lanes(a)), LOWTIDE_REGISTER(Lanes(b)));
  return Vec(made);
}
INLINE Vec sum(const Vec& a, const Vec& b) {
  Lanes made;
  asm("vaddps %2, %1, %0" : "=" LOWTIDE_REGISTER(made) : LOWTIDE_REGISTER(Lanes(a)), LOWTIDE_REGISTER(Lanes(b)));
  return Vec(made);
}
#else
INLINE Vec product(const Vec& a, const Vec& b) { return a * b; }
INLINE Vec sum(const Vec& a, const Vec& b) { return a + b; }
#endif

template <bool fused>
INLINE Vec plus_product(const Vec& to, const Vec& a, const Vec& b, bool turned = false) {
  return fused ? at::vec::fmadd(a, b, to) : turned ? sum(product(a, b), to) : sum(to, product(a, b));
}

// A row in vectors: the whole ones, and the rest.
template <typename Work>
INLINE void along(int64_t count, const Work& work) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    work(i, kWidth);
  }
  if (i < count) {
    work(i, count - i);
  }
}

// The exponential, as torch may have it in its softmax.
template <int way>
INLINE Vec exponential(const Vec& x) {
  return [](const auto& v) {
    if constexpr (way == 1 && requires { v.exp_u20(); }) {
      return v.exp_u20();
    } else if constexpr (way == 2 && requires { v.fexp_u20(); }) {
      return v.fexp_u20();
    } else {
      return v.exp();
    }
  }(x);
}

INLINE float largest(const float* x, int64_t count) {
  return at::vec::reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, x, count);
}

// The sum over a vector; of each pair of halves, `order` says in a bit which one torch's compiler put first.
INLINE float across(Vec v, [[maybe_unused]] int64_t order) {
#if defined(CPU_CAPABILITY_AVX512)
  const auto halves = [&](const Vec& other, int64_t step) { v = (order >> step & 1) != 0 ? sum(other, v) : sum(v, other); };
  halves(Vec(_mm512_shuffle_f32x4(v, v, 0x4E)), 0);
  halves(Vec(_mm512_shuffle_f32x4(v, v, 0xB1)), 1);
  halves(Vec(_mm512_shuffle_ps(v, v, 0x4E)), 2);
  halves(Vec(_mm512_shuffle_ps(v, v, 0xB1)), 3);
  return _mm512_cvtss_f32(v);
#elif defined(CPU_CAPABILITY_AVX2)
  const auto halves = [&](const Vec& other, int64_t step) { v = (order >> step & 1) != 0 ? sum(other, v) : sum(v, other); };
  halves(Vec(_mm256_permute2f128_ps(v, v, 0x1)), 0);
  halves(Vec(_mm256_shuffle_ps(v, v, 0x4E)), 1);
  halves(Vec(_mm256_shuffle_ps(v, v, 0xB1)), 2);
  return _mm256_cvtss_f32(v);
#else
  return at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return a + b; }, v);
#endif
}

INLINE float across_few(const Vec& v, int64_t count) {
  return at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return a + b; }, v, count);
}

// Sums in torch's order of adding up a row; the fifth bit of `order` is about what is left after the whole vectors.
INLINE float total(const float* x, int64_t count, int64_t order) {
  if (count < kWidth) {
    return across_few(Vec::loadu(x, count), count);
  }
  Vec found = Vec::loadu(x);
  int64_t i = kWidth;
  for (; i + kWidth <= count; i += kWidth) {
    found = sum(found, Vec::loadu(x + i));
  }
  if (i < count) {
    const Vec last = Vec::loadu(x + i, count - i);
    found = Vec::set(found, (order & 16) != 0 ? sum(last, found) : sum(found, last), count - i);
  }
  return across(found, order);
}

// The same of products; those in whole vectors and those in the last one may be rounded otherwise, and for the last
// one the sixth and seventh bit of `order` say whether its factors, and its sum, are the other way round.
template <bool fused, bool fused_last>
INLINE float total_of_products(const float* a, const float* b, int64_t count, int64_t order) {
  if (count < kWidth) {
    return across_few(product(Vec::loadu(a, count), Vec::loadu(b, count)), count);
  }
  Vec found = product(Vec::loadu(a), Vec::loadu(b));
  int64_t i = kWidth;
  for (; i + kWidth <= count; i += kWidth) {
    found = plus_product<fused>(found, Vec::loadu(a + i), Vec::loadu(b + i), (order & 16) != 0);
  }
  if (i < count) {
    const bool exchanged = (order & 32) != 0;
    const Vec one = Vec::loadu((exchanged ? b : a) + i, count - i), other = Vec::loadu((exchanged ? a : b) + i, count - i);
    const Vec last = plus_product<fused_last>(found, one, other, (order & 64) != 0);
    found = Vec::set(found, last, count - i);
  }
  return across(found, order);
}

}  // namespace
