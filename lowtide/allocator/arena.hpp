// One block of memory for all that a step makes, and the tape that says where in it each allocation goes.

#pragma once

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
constexpr int64_t kPage = 1 << 12;
constexpr int64_t kMost = int64_t{1} << 56;  // bytes, of an arena: no system has more
constexpr int64_t kOnAShelf = 64;  // arenas

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
    auto* arena = new (std::nothrow) Arena(nbytes, base);
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

  // Puts a block at this offset; null where one that should be gone is still there, or where there is no such place.
  void* take(int64_t offset, int64_t size) {
    if (offset < 0 || size <= 0 || offset > nbytes || size > nbytes - offset) {
      return nullptr;
    }
    const auto next = blocks_.lower_bound(offset);
    if (next != blocks_.end() && next->first < offset + size) {
      return nullptr;
    }
    if (next != blocks_.begin() && std::prev(next)->second > offset) {
      return nullptr;
    }
    blocks_.emplace_hint(next, offset, offset + size);
    used_ += size;
    return base + offset;
  }

  void drop(const void* pointer) {
    const auto found = blocks_.find(static_cast<const char*>(pointer) - base);
    if (found == blocks_.end()) {
      return;
    }
    used_ -= found->second - found->first;
    blocks_.erase(found);
    unmap_if_done();
  }

  // Its owner lets go of it.
  void leave() {
    owned_ = false;
    unmap_if_done();
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

  Arena(int64_t nbytes, char* base) : nbytes(nbytes), base(base) {}

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

  void unmap_if_done() {
    if (owned_ || !blocks_.empty()) {
      return;
    }
    slot_->store(nullptr);
    munmap(base, nbytes);  // the few bytes of this object stay: another thread may be looking for its own arena
  }

  std::map<int64_t, int64_t> blocks_;  // that are there: offset -> end
  int64_t used_ = 0;                   // bytes of these
  std::atomic<Arena*>* slot_ = nullptr;
  bool owned_ = true;
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

  Step(int64_t number, Arena* arena, const Tape* tape, const int64_t* cursor, Step* outer)
      : number(number), outer(outer), arena_(arena), tape_(tape), cursor_(cursor) {
    if (arena != nullptr) {
      outside_ = -arena->used();  // who holds tensors of an earlier step holds them beside this one
    }
  }

  bool learns() const {
    return tape_ == nullptr;
  }

  // The place of the next allocation, or null where it has none; the caller holds the ledger's lock. An instruction that
  // once asks for something else than its tape says gets no more places: what follows may be in another order too. Nor
  // has an allocation a place where a block from before, which was gone by then when the step was learned, still is.
  void* place(int64_t nbytes) {
    if (learns()) {
      return nullptr;
    }
    if (*cursor_ != instruction_) {
      instruction_ = *cursor_;
      lost_ = instruction_ < 0 || instruction_ >= tape_->instructions();
      next_ = lost_ ? 0 : tape_->start[instruction_];
    }
    if (lost_ || next_ == tape_->start[instruction_ + 1] || tape_->nbytes[next_] != nbytes) {
      lost_ = true;
      ++mismatches_;
      return nullptr;
    }
    const int64_t offset = tape_->offset[next_++];
    if (offset < 0) {
      return nullptr;
    }
    void* place = arena_ == nullptr ? nullptr : arena_->take(offset, nbytes);
    ++(place != nullptr ? placed_ : mismatches_);
    return place;
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

  Arena* const arena_;
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
