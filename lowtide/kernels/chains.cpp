// Short programs that do the same to every element: what torch does in a call and a pass over memory for each line is
// done to a block of elements while they are in the processor's cache.

#include "vectors.hpp"

#include <cmath>
#include <cstring>

namespace {

constexpr long long kMode = 0x2 | 0x140000 | 0x100;  // high accuracy, denormals as they are, no words about errors

constexpr int64_t kBlock = 512, kRegisters = 16, kPiece = 1 << 14;  // numbers of a register; registers; of a piece

enum Line : int64_t {
  kLoad, kStore, kAdd, kMultiply, kDivide, kAddNumber, kMultiplyNumber, kDivideNumber, kNegate, kRoot, kAddProduct,
  kAddQuotient, kLerp
};

constexpr int64_t kPair = 16;  // numbers: torch compiled that loop for vectors of 8, whatever the processor has
constexpr int64_t kWords = 6;  // of a line: what it does, where to, up to three registers, and which number

using Roots = void (*)(int count, const float* from, float* to, long long mode);

struct Chain {
  const float* const* read;
  float* const* written;
  const int64_t* code;
  int64_t lines;
  const double* numbers;
  int64_t count;
  int64_t fused;  // whether torch's compiler fused the last product of kAddProduct with its sum
  int64_t chunk;  // elements that each of torch's threads takes
  Roots roots;    // of the library that torch takes them with, where they are not those of the processor; may be missing
};

template <typename One>
INLINE void each(float* to, int64_t count, const One& one) {
  along(count, [&](int64_t i, int64_t some) { store(one(i, some), to + i, some); });
}

// Whether torch takes an element alone, as its loop for this call does with what pairs of vectors leave of each thread's.
INLINE bool alone(const Chain& chain, int64_t place) {
  const int64_t inside = place % chain.chunk, all = std::min(chain.chunk, chain.count - place + inside);
  return inside >= all - all % kPair;
}

// The whole way from the start to the end: of an element alone, torch subtracts zero times the way, and adds it else.
INLINE void arrive(const Chain& chain, float* to, const float* a, const float* b, int64_t at, int64_t count) {
  each(to, count, [&](int64_t i, int64_t n) {
    alignas(64) float zeros[kWidth] = {};
    for (int64_t k = 0; k < n; ++k) {
      zeros[k] = alone(chain, at + i + k) ? -0.0f : 0.0f;
    }
    const Vec start = load(a + i, n), end = load(b + i, n);
    return at::vec::fmadd(Vec::loadu(zeros), end - start, end);
  });
}

template <bool fused>
INLINE void calculate(const Chain& chain, int64_t line, float* to, const float* a, const float* b, const float* c, float number, int64_t at, int64_t count) {
  const Vec k(number);
  switch (line) {
    case kAdd:
      return each(to, count, [&](int64_t i, int64_t n) { return at::vec::fmadd(load(b + i, n), k, load(a + i, n)); });
    case kMultiply: return each(to, count, [&](int64_t i, int64_t n) { return product(load(a + i, n), load(b + i, n)); });
    case kDivide: return each(to, count, [&](int64_t i, int64_t n) { return load(a + i, n) / load(b + i, n); });
    case kAddNumber: return each(to, count, [&](int64_t i, int64_t n) { return sum(load(a + i, n), k); });
    case kMultiplyNumber: return each(to, count, [&](int64_t i, int64_t n) { return product(load(a + i, n), k); });
    case kDivideNumber: return each(to, count, [&](int64_t i, int64_t n) { return load(a + i, n) / k; });
    case kNegate: return each(to, count, [&](int64_t i, int64_t n) { return load(a + i, n).neg(); });
    case kRoot:
      if (chain.roots != nullptr) {
        return chain.roots(static_cast<int>(count), a, to, kMode);
      }
      return each(to, count, [&](int64_t i, int64_t n) { return load(a + i, n).sqrt(); });
    case kAddProduct:
      return each(to, count, [&](int64_t i, int64_t n) {
        const Vec x = k * load(b + i, n);
        return fused ? at::vec::fmadd(x, load(c + i, n), load(a + i, n)) : load(a + i, n) + x * load(c + i, n);
      });
    case kAddQuotient:
      return each(to, count, [&](int64_t i, int64_t n) { return load(a + i, n) + k * load(b + i, n) / load(c + i, n); });
    case kLerp: {
      if (number == 1.0f) {
        return arrive(chain, to, a, b, at, count);
      }
      const bool small = std::abs(number) < 0.5f;
      const Vec step = small ? k : k - Vec(1.0f);
      return each(to, count, [&](int64_t i, int64_t n) {
        const Vec start = load(a + i, n), end = load(b + i, n);
        return at::vec::fmadd(step, end - start, small ? start : end);
      });
    }
    default: return;
  }
}

void run(const Chain& chain, int64_t first, int64_t last) {
  alignas(64) float rooms[kRegisters][kBlock];
  const float* registers[kRegisters] = {};
  for (int64_t at = first; at < last; at += kBlock) {
    const int64_t count = std::min(kBlock, last - at);
    for (int64_t n = 0; n < chain.lines; ++n) {
      const int64_t* line = chain.code + kWords * n;
      const int64_t to = line[1];
      if (line[0] == kLoad) {
        registers[to] = chain.read[line[2]] + at;
      } else if (line[0] == kStore) {
        std::memmove(chain.written[to] + at, registers[line[2]], count * sizeof(float));
      } else {
        const float number = static_cast<float>(chain.numbers[line[5]]);
        const float *a = registers[line[2]], *b = registers[line[3]], *c = registers[line[4]];
        if (chain.fused != 0) {
          calculate<true>(chain, line[0], rooms[to], a, b, c, number, at, count);
        } else {
          calculate<false>(chain, line[0], rooms[to], a, b, c, number, at, count);
        }
        registers[to] = rooms[to];
      }
    }
  }
}

}  // namespace

extern "C" void lowtide_chain(const Chain* chain, int64_t threads) {
  share((chain->count + kPiece - 1) / kPiece, threads, [=](int64_t piece) {
    run(*chain, piece * kPiece, std::min(chain->count, (piece + 1) * kPiece));
  });
}
