// The Mersenne twister as torch saves it, by the block: what it draws next, and where it is afterwards.

#pragma once

#include <algorithm>
#include <cstdint>

#include "threads.hpp"

namespace {

constexpr int kWords = 624, kMiddle = 397;

// torch's saved state of its generator: the seed, how many words are left, and then the words, each in eight bytes.
struct Saved {
  uint64_t seed;
  int32_t left;
  int32_t seeded;
  uint64_t next;
  uint64_t words[kWords];
};

INLINE uint32_t twisted(uint32_t high, uint32_t low, uint32_t far) {
  const uint32_t mixed = (high & 0x80000000u) | (low & 0x7fffffffu);
  return far ^ (mixed >> 1) ^ (-(low & 1u) & 0x9908b0dfu);
}

FOR_EACH_PROCESSOR void renew(uint32_t* words) {
  for (int i = 0; i < kWords - kMiddle; ++i) {
    words[i] = twisted(words[i], words[i + 1], words[i + kMiddle]);
  }
  for (int i = kWords - kMiddle; i < kWords - 1; ++i) {
    words[i] = twisted(words[i], words[i + 1], words[i + kMiddle - kWords]);
  }
  words[kWords - 1] = twisted(words[kWords - 1], words[0], words[kMiddle - 1]);
}

FOR_EACH_PROCESSOR void temper(const uint32_t* words, uint32_t* drawn, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t word = words[i];
    word ^= word >> 11;
    word ^= (word << 7) & 0x9d2c5680u;
    word ^= (word << 15) & 0xefc60000u;
    drawn[i] = word ^ (word >> 18);
  }
}

// The generator while it draws.
class Twister {
 public:
  explicit Twister(const Saved& saved) : next_(static_cast<int64_t>(saved.next)), left_(saved.left - 1) {
    for (int i = 0; i < kWords; ++i) {
      words_[i] = static_cast<uint32_t>(saved.words[i]);
    }
  }

  // Whether torch can have saved this.
  static bool is_sound(const Saved& saved) {
    return saved.left >= 1 && saved.left <= kWords && saved.next <= static_cast<uint64_t>(kWords - saved.left + 1);
  }

  // The next words, up to this many; how many there were before new ones have to be made.
  int64_t draw(uint32_t* drawn, int64_t count) {
    if (left_ == 0) {
      renew(words_);
      next_ = 0;
      left_ = kWords;
    }
    const int64_t take = std::min(left_, count);
    temper(words_ + next_, drawn, take);
    next_ += take;
    left_ -= take;
    return take;
  }

  void save(Saved& saved) const {
    for (int i = 0; i < kWords; ++i) {
      saved.words[i] = words_[i];
    }
    saved.next = static_cast<uint64_t>(next_);
    saved.left = static_cast<int32_t>(left_ + 1);
  }

 private:
  uint32_t words_[kWords];
  int64_t next_, left_;
};

}  // namespace
