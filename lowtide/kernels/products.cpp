// Products of matrices that add in the order of torch's library: along the sums in blocks, each from zero, with every
// product fused to its sum, and one block after the other. That order is in the bits; how the work is cut is not.

#include "vectors.hpp"

#include <cstring>

namespace {

struct Products {
  const float* a;     // of [count, rows, depth]
  const float* b;     // of [count, depth, columns]
  const float* bias;  // of [rows, columns]; may be missing
  float* out;         // of [count, rows, columns], rows one after the other
  float* room;        // of each thread, as `lowtide_products_room` says
  int64_t count, rows, columns, depth;
  int64_t a_next, a_row, a_step;     // steps in elements: to the next matrix, along rows, along the sums
  int64_t b_next, b_step, b_column;  // of these, two steps within a matrix are those of plain or turned order
  int64_t bias_row, out_next;
  int64_t block;  // of the sums
};

#if defined(CPU_CAPABILITY_AVX512)
constexpr int64_t kRows = 14, kVectors = 2;
#else
constexpr int64_t kRows = 6, kVectors = 2;
#endif
constexpr int64_t kColumns = kVectors * kWidth;                         // of a tile, in registers
constexpr int64_t kHigh = kRows * 12, kWide = (1024 / kColumns) * kColumns;  // of what is in caches

int64_t room(int64_t block) {
  return (kHigh + kWide) * block + kRows * kColumns;
}

// Rows of a, so many side by side for each step of the sums; what is missing of the last ones is zero.
void pack_a(const Products& task, const float* a, int64_t rows, int64_t depth, float* to) {
  for (int64_t first = 0; first < rows; first += kRows, to += kRows * depth) {
    const int64_t some = std::min(kRows, rows - first);
    const float* from = a + first * task.a_row;
    if (task.a_row == 1) {
      for (int64_t k = 0; k < depth; ++k) {
        for (int64_t i = 0; i < kRows; ++i) {
          to[k * kRows + i] = i < some ? from[k * task.a_step + i] : 0.0f;
        }
      }
    } else {
      for (int64_t i = 0; i < kRows; ++i) {
        for (int64_t k = 0; k < depth; ++k) {
          to[k * kRows + i] = i < some ? from[i * task.a_row + k * task.a_step] : 0.0f;
        }
      }
    }
  }
}

// Columns of b, the same.
void pack_b(const Products& task, const float* b, int64_t columns, int64_t depth, float* to) {
  for (int64_t first = 0; first < columns; first += kColumns, to += kColumns * depth) {
    const int64_t some = std::min(kColumns, columns - first);
    const float* from = b + first * task.b_column;
    if (some < kColumns) {
      std::memset(to, 0, kColumns * depth * sizeof(float));
    }
    if (task.b_column == 1 && some == kColumns) {
      for (int64_t k = 0; k < depth; ++k) {
        std::memcpy(to + k * kColumns, from + k * task.b_step, kColumns * sizeof(float));
      }
    } else {
      constexpr int64_t kSteps = 16;  // at a time, so that lines of the cache are read and written once
      for (int64_t start = 0; start < depth; start += kSteps) {
        for (int64_t j = 0; j < some; ++j) {
          for (int64_t k = start; k < std::min(depth, start + kSteps); ++k) {
            to[k * kColumns + j] = from[k * task.b_step + j * task.b_column];
          }
        }
      }
    }
  }
}

// A tile of one block's sums.
INLINE void tile_of(const float* a, const float* b, int64_t depth, Vec (&made)[kRows][kVectors]) {
#pragma GCC unroll 16
  for (int64_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int64_t j = 0; j < kVectors; ++j) {
      made[i][j] = Vec(0.0f);
    }
  }
  for (int64_t k = 0; k < depth; ++k, a += kRows, b += kColumns) {
    Vec row[kVectors];
#pragma GCC unroll 2
    for (int64_t j = 0; j < kVectors; ++j) {
      row[j] = Vec::loadu(b + j * kWidth);
    }
#pragma GCC unroll 16
    for (int64_t i = 0; i < kRows; ++i) {
      const Vec one(a[i]);
#pragma GCC unroll 2
      for (int64_t j = 0; j < kVectors; ++j) {
        made[i][j] = at::vec::fmadd(one, row[j], made[i][j]);
      }
    }
  }
}

// What a tile adds to: what is there already, a bias, or nothing.
struct Under {
  const float* from;
  int64_t row;
};

void whole_tile(const float* a, const float* b, int64_t depth, const Under& under, float* out, int64_t out_row) {
  Vec made[kRows][kVectors];
  tile_of(a, b, depth, made);
#pragma GCC unroll 16
  for (int64_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int64_t j = 0; j < kVectors; ++j) {
      const int64_t at = j * kWidth;
      const Vec all = under.from == nullptr ? made[i][j] : sum(Vec::loadu(under.from + i * under.row + at), made[i][j]);
      all.store(out + i * out_row + at);
    }
  }
}

void part_of_tile(const float* a, const float* b, int64_t depth, const Under& under, float* out, int64_t out_row,
                  int64_t rows, int64_t columns, float* room) {
  whole_tile(a, b, depth, {nullptr, 0}, room, kColumns);
  for (int64_t i = 0; i < rows; ++i) {
    along(columns, [&](int64_t j, int64_t some) {
      const Vec made = load(room + i * kColumns + j, some);
      const Vec all = under.from == nullptr ? made : sum(load(under.from + i * under.row + j, some), made);
      store(all, out + i * out_row + j, some);
    });
  }
}

// Some rows of one product.
void work_on(const Products& task, int64_t number, int64_t first_row, int64_t last_row, float* packed_a) {
  float *packed_b = packed_a + kHigh * task.block, *tile = packed_b + kWide * task.block;
  const float *a = task.a + number * task.a_next, *b = task.b + number * task.b_next;
  float* out = task.out + number * task.out_next;
  for (int64_t column = 0; column < task.columns; column += kWide) {
    const int64_t wide = std::min(kWide, task.columns - column);
    for (int64_t start = 0; start < task.depth; start += task.block) {
      const int64_t depth = std::min(task.block, task.depth - start);
      pack_b(task, b + start * task.b_step + column * task.b_column, wide, depth, packed_b);
      for (int64_t row = first_row; row < last_row; row += kHigh) {
        const int64_t high = std::min(kHigh, last_row - row);
        pack_a(task, a + row * task.a_row + start * task.a_step, high, depth, packed_a);
        for (int64_t j = 0; j < wide; j += kColumns) {
          for (int64_t i = 0; i < high; i += kRows) {
            float* to = out + (row + i) * task.columns + column + j;
            const float* bias = task.bias == nullptr ? nullptr : task.bias + (row + i) * task.bias_row + column + j;
            const Under under = start > 0 ? Under{to, task.columns} : Under{bias, task.bias_row};
            const float *one = packed_a + i * depth, *other = packed_b + j * depth;
            if (high - i >= kRows && wide - j >= kColumns) {
              whole_tile(one, other, depth, under, to, task.columns);
            } else {
              part_of_tile(one, other, depth, under, to, task.columns, std::min(kRows, high - i),
                           std::min(kColumns, wide - j), tile);
            }
          }
        }
      }
    }
  }
}

}  // namespace

extern "C" int64_t lowtide_products_room(int64_t block) {
  return room(block);
}

extern "C" void lowtide_products(const Products* task, int64_t threads) {
  const int64_t each = (task->rows + kRows - 1) / kRows, all = each * task->count;  // tiles of rows
  share(threads, threads, [=](int64_t piece) {
    int64_t tile = all * piece / threads;
    const int64_t end = all * (piece + 1) / threads;
    while (tile < end) {
      const int64_t number = tile / each, first = tile % each, last = std::min(each, first + end - tile);
      work_on(*task, number, first * kRows, std::min(task->rows, last * kRows), task->room + piece * room(task->block));
      tile += last - first;
    }
  });
}
