// Floats and halves as bits.

#pragma once

#include <cstdint>
#include <cstring>

#include "threads.hpp"

namespace {

INLINE uint32_t bits_of(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  return bits;
}

INLINE float float_of(uint32_t bits) {
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

INLINE float from_half(uint16_t half) {
  const uint32_t bits = half & 0x7fffu, sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const float normal = float_of((bits << 13) + (112u << 23));
  const float tiny = float_of((bits << 13) + (113u << 23)) - float_of(113u << 23);
  const float special = float_of((bits << 13) + (224u << 23));
  const float size = bits < 0x400u ? tiny : bits < 0x7c00u ? normal : special;
  return float_of(bits_of(size) | sign);
}

}  // namespace
