// Tensors in other forms: 16 bits an element, 8 bits with a scale for each block, and only where a mask has a bit. Each
// block is made of floats and made into bytes again on the stack, so that nothing is allocated here, and what an
// optimizer does to each element runs between the two as a short program.

#include <cmath>
#include <cstring>
#include <limits>

#include "bits.hpp"
#include "threads.hpp"

namespace {

constexpr int64_t kBlock = 256;  // elements to a scale, and of a register
constexpr int kRegisters = 16;
constexpr int kDimensions = 8;
constexpr int64_t kPieces = 64;  // of the work on one tensor, at most

enum Type : int64_t { kFloat32, kBfloat16, kFloat16, kInt8, kUint8 };

struct Stored {
  int64_t type;
  void* values;
  float* scales;     // one for each block, where elements have 8 bits
  int64_t* counter;  // of the times that it was rounded by chance; null: it is rounded to the nearest
  int64_t count;     // of values
};

struct Seen {  // a tensor of floats that is read
  const float* data;
  int64_t dims;  // 0: its elements follow each other
  int64_t size[kDimensions], stride[kDimensions];
};

struct Update {
  const Stored* stored;
  const Seen* seen;
  const double* numbers;
  const int64_t* code;  // five numbers an instruction
  int64_t instructions;
  const uint8_t* mask;  // a bit for each element; null: there is a value for each
  int64_t elements, count;
};

// ---------------------------------------------------------------------------------------------------------- the chance

// The numbers depend on the counter and on the place of an element, and on nothing else.
uint32_t seed_of(const int64_t* counter) {
  uint64_t z = static_cast<uint64_t>(*counter) + 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return static_cast<uint32_t>((z ^ (z >> 31)) >> 32);
}

INLINE uint32_t noise(uint32_t seed, uint32_t place) {
  uint32_t x = place * 0x9e3779b9u + seed;
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

// ----------------------------------------------------------------------------------------------------------- 16 and 8 bits

// `chance` has 13 bits below the last one that stays.
INLINE uint16_t to_half(float number, uint32_t chance) {
  const uint32_t bits = bits_of(number), sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
  const uint32_t normal = std::min((size + chance - (112u << 23)) >> 13, 0x7bffu);
  const float steps = float_of(std::min(size, 113u << 23)) * 16777216.0f + static_cast<float>(chance) * (1.0f / 8192);
  const uint32_t tiny = static_cast<uint32_t>(static_cast<int32_t>(steps));
  const uint32_t special = size > 0x7f800000u ? 0x7e00u : 0x7c00u;
  return static_cast<uint16_t>((size >= 0x7f800000u ? special : size < (113u << 23) ? tiny : normal) | sign);
}

INLINE uint16_t to_bfloat(float number, uint32_t chance) {
  const uint32_t bits = bits_of(number);
  const bool special = (bits & 0x7f800000u) == 0x7f800000u;
  const uint32_t rounded = std::min((bits & 0x7fffffffu) + chance, 0x7f7fffffu) | (bits & 0x80000000u);
  return static_cast<uint16_t>(((special ? bits | ((bits & 0x7fffffu) != 0 ? 0x400000u : 0u) : rounded)) >> 16);
}

// Codes grow with the root of a number (int8, with its sign) or with the fourth root (uint8).
INLINE float from_code(int8_t code) {
  const float part = static_cast<float>(code) * (1.0f / 127);
  return part * std::fabs(part);
}

INLINE float from_code(uint8_t code) {
  const float part = static_cast<float>(code) * (1.0f / 255), square = part * part;
  return square * square;
}

constexpr float kSure = 1.0f / 1024;  // so near to a code, a number is that code: what was unpacked is packed to the same

INLINE float chosen(float low, float part, float at, float next, float chance) {
  const float way = next > at ? (part - at) / (next - at) : 0.0f;
  const float up = way < kSure ? 0.0f : way > 1 - kSure ? 1.0f : way > chance ? 1.0f : 0.0f;
  return low + up;
}

INLINE int8_t to_int8(float part, float chance) {  // a part of the scale, with a sign; `chance` is below 1
  const float size = std::fabs(part), low = std::min(std::floor(std::sqrt(size) * 127), 126.0f);
  const float at = low * (1.0f / 127), next = (low + 1) * (1.0f / 127);
  const float code = chosen(low, size, at * at, next * next, chance);
  return static_cast<int8_t>(static_cast<int32_t>(part < 0 ? -code : code));
}

INLINE uint8_t to_uint8(float part, float chance) {  // what is not zero stays so: it may be a divisor
  const float low = std::min(std::floor(std::sqrt(std::sqrt(std::max(part, 0.0f))) * 255), 254.0f);
  const float at = low * (1.0f / 255), next = (low + 1) * (1.0f / 255);
  const float code = chosen(low, part, at * at * at * at, next * next * next * next, chance);
  return static_cast<uint8_t>(static_cast<int32_t>(std::max(code, part > 0 ? 1.0f : 0.0f)));
}

// -------------------------------------------------------------------------------------------------------------- blocks

FOR_EACH_PROCESSOR void load(const Stored& from, int64_t block, int64_t count, float* to) {
  const int64_t first = block * kBlock;
  switch (from.type) {
    case kFloat32:
      std::memcpy(to, static_cast<const float*>(from.values) + first, count * sizeof(float));
      break;
    case kBfloat16: {
      const uint16_t* values = static_cast<const uint16_t*>(from.values) + first;
      for (int64_t i = 0; i < count; ++i) to[i] = float_of(static_cast<uint32_t>(values[i]) << 16);
      break;
    }
    case kFloat16: {
      const uint16_t* values = static_cast<const uint16_t*>(from.values) + first;
      for (int64_t i = 0; i < count; ++i) to[i] = from_half(values[i]);
      break;
    }
    case kInt8: {
      const int8_t* values = static_cast<const int8_t*>(from.values) + first;
      const float scale = from.scales[block];
      for (int64_t i = 0; i < count; ++i) to[i] = from_code(values[i]) * scale;
      break;
    }
    case kUint8: {
      const uint8_t* values = static_cast<const uint8_t*>(from.values) + first;
      const float scale = from.scales[block];
      for (int64_t i = 0; i < count; ++i) to[i] = from_code(values[i]) * scale;
      break;
    }
  }
}

// The largest size in a block; infinity or NaN where one is in it.
INLINE float largest(const float* numbers, int64_t count) {
  uint32_t most = 0;
  for (int64_t i = 0; i < count; ++i) most = std::max(most, bits_of(numbers[i]) & 0x7fffffffu);
  return float_of(most);
}

FOR_EACH_PROCESSOR void store(const Stored& to, int64_t block, int64_t count, const float* from, uint32_t seed) {
  const int64_t first = block * kBlock;
  const bool by_chance = to.counter != nullptr;
  const uint32_t place = static_cast<uint32_t>(first);
  switch (to.type) {
    case kFloat32:
      std::memcpy(static_cast<float*>(to.values) + first, from, count * sizeof(float));
      break;
    case kBfloat16: {
      uint16_t* values = static_cast<uint16_t*>(to.values) + first;
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t chance = by_chance ? noise(seed, place + static_cast<uint32_t>(i)) & 0xffffu : 0x8000u;
        values[i] = to_bfloat(from[i], chance);
      }
      break;
    }
    case kFloat16: {
      uint16_t* values = static_cast<uint16_t*>(to.values) + first;
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t chance = by_chance ? noise(seed, place + static_cast<uint32_t>(i)) & 0x1fffu : 0x1000u;
        values[i] = to_half(from[i], chance);
      }
      break;
    }
    case kInt8:
    case kUint8: {
      const float scale = largest(from, count);
      to.scales[block] = scale;
      float parts[kBlock], chances[kBlock];
      for (int64_t i = 0; i < count; ++i) {
        parts[i] = scale > 0 ? from[i] / scale : 0.0f;
        const uint32_t drawn = noise(seed, place + static_cast<uint32_t>(i)) >> 8;
        chances[i] = by_chance ? static_cast<float>(static_cast<int32_t>(drawn)) * (1.0f / 16777216) : 0.5f;
      }
      if (to.type == kInt8) {
        int8_t* values = static_cast<int8_t*>(to.values) + first;
        for (int64_t i = 0; i < count; ++i) values[i] = to_int8(parts[i], chances[i]);
      } else {
        uint8_t* values = static_cast<uint8_t*>(to.values) + first;
        for (int64_t i = 0; i < count; ++i) values[i] = to_uint8(parts[i], chances[i]);
      }
      break;
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------- masks

INLINE uint64_t word_of(const uint8_t* mask, int64_t first, int64_t elements) {  // 64 bits from a multiple of 8 on
  uint64_t word = 0;
  const int64_t bytes = std::min<int64_t>(8, (elements - first + 7) / 8);
  std::memcpy(&word, mask + first / 8, bytes);
  return elements - first < 64 ? word & ((1ull << (elements - first)) - 1) : word;
}

// How many bits are set before an element, which is a multiple of 64.
int64_t rank(const uint8_t* mask, int64_t element) {
  int64_t found = 0;
  for (int64_t i = 0; i < element; i += 64) found += __builtin_popcountll(word_of(mask, i, element));
  return found;
}

// Walks over the set bits from one of them on.
class Walk {
 public:
  Walk(const uint8_t* mask, int64_t elements, int64_t number) : mask_(mask), elements_(elements) {
    while (first_ < elements_) {
      word_ = word_of(mask_, first_, elements_);
      const int set = __builtin_popcountll(word_);
      if (number < set) break;
      number -= set;
      first_ += 64;
      word_ = 0;
    }
    for (; number > 0 && word_ != 0; --number) word_ &= word_ - 1;
  }

  int64_t next() {  // the next element; the first one where there is none, which no sound mask leads to
    while (word_ == 0) {
      first_ += 64;
      if (first_ >= elements_) return 0;
      word_ = word_of(mask_, first_, elements_);
    }
    const int64_t found = first_ + __builtin_ctzll(word_);
    word_ &= word_ - 1;
    return found;
  }

 private:
  const uint8_t* mask_;
  int64_t elements_, first_ = 0;
  uint64_t word_ = 0;
};

// ------------------------------------------------------------------------------------------------------------- programs

enum Instruction : int64_t {
  kLoad, kSee, kStore, kCopy, kAdd, kSubtract, kMultiply, kDivide, kAddNumber, kMultiplyNumber, kDivideNumber,
  kLerp, kRoot, kNegate, kAbsolute, kSign, kMaximum, kMinimum, kFill, kCount
};

FOR_EACH_PROCESSOR void calculate(int64_t instruction, float* to, const float* a, const float* b, float k, int64_t count) {
  switch (instruction) {
    case kCopy: std::memmove(to, a, count * sizeof(float)); break;
    case kAdd: for (int64_t i = 0; i < count; ++i) to[i] = a[i] + k * b[i]; break;
    case kSubtract: for (int64_t i = 0; i < count; ++i) to[i] = a[i] - k * b[i]; break;
    case kMultiply: for (int64_t i = 0; i < count; ++i) to[i] = a[i] * b[i]; break;
    case kDivide: for (int64_t i = 0; i < count; ++i) to[i] = a[i] / b[i]; break;
    case kAddNumber: for (int64_t i = 0; i < count; ++i) to[i] = a[i] + k; break;
    case kMultiplyNumber: for (int64_t i = 0; i < count; ++i) to[i] = a[i] * k; break;
    case kDivideNumber: for (int64_t i = 0; i < count; ++i) to[i] = a[i] / k; break;
    case kLerp:
      if (std::fabs(k) < 0.5f) {
        for (int64_t i = 0; i < count; ++i) to[i] = a[i] + k * (b[i] - a[i]);
      } else {
        for (int64_t i = 0; i < count; ++i) to[i] = b[i] - (b[i] - a[i]) * (1 - k);
      }
      break;
    case kRoot: for (int64_t i = 0; i < count; ++i) to[i] = std::sqrt(a[i]); break;
    case kNegate: for (int64_t i = 0; i < count; ++i) to[i] = -a[i]; break;
    case kAbsolute: for (int64_t i = 0; i < count; ++i) to[i] = std::fabs(a[i]); break;
    case kSign: for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>((a[i] > 0) - (a[i] < 0)); break;
    case kMaximum: for (int64_t i = 0; i < count; ++i) to[i] = (a[i] > b[i]) | (a[i] != a[i]) ? a[i] : b[i]; break;
    case kMinimum: for (int64_t i = 0; i < count; ++i) to[i] = (a[i] < b[i]) | (a[i] != a[i]) ? a[i] : b[i]; break;
    case kFill: for (int64_t i = 0; i < count; ++i) to[i] = k; break;
    default: break;
  }
}

// What is seen at these elements; they follow each other from the first one on where there is no list of them.
void see(const Seen& seen, int64_t first, const int64_t* elements, int64_t count, float* to) {
  if (seen.dims == 0 && elements == nullptr) {
    std::memcpy(to, seen.data + first, count * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    int64_t rest = elements == nullptr ? first + i : elements[i], at = seen.dims == 0 ? rest : 0;
    for (int64_t d = seen.dims - 1; d >= 0; --d) {
      at += rest % seen.size[d] * seen.stride[d];
      rest /= seen.size[d];
    }
    to[i] = seen.data[at];
  }
}

void run(const Update& update, const uint32_t* seeds, int64_t from, int64_t to) {
  float registers[kRegisters][kBlock];
  int64_t elements[kBlock];
  Walk walk(update.mask, update.mask == nullptr ? 0 : update.elements, from * kBlock);
  for (int64_t block = from; block < to; ++block) {
    const int64_t first = block * kBlock, count = std::min(kBlock, update.count - first);
    for (int64_t i = 0; update.mask != nullptr && i < count; ++i) elements[i] = walk.next();
    const int64_t* listed = update.mask == nullptr ? nullptr : elements;
    for (int64_t n = 0; n < update.instructions; ++n) {
      const int64_t* code = update.code + 5 * n;
      switch (code[0]) {
        case kLoad: load(update.stored[code[2]], block, count, registers[code[1]]); break;
        case kSee: see(update.seen[code[2]], first, listed, count, registers[code[1]]); break;
        case kStore: store(update.stored[code[1]], block, count, registers[code[2]], seeds[code[1]]); break;
        default:
          calculate(code[0], registers[code[1]], registers[code[2]], registers[code[3]],
                    static_cast<float>(update.numbers[code[4]]), count);
      }
    }
  }
}

}  // namespace

extern "C" {

// Runs the program on all blocks; the counters of what was stored by chance go on by one. At most `kRegisters` tensors.
void lowtide_forms_update(const Update* update, int64_t tensors, int64_t threads) {
  uint32_t seeds[kRegisters] = {};
  for (int64_t i = 0; i < tensors; ++i) {
    if (update->stored[i].counter != nullptr) seeds[i] = seed_of(update->stored[i].counter);
  }
  const int64_t blocks = (update->count + kBlock - 1) / kBlock, pieces = std::min(blocks, kPieces);
  share(pieces, threads, [&](int64_t piece) { run(*update, seeds, piece * blocks / pieces, (piece + 1) * blocks / pieces); });
  for (int64_t n = 0; n < update->instructions; ++n) {
    const int64_t* code = update->code + 5 * n;
    if (code[0] == kStore && update->stored[code[1]].counter != nullptr) ++*update->stored[code[1]].counter;
  }
}

// All elements as floats: zero where the mask has no bit.
void lowtide_forms_unpack(const Stored* stored, const uint8_t* mask, int64_t elements, float* out, int64_t threads) {
  if (mask == nullptr) {
    const int64_t blocks = (elements + kBlock - 1) / kBlock, pieces = std::min(blocks, kPieces);
    share(pieces, threads, [&](int64_t piece) {
      for (int64_t block = piece * blocks / pieces; block < (piece + 1) * blocks / pieces; ++block) {
        load(*stored, block, std::min(kBlock, elements - block * kBlock), out + block * kBlock);
      }
    });
    return;
  }
  const int64_t words = (elements + 63) / 64, pieces = std::min(words, kPieces);
  share(pieces, threads, [&](int64_t piece) {
    const int64_t first = piece * words / pieces * 64, last = std::min(elements, (piece + 1) * words / pieces * 64);
    int64_t number = rank(mask, first), loaded = -1;
    float values[kBlock];
    std::memset(out + first, 0, (last - first) * sizeof(float));
    for (int64_t at = first; at < last; at += 64) {
      for (uint64_t word = word_of(mask, at, elements); word != 0; word &= word - 1) {
        if (number >= stored->count) return;
        if (number / kBlock != loaded) {
          loaded = number / kBlock;
          load(*stored, loaded, std::min(kBlock, stored->count - loaded * kBlock), values);
        }
        out[at + __builtin_ctzll(word)] = values[number++ % kBlock];
      }
    }
  });
}

// Bytes as floats: each channel has its own step and its own zero. Elements of a channel follow each other.
void lowtide_forms_from_bytes(const uint8_t* bytes, const float* steps, const float* zeros, int64_t outer,
                              int64_t channels, int64_t inner, float* out, int64_t threads) {
  share(outer * channels, threads, [=](int64_t piece) {
    const float step = steps[piece % channels], zero = zeros[piece % channels];
    for (int64_t i = piece * inner; i < (piece + 1) * inner; ++i) out[i] = static_cast<float>(bytes[i]) * step + zero;
  });
}

int64_t lowtide_forms_bits(const uint8_t* mask, int64_t elements) {
  int64_t found = 0;
  for (int64_t i = 0; i < elements; i += 64) found += __builtin_popcountll(word_of(mask, i, elements));
  return found;
}

}  // extern "C"
