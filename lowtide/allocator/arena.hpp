// One block of memory for all that a step makes, and the tape that says where in it each allocation goes.

#pragma once

#include "pages.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <map>
#include <new>
#include <vector>

namespace {

constexpr int64_t kMapped = 1 << 16;   // bytes from which a block of a step that learns is mapped by itself
constexpr int64_t kHuge = 2 << 20;     // bytes of a huge page
constexpr int64_t kChunk = 16 * kPage;  // bytes: no less is given back at a time
constexpr int64_t kMost = int64_t{1} << 56;  // bytes, of an arena: no system has more
constexpr int64_t kOnAShelf = 64;  // arenas
constexpr int64_t kNowhere = -1;   // in place of an offset

constexpr int kUsed = PROT_READ | PROT_WRITE;

void* map(int64_t nbytes, int protection = kUsed) {
  void* mapped = mmap(nullptr, nbytes, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return mapped == MAP_FAILED ? nullptr : mapped;
}

// All that changes in an arena is guarded by the ledger's lock; who looks for the arena of an address needs none.
class Arena {
 public:
  const int64_t nbytes;
  char* const base;

  // A new arena, or null where the system has not that much.
  static Arena* make(int64_t nbytes) {
    if (nbytes <= 0 || nbytes > kMost) {
      return nullptr;
    }
    const int64_t pages = (nbytes + kPage - 1) / kPage * kPage;
    const int64_t slack = pages >= kHuge ? kHuge : 0;
    auto* mapped = static_cast<char*>(map(pages + slack, PROT_NONE));  // counts for no limit yet
    if (mapped == nullptr) {
      return nullptr;
    }
    char* base = mapped;
    if (slack > 0) {  // huge pages want an aligned start
      base = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(mapped) + kHuge - 1) / kHuge * kHuge);
      if (base != mapped) {
        munmap(mapped, base - mapped);
      }
      if (base != mapped + slack) {
        munmap(base + pages, mapped + slack - base);
      }
    }
    if (mprotect(base, pages, kUsed) != 0) {
      munmap(base, pages);
      return nullptr;
    }
    if (slack > 0) {
      madvise(base, pages, MADV_HUGEPAGE);
    }
    Arena* arena = nullptr;
    try {
      arena = new Arena(nbytes, base);
    } catch (const std::bad_alloc&) {
      // there is none
    }
    if (arena == nullptr || !arena->enter()) {
      munmap(base, pages);
      delete arena;
      return nullptr;
    }
    return arena;
  }

  // What is true of one of the arenas, or null; for any number of them, and without a lock.
  template <typename Test>
  static Arena* find(Test test) {
    for (Shelf* shelf = &first(); shelf != nullptr; shelf = shelf->next.load(std::memory_order_acquire)) {
      for (auto& slot : shelf->slots) {
        Arena* arena = slot.load(std::memory_order_acquire);
        if (arena != nullptr && test(*arena)) {
          return arena;
        }
      }
    }
    return nullptr;
  }

  // Whether a block may be put at this offset: not where one that should be gone is still there, nor beyond the end.
  bool free(int64_t offset, int64_t size) const {
    if (offset < 0 || size <= 0 || offset > nbytes || size > nbytes - offset) {
      return false;
    }
    const auto next = blocks_.lower_bound(offset);
    return (next == blocks_.end() || next->first >= offset + size) &&
           (next == blocks_.begin() || std::prev(next)->second <= offset);
  }

  // The bytes that a block at this offset would add to what is held.
  int64_t adds(int64_t offset, int64_t size) const {
    return size - pages_.spare(offset, offset + size);
  }

  // Puts a block at an offset that is free.
  void* take(int64_t offset, int64_t size) {
    blocks_.emplace(offset, offset + size);
    pages_.take(offset, offset + size);
    used_ += size;
    return base + offset;
  }

  // Takes a block out, and returns its bytes.
  int64_t drop(const void* pointer) {
    const auto found = blocks_.find(static_cast<const char*>(pointer) - base);
    if (found == blocks_.end()) {
      return 0;
    }
    const auto [start, end] = *found;
    pages_.drop(start, end);
    used_ -= end - start;
    blocks_.erase(found);
    return end - start;
  }

  // Gives so many bytes back to the system, or a few more, or all that no block needs; returns how many.
  int64_t give(int64_t wanted) {
    const int64_t least = std::clamp(nbytes / 32, kChunk, kHuge);
    const int64_t step = nbytes >= 32 * kHuge ? kHuge : kPage;  // huge pages stay whole
    return pages_.give((std::max(wanted, least) + step - 1) / step * step);
  }

  // Its owner lets go of it.
  void leave() {
    owned_ = false;
  }

  // Unmaps it if it has no owner and no block. The few bytes of this object stay: others may look for their arena.
  bool unmap_if_done() {
    if (owned_ || !blocks_.empty()) {
      return false;
    }
    slot_->store(nullptr);
    munmap(base, nbytes);
    return true;
  }

  // The bytes of its blocks, whose pages count for no more than those of a heap would, and of pages that it holds
  // beside them.
  int64_t held() const {
    return used_ + pages_.spare();
  }

  // What meters are told: while a step runs in it, the bytes of all its pages, as the plan counts them.
  int64_t shown() const {
    return running > 0 ? pages_.held() : held();
  }

  int64_t blocks() const {
    return static_cast<int64_t>(blocks_.size());
  }

  int64_t used() const {
    return used_;
  }

 private:
  // Where arenas are looked up; a shelf stays for good, and a full one leads to the next.
  struct Shelf {
    std::array<std::atomic<Arena*>, kOnAShelf> slots{};
    std::atomic<Shelf*> next{nullptr};
  };

  Arena(int64_t nbytes, char* base) : nbytes(nbytes), base(base), pages_(base, nbytes) {}

  static Shelf& first() {
    static Shelf shelf;  // nothing is done at the end of the process
    return shelf;
  }

  // Takes a slot; false where there is no memory for one.
  bool enter() {
    for (Shelf* shelf = &first();;) {
      for (auto& slot : shelf->slots) {
        Arena* none = nullptr;
        if (slot.compare_exchange_strong(none, this)) {
          slot_ = &slot;
          return true;
        }
      }
      Shelf* next = shelf->next.load();
      if (next == nullptr) {
        auto* made = new (std::nothrow) Shelf;
        if (made == nullptr) {
          return false;
        }
        if (shelf->next.compare_exchange_strong(next, made)) {
          next = made;
        } else {  // another thread was first, and `next` is its shelf now
          delete made;
        }
      }
      shelf = next;
    }
  }

  std::map<int64_t, int64_t> blocks_;  // that are there: offset -> end
  int64_t used_ = 0;                   // bytes of these
  std::atomic<Arena*>* slot_ = nullptr;
  bool owned_ = true;
  Pages pages_;

 public:
  int64_t running = 0;  // steps that run in it now, and need its pages
  bool counted = false;  // it keeps our allocator in place
};

// The arena that an address is in, or null.
Arena* arena_of(const void* pointer) {
  return Arena::find(
      [=](const Arena& arena) { return pointer >= arena.base && pointer < arena.base + arena.nbytes; });
}

struct Tape {
  std::vector<int64_t> start;   // of each instruction's entries, and the end of the last
  std::vector<int64_t> nbytes;  // that each allocation asks for, in order
  std::vector<int64_t> offset;  // that it gets; -1: outside the arena

  int64_t instructions() const {
    return static_cast<int64_t>(start.size()) - 1;
  }
};

// One step of one thread. Without a tape it learns: it writes down what each instruction allocates and frees.
class Step {
 public:
  const int64_t number;
  Step* outer;  // of the same thread
  Arena* const arena;  // null: it learns, or allocates as ever

  Step(int64_t number, Arena* arena, const Tape* tape, const int64_t* cursor, Step* outer)
      : number(number), outer(outer), arena(arena), tape_(tape), cursor_(cursor) {
    if (arena != nullptr) {
      outside_ = -arena->used();  // who holds tensors of an earlier step holds them beside this one
    }
  }

  bool learns() const {
    return tape_ == nullptr;
  }

  // The offset in its arena of the next allocation, or kNowhere; the caller holds the ledger's lock. An instruction that
  // once asks for something else than its tape says gets no more places: what follows may be in another order too. Nor
  // has an allocation a place where a block from before, which was gone by then when the step was learned, still is.
  int64_t place(int64_t nbytes) {
    if (tape_ == nullptr || arena == nullptr) {
      return kNowhere;
    }
    if (*cursor_ != instruction_) {
      instruction_ = *cursor_;
      lost_ = instruction_ < 0 || instruction_ >= tape_->instructions();
      next_ = lost_ ? 0 : tape_->start[instruction_];
    }
    if (lost_ || next_ == tape_->start[instruction_ + 1] || tape_->nbytes[next_] != nbytes) {
      lost_ = true;
      ++mismatches_;
      return kNowhere;
    }
    const int64_t offset = tape_->offset[next_++];
    if (offset < 0) {
      return kNowhere;
    }
    if (!arena->free(offset, nbytes)) {
      ++mismatches_;
      return kNowhere;
    }
    ++placed_;
    return offset;
  }

  void given(int64_t nbytes) {
    outside_ += nbytes;
    most_outside_ = std::max(most_outside_, outside_);
  }

  void made(int64_t block, int64_t nbytes) {
    given(nbytes);
    note(kMade, block, nbytes);
  }

  void freed(int64_t block, int64_t nbytes) {
    outside_ -= nbytes;
    note(kFreed, block, nbytes);
  }

  // Bytes that it holds now, less those of tensors from before.
  int64_t holds() const {
    return outside_ + (arena == nullptr ? 0 : arena->used());
  }

  void write(int64_t* counters) const {
    counters[0] = most_outside_;
    counters[1] = placed_;
    counters[2] = mismatches_;
    counters[3] = static_cast<int64_t>(events_.size() / 4);
  }

  void write_events(int64_t* numbers) const {
    std::copy(events_.begin(), events_.end(), numbers);
  }

 private:
  enum Kind : int64_t { kMade = 0, kFreed = 1 };

  // What can't be noted for want of memory makes all of it worthless; the step itself goes on.
  void note(Kind kind, int64_t block, int64_t nbytes) noexcept {
    if (!learns() || deaf_) {
      return;
    }
    try {
      events_.insert(events_.end(), {*cursor_, kind, block, nbytes});
    } catch (const std::bad_alloc&) {
      events_.clear();
      deaf_ = true;
    }
  }

  const Tape* const tape_;
  const int64_t* const cursor_;  // the instruction that runs, written by the program

  int64_t instruction_ = -1;
  int64_t next_ = 0;  // entry of the tape
  bool lost_ = false;

  int64_t outside_ = 0;  // bytes, of what this thread made and freed since the start, less those of tensors from before
  int64_t most_outside_ = 0;
  int64_t placed_ = 0;
  int64_t mismatches_ = 0;
  std::vector<int64_t> events_;
  bool deaf_ = false;
};

thread_local Step* stepping = nullptr;  // the innermost step of this thread

}  // namespace
