// Short programs over numbers that depend on nothing but each other: what torch does in a call for each line, and a pass
// over memory for each call, is done on a block of them while it is in the processor's cache.

#include "vectors.hpp"

#include <ATen/native/Lerp.h>

#include <cmath>
#include <cstring>

namespace {

constexpr int64_t kBlock = 512, kRegisters = 16, kPiece = 1 << 14;  // numbers of a register; registers; of a piece

enum Line : int64_t {
  kLoad, kStore, kAdd, kMultiply, kDivide, kAddNumber, kMultiplyNumber, kDivideNumber, kNegate, kSquare, kCube, kTanh,
  kTanhBack, kRoot, kAddProduct, kAddQuotient, kLerp, kLines
};

constexpr int64_t kWords = 6;  // of a line: what it does, where to, up to three registers, and which number

struct Chain {
  const float* const* read;
  float* const* written;
  const int64_t* code;
  int64_t lines;
  const double* numbers;
  int64_t count;
  int64_t fused;  // a bit for each kind of line: whether torch's compiler fused a product and a sum in it
};

template <typename One>
INLINE void each(float* to, int64_t count, const One& one) {
  along(count, [&](int64_t i, int64_t some) { store(one(i, some), to + i, some); });
}

template <bool fused>
INLINE void calculate(int64_t line, float* to, const float* a, const float* b, const float* c, float number, int64_t count) {
  const Vec k(number), one(1.0f);
  switch (line) {
    case kAdd:
      return each(to, count, [&](int64_t i, int64_t n) { return at::vec::fmadd(load(b + i, n), k, load(a + i, n)); });
    case kMultiply: return each(to, count, [&](int64_t i, int64_t n) { return product(load(a + i, n), load(b + i, n)); });
    case kDivide: return each(to, count, [&](int64_t i, int64_t n) { return load(a + i, n) / load(b + i, n); });
    case kAddNumber: return each(to, count, [&](int64_t i, int64_t n) { return sum(load(a + i, n), k); });
    case kMultiplyNumber: return each(to, count, [&](int64_t i, int64_t n) { return product(load(a + i, n), k); });
    case kDivideNumber: return each(to, count, [&](int64_t i, int64_t n) { return load(a + i, n) / k; });
    case kNegate: return each(to, count, [&](int64_t i, int64_t n) { return load(a + i, n).neg(); });
    case kSquare: return each(to, count, [&](int64_t i, int64_t n) { const Vec x = load(a + i, n); return x * x; });
    case kCube: return each(to, count, [&](int64_t i, int64_t n) { const Vec x = load(a + i, n); return x * x * x; });
    case kTanh: return each(to, count, [&](int64_t i, int64_t n) { return load(a + i, n).tanh(); });
    case kTanhBack:
      return each(to, count, [&](int64_t i, int64_t n) {
        const Vec y = load(b + i, n);
        return load(a + i, n) * (fused ? at::vec::fnmadd(y, y, one) : one - y * y);
      });
    case kRoot: return each(to, count, [&](int64_t i, int64_t n) { return load(a + i, n).sqrt(); });
    case kAddProduct:
      return each(to, count, [&](int64_t i, int64_t n) {
        const Vec x = k * load(b + i, n);
        return fused ? at::vec::fmadd(x, load(c + i, n), load(a + i, n)) : load(a + i, n) + x * load(c + i, n);
      });
    case kAddQuotient:
      return each(to, count, [&](int64_t i, int64_t n) { return load(a + i, n) + k * load(b + i, n) / load(c + i, n); });
    case kLerp:
      return each(to, count, [&](int64_t i, int64_t n) { return at::native::lerp_vec(load(a + i, n), load(b + i, n), k); });
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
        if ((chain.fused >> line[0] & 1) != 0) {
          calculate<true>(line[0], rooms[to], a, b, c, number, count);
        } else {
          calculate<false>(line[0], rooms[to], a, b, c, number, count);
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
