// What stands between the two products of attention, a few heads at a time and in place: scale, mask, softmax, dropout;
// and the same backwards. Rows are independent of each other, and each is worked on as torch does it.

#include "draws.hpp"
#include "vectors.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace {

struct Attention {
  float* scores;        // of [heads, rows, size]; afterwards what the values are weighted by
  float* gradient;      // of what they are weighted by; afterwards of the scores; missing in the forward
  const float* added;   // to the scores; may be missing
  const uint8_t* hidden;  // where the scores are overwritten; may be missing
  const uint8_t* kept;  // a bit for each score that is not dropped, each row from a byte of its own; may be missing
  int64_t heads, rows, size, bytes;  // bytes of a row of bits
  int64_t mask_head, mask_row;       // steps of the mask, in elements
  float factor, divisor, filling, noise;
  int64_t safe;      // whether rows of nothing but -infinity become zeros
  int64_t rounding;  // of torch, by bits: its exponential (2), whether softmax divides, whether sums of its gradient are
                     // fused (2), orders of both sums (5 each), of the gradient's last and first products, and
                     // in the first ones of what is left after whole vectors, of the factors and of the sum
};

// What is drawn beside: the bits of other rows.
struct Draws {
  Saved* state;
  uint8_t* out;
  int64_t rows, size, bytes, below;
};

// Bits become noise or zero.
INLINE Vec noise_of(const uint8_t* bits, const Vec& noise) {
#if defined(CPU_CAPABILITY_AVX512)
  uint16_t mask;
  std::memcpy(&mask, bits, sizeof mask);
  return Vec(_mm512_maskz_mov_ps(mask, noise));
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(*bits), each), each);
  return Vec(_mm256_and_ps(_mm256_castsi256_ps(set), noise));
#else
  float row[kWidth];
  noise.store(row);
  for (int64_t i = 0; i < kWidth; ++i) {
    row[i] = (bits[i / 8] >> (i % 8) & 1) != 0 ? row[i] : 0.0f;
  }
  return Vec::loadu(row);
#endif
}

template <int way>
INLINE void soften(const Attention& task, float* x, const float* added, const uint8_t* hidden) {
  const int64_t size = task.size;
  if (task.factor != 1 || task.divisor != 1 || added != nullptr) {
    const Vec factor(task.factor), divisor(task.divisor);
    along(size, [&](int64_t i, int64_t count) {
      Vec row = load(x + i, count);
      row = task.factor != 1 ? row * factor : row;
      row = task.divisor != 1 ? row / divisor : row;
      row = added != nullptr ? row + load(added + i, count) : row;
      store(row, x + i, count);
    });
  }
  if (hidden != nullptr) {
    for (int64_t i = 0; i < size; ++i) {
      x[i] = hidden[i] != 0 ? task.filling : x[i];
    }
  }
  const float most = largest(x, size);
  if (task.safe != 0 && most == -std::numeric_limits<float>::infinity()) {
    std::memset(x, 0, size * sizeof(float));
    return;
  }
  along(size, [&](int64_t i, int64_t count) { store(exponential<way>(load(x + i, count) - Vec(most)), x + i, count); });
  const float whole = total(x, size, task.rounding >> 5 & 31);
  if ((task.rounding & 4) != 0) {
    along(size, [&](int64_t i, int64_t count) { store(load(x + i, count) / Vec(whole), x + i, count); });
  } else {
    along(size, [&](int64_t i, int64_t count) { store(product(Vec(1 / whole), load(x + i, count)), x + i, count); });
  }
}

INLINE void soften(const Attention& task, int64_t head, int64_t row, float* x) {
  const int64_t place = head * task.mask_head + row * task.mask_row;
  const float* added = task.added != nullptr ? task.added + place : nullptr;
  const uint8_t* hidden = task.hidden != nullptr ? task.hidden + place : nullptr;
  switch (task.rounding & 3) {
    case 1: return soften<1>(task, x, added, hidden);
    case 2: return soften<2>(task, x, added, hidden);
    default: return soften<0>(task, x, added, hidden);
  }
}

INLINE void drop(const Attention& task, const uint8_t* kept, float* x) {
  const Vec noise(task.noise);
  along(task.size, [&](int64_t i, int64_t count) {
    store(load(x + i, count) * noise_of(kept + i / 8, noise), x + i, count);
  });
}

template <bool fused, bool fused_last>
INLINE void back(const Attention& task, const float* x, float* gradient) {
  const int64_t size = task.size;
  const int64_t order = (task.rounding >> 10 & 31) | (task.rounding >> 12 & 96);
  const bool turned = (task.rounding >> 16 & 1) != 0 && size >= kWidth, turned_last = (task.rounding >> 15 & 1) != 0;
  const float *one = turned ? x : gradient, *other = turned ? gradient : x;
  const Vec whole(total_of_products<fused, fused_last>(one, other, size, order));
  along(size, [&](int64_t i, int64_t count) {
    const Vec away = load(gradient + i, count) - whole, p = load(x + i, count);
    store(turned_last ? product(p, away) : product(away, p), gradient + i, count);
  });
}

INLINE void back(const Attention& task, int64_t head, int64_t row, const float* x, float* gradient) {
  switch (task.rounding >> 3 & 3) {
    case 0: back<false, false>(task, x, gradient); break;
    case 1: back<true, false>(task, x, gradient); break;
    case 2: back<false, true>(task, x, gradient); break;
    default: back<true, true>(task, x, gradient);
  }
  if (task.hidden != nullptr) {
    const uint8_t* hidden = task.hidden + head * task.mask_head + row * task.mask_row;
    for (int64_t i = 0; i < task.size; ++i) {
      gradient[i] = hidden[i] != 0 ? 0.0f : gradient[i];
    }
  }
  if (task.factor != 1 || task.divisor != 1) {
    const Vec factor(task.factor), divisor(task.divisor);
    along(task.size, [&](int64_t i, int64_t count) {
      Vec g = load(gradient + i, count);
      g = task.divisor != 1 ? g / divisor : g;
      g = task.factor != 1 ? g * factor : g;
      store(g, gradient + i, count);
    });
  }
}

// One row: forwards in place, or both ways.
void work_on(const Attention& task, int64_t number) {
  float* x = task.scores + number * task.size;
  const int64_t head = number / task.rows, row = number % task.rows;
  const uint8_t* kept = task.kept != nullptr ? task.kept + number * task.bytes : nullptr;
  soften(task, head, row, x);
  if (task.gradient != nullptr) {
    float* gradient = task.gradient + number * task.size;
    if (kept != nullptr) {
      drop(task, kept, gradient);
    }
    back(task, head, row, x, gradient);
  }
  if (kept != nullptr) {
    drop(task, kept, x);
  }
}

// Two draws make a number of 53 bits: 21 of the first above all 32 of the second. A bit says whether it is less.
INLINE void compare(const uint32_t* drawn, uint8_t* out, int64_t size, int64_t bytes, uint64_t below) {
  std::memset(out, 0, bytes);
#if defined(CPU_CAPABILITY_AVX512)
  const __m512i all = _mm512_set1_epi64((int64_t{1} << 53) - 1), limit = _mm512_set1_epi64(static_cast<int64_t>(below));
  int64_t i = 0;
  for (; i + 8 <= size; i += 8) {
    const __m512i pairs = _mm512_loadu_si512(drawn + 2 * i);
    out[i / 8] = _mm512_cmplt_epu64_mask(_mm512_and_si512(_mm512_rol_epi64(pairs, 32), all), limit);
  }
#else
  int64_t i = 0;
#endif
  for (; i < size; ++i) {
    const uint64_t number = (static_cast<uint64_t>(drawn[2 * i] & 0x1fffffu) << 32) | drawn[2 * i + 1];
    out[i / 8] = static_cast<uint8_t>(out[i / 8] | ((number < below ? 1 : 0) << (i % 8)));
  }
}

void draw(const Draws& task) {
  Twister twister(*task.state);
  std::vector<uint32_t> drawn(2 * task.size);
  for (int64_t row = 0; row < task.rows; ++row) {
    for (int64_t held = 0; held < 2 * task.size;) {
      held += twister.draw(drawn.data() + held, 2 * task.size - held);
    }
    compare(drawn.data(), task.out + row * task.bytes, task.size, task.bytes, static_cast<uint64_t>(task.below));
  }
  twister.save(*task.state);
}

constexpr int64_t kRows = 32;  // that a thread takes at a time

}  // namespace

extern "C" {

// Works on all rows, and draws the bits of others meanwhile. Either may be missing.
void lowtide_attention(const Attention* task, const Draws* draws, int64_t threads) {
  const int64_t first = draws != nullptr ? 1 : 0, rows = task != nullptr ? task->heads * task->rows : 0;
  share((rows + kRows - 1) / kRows + first, threads, [=](int64_t piece) {
    if (piece < first) {
      return draw(*draws);
    }
    for (int64_t row = (piece - first) * kRows; row < std::min(rows, (piece - first + 1) * kRows); ++row) {
      work_on(*task, row);
    }
  });
}

// Whether this is a state that torch can have saved.
int64_t lowtide_is_state(const Saved* state) {
  return Twister::is_sound(*state);
}

}  // extern "C"
