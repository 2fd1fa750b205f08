// Which pages of an arena the process holds: a page comes by being used, and can be given back while no block is in it.
//
// A *spare* page has no block in it.

#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

constexpr int64_t kPage = 1 << 12;

class Pages {
 public:
  Pages(char* base, int64_t nbytes)
      : base_(base), nbytes_(nbytes), blocks_(count(nbytes), 0), held_(count(nbytes), false) {}

  // Bytes of pages that are held with no block in them.
  int64_t spare() const {
    return spare_;
  }

  // Bytes of all pages that are held.
  int64_t held() const {
    return all_;
  }

  // Bytes of pages that a block from start to end would bring.
  int64_t missing(int64_t start, int64_t end) const {
    int64_t found = 0;
    for (int64_t page = all_ < nbytes_ ? start / kPage : count(end); page < count(end); ++page) {
      found += held_[page] ? 0 : size(page);
    }
    return found;
  }

  // Bytes of spare pages that a block from start to end would take.
  int64_t spare(int64_t start, int64_t end) const {
    int64_t found = 0;
    for (int64_t page = spare_ > 0 ? start / kPage : count(end); page < count(end); ++page) {
      found += blocks_[page] == 0 && held_[page] ? size(page) : 0;
    }
    return found;
  }

  void take(int64_t start, int64_t end) {
    spare_ -= spare(start, end);
    all_ += missing(start, end);
    for (int64_t page = start / kPage; page < count(end); ++page) {
      ++blocks_[page];
      held_[page] = true;
    }
  }

  void drop(int64_t start, int64_t end) {
    for (int64_t page = start / kPage; page < count(end); ++page) {
      spare_ += --blocks_[page] == 0 ? size(page) : 0;
    }
    beyond_ = std::max(beyond_, count(end));
  }

  // Gives so many bytes of spare pages back, the last ones first, or all that there are; returns how many.
  int64_t give(int64_t wanted) {
    int64_t given = 0;
    while (given < wanted && given < spare_) {
      while (blocks_[beyond_ - 1] > 0 || !held_[beyond_ - 1]) {
        --beyond_;
      }
      const int64_t end = beyond_;
      int64_t run = 0;
      while (beyond_ > 0 && blocks_[beyond_ - 1] == 0 && held_[beyond_ - 1] && given + run < wanted) {
        run += size(--beyond_);
      }
      if (madvise(base_ + beyond_ * kPage, (end - beyond_) * kPage, MADV_DONTNEED) != 0) {
        beyond_ = end;  // they are locked in memory
        break;
      }
      std::fill(held_.begin() + beyond_, held_.begin() + end, false);
      given += run;
    }
    spare_ -= given;
    all_ -= given;
    return given;
  }

 private:
  static int64_t count(int64_t nbytes) {
    return (nbytes + kPage - 1) / kPage;
  }

  int64_t size(int64_t page) const {
    return std::min(kPage, nbytes_ - page * kPage);
  }

  char* const base_;
  const int64_t nbytes_;
  std::vector<uint8_t> blocks_;  // of each page, how many are in it
  std::vector<bool> held_;
  int64_t spare_ = 0;   // bytes
  int64_t all_ = 0;     // bytes of pages that are held
  int64_t beyond_ = 0;  // from this page on none is spare
};

}  // namespace
