// Numbers in blocks of 256, each with its least number and a step: whole steps from the least are kept in 16, 8 or 4 bits.
//
// Packed bytes begin with the least and the step of each block, as floats; the codes follow. Where the least number is
// zero, only zeros have code 0: what asks whether a number is zero, as the backward of a ReLU does, gets the right answer.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "threads.hpp"

namespace {

constexpr int64_t kBlock = 256, kAtATime = 64;  // numbers of a block, and blocks of one piece of work
constexpr float kSmallest = 1e-37f;             // a step that is smaller has no inverse

struct Header {
  float least, step;
};

// The least number and the step; no numbers where one of the block is infinite or none.
FOR_EACH_PROCESSOR Header header(const float* numbers, int64_t count, float levels) {
  float least[16], most[16], wrong[16];
  for (int lane = 0; lane < 16; ++lane) {
    least[lane] = most[lane] = numbers[0];
    wrong[lane] = 0;
  }
  const int64_t whole = count / 16 * 16;
  for (int64_t i = 0; i < whole; i += 16) {
    for (int lane = 0; lane < 16; ++lane) {
      const float number = numbers[i + lane];
      least[lane] = number < least[lane] ? number : least[lane];
      most[lane] = number > most[lane] ? number : most[lane];
      wrong[lane] += number * 0;
    }
  }
  for (int64_t i = whole; i < count; ++i) {
    least[0] = std::min(least[0], numbers[i]);
    most[0] = std::max(most[0], numbers[i]);
    wrong[0] += numbers[i] * 0;
  }
  float all = 0;
  for (int lane = 0; lane < 16; ++lane) {
    all += wrong[lane];
    least[0] = std::min(least[0], least[lane]);
    most[0] = std::max(most[0], most[lane]);
  }
  const float step = most[0] / levels - least[0] / levels;
  return all == 0 ? Header{least[0], step} : Header{all, all};
}

template <typename Code>
FOR_EACH_PROCESSOR void encode(const float* numbers, int64_t count, Header head, int32_t levels, Code* codes) {
  const float inverse = head.step > kSmallest ? 1 / head.step : 0;
  const float top = static_cast<float>(levels);
  const int32_t lowest = head.least == 0 ? 1 : 0;  // the code of what is not the least
  for (int64_t i = 0; i < count; ++i) {
    const float steps = (numbers[i] - head.least) * inverse + 0.5f;
    int32_t code = static_cast<int32_t>(steps < top ? steps : top);
    const int32_t least = numbers[i] > head.least ? lowest : 0;
    code = code > least ? code : least;
    codes[i] = static_cast<Code>(code);
  }
}

template <typename Code>
FOR_EACH_PROCESSOR void decode(const Code* codes, int64_t count, Header head, float* numbers) {
  for (int64_t i = 0; i < count; ++i) {
    numbers[i] = head.least + static_cast<float>(static_cast<int32_t>(codes[i])) * head.step;
  }
}

void pack(const float* numbers, int64_t count, int64_t bits, Header* head, uint8_t* codes) {
  const int32_t levels = (1 << bits) - 1;
  *head = header(numbers, count, static_cast<float>(levels));
  const bool fine = std::isfinite(head->least);
  if (bits == 16) {
    auto* out = reinterpret_cast<uint16_t*>(codes);
    fine ? encode(numbers, count, *head, levels, out) : static_cast<void>(std::fill(out, out + count, uint16_t{0}));
  } else if (bits == 8) {
    fine ? encode(numbers, count, *head, levels, codes) : static_cast<void>(std::fill(codes, codes + count, uint8_t{0}));
  } else {
    uint8_t one[kBlock + 1] = {};
    if (fine) {
      encode(numbers, count, *head, levels, one);
    }
    for (int64_t i = 0; i < count; i += 2) {
      codes[i / 2] = static_cast<uint8_t>(one[i] | (one[i + 1] << 4));
    }
  }
}

void unpack(const uint8_t* codes, int64_t count, int64_t bits, Header head, float* numbers) {
  if (bits == 16) {
    decode(reinterpret_cast<const uint16_t*>(codes), count, head, numbers);
  } else if (bits == 8) {
    decode(codes, count, head, numbers);
  } else {
    uint8_t one[kBlock + 1];
    for (int64_t i = 0; i < count; i += 2) {
      one[i] = codes[i / 2] & 15;
      one[i + 1] = codes[i / 2] >> 4;
    }
    decode(one, count, head, numbers);
  }
}

// A bit for each number, eight to a byte: whether it is not zero or less.
FOR_EACH_PROCESSOR void signs(const float* numbers, int64_t count, uint8_t* bits) {
  uint8_t positive[kBlock + 8] = {};
  for (int64_t i = 0; i < count; ++i) {
    positive[i] = !(numbers[i] <= 0);
  }
  for (int64_t byte = 0; byte * 8 < count; ++byte) {
    uint8_t packed = 0;
    for (int place = 0; place < 8; ++place) {
      packed = static_cast<uint8_t>(packed | (positive[byte * 8 + place] << place));
    }
    bits[byte] = packed;
  }
}

// The numbers where the bits are set, each above zero; zeros elsewhere.
FOR_EACH_PROCESSOR void gate(const float* numbers, const uint8_t* bits, int64_t count, float* gated) {
  constexpr float least = std::numeric_limits<float>::min();
  uint8_t positive[kBlock + 8];
  for (int64_t byte = 0; byte * 8 < count; ++byte) {
    for (int place = 0; place < 8; ++place) {
      positive[byte * 8 + place] = (bits[byte] >> place) & 1;
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    const float above = numbers[i] <= least ? least : numbers[i];
    gated[i] = positive[i] ? above : 0;
  }
}

// Calls `work` with each block: its number, its first number and how many it has.
template <typename Work>
void each_block(int64_t count, int64_t threads, const Work& work) {
  const int64_t blocks = (count + kBlock - 1) / kBlock;
  share((blocks + kAtATime - 1) / kAtATime, threads, [&](int64_t piece) {
    for (int64_t block = piece * kAtATime; block < std::min(blocks, (piece + 1) * kAtATime); ++block) {
      work(block, block * kBlock, std::min(kBlock, count - block * kBlock));
    }
  });
}

}  // namespace

extern "C" {

void lowtide_pack(const float* numbers, int64_t count, int64_t bits, uint8_t* packed, int64_t threads) {
  auto* heads = reinterpret_cast<Header*>(packed);
  uint8_t* codes = packed + (count + kBlock - 1) / kBlock * static_cast<int64_t>(sizeof(Header));
  each_block(count, threads, [=](int64_t block, int64_t first, int64_t length) {
    pack(numbers + first, length, bits, heads + block, codes + first * bits / 8);
  });
}

void lowtide_unpack(const uint8_t* packed, int64_t count, int64_t bits, float* numbers, int64_t threads) {
  const auto* heads = reinterpret_cast<const Header*>(packed);
  const uint8_t* codes = packed + (count + kBlock - 1) / kBlock * static_cast<int64_t>(sizeof(Header));
  each_block(count, threads, [=](int64_t block, int64_t first, int64_t length) {
    unpack(codes + first * bits / 8, length, bits, heads[block], numbers + first);
  });
}

void lowtide_signs(const float* numbers, int64_t count, uint8_t* bits, int64_t threads) {
  each_block(count, threads, [=](int64_t, int64_t first, int64_t length) {
    signs(numbers + first, length, bits + first / 8);
  });
}

void lowtide_gate(const float* numbers, const uint8_t* bits, int64_t count, float* gated, int64_t threads) {
  each_block(count, threads, [=](int64_t, int64_t first, int64_t length) {
    gate(numbers + first, bits + first / 8, length, gated + first);
  });
}

}  // extern "C"
