// Counts the memory that torch asks for on the CPU, and gives the allocations of a planned step their places, by
// standing between torch and its own allocator.
//
// Every block that has no place in an arena still comes from the allocator that was there before, so it may outlive
// the counting, and a block that one of the two made may be freed through the other. Sizes are kept in a table beside
// the blocks, never in a header before them: oneDNN frees raw pointers through whichever allocator is installed at that
// time, and what is in an arena is known by its address.

#include "arena.hpp"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr int64_t kMeters = 64;  // one bit each in Ledger::running_

// Answers of the functions that start something, beside a slot or zero.
constexpr int64_t kRefused = -1;  // the allocator can't be put in place
constexpr int64_t kBusy = -2;     // every meter, or the one recorder, is in use
constexpr int64_t kNoMemory = -3;

struct Block {
  int64_t nbytes;
  int64_t number;          // counts blocks from the first one ever tracked
  c10::DeleterFnPtr free;  // of the allocator that made it; null: mapped by ourselves
};

struct Meter {
  int64_t current = 0;  // bytes born minus bytes freed since the start
  int64_t peak = 0;
  int64_t allocations = 0;
};

enum Kind : int64_t { kAlloc = 0, kFree = 1 };

struct Event {
  int64_t kind;
  int64_t block;  // counts from the start of the recording: a block born before it has a negative number
  int64_t nbytes;
};

// The blocks that are alive, and everyone who wants to hear of them. One lock over all of it keeps the events in one
// order and the peaks exact.
class Ledger {
 public:
  std::mutex lock;

  // Returns the number of the block.
  int64_t born(void* pointer, int64_t nbytes, c10::DeleterFnPtr free) {
    std::lock_guard<std::mutex> guard(lock);
    make_room(nbytes, nbytes);
    // An address that is still in the table was freed behind our back, while we were not installed. No meter ran
    // then, so none is told.
    Block block{nbytes, born_, free};
    alive_.insert_or_assign(pointer, block);
    ++born_;
    live_ += nbytes;
    count(nbytes);
    note(kAlloc, block);
    return block.number;
  }

  // Forgets the block and says whether there was one; a block that is not in the table was made by somebody else.
  bool died(void* pointer, Block& block) {
    std::lock_guard<std::mutex> guard(lock);
    auto found = alive_.find(pointer);
    if (found == alive_.end()) {
      return false;
    }
    block = found->second;
    alive_.erase(found);
    live_ -= block.nbytes;
    count(-block.nbytes);
    note(kFree, block);
    return true;
  }

  // The functions below expect the caller to hold the lock.

  // Puts a block into an arena, at an offset that is free.
  void* take(Arena& arena, int64_t offset, int64_t nbytes) {
    make_room(nbytes, arena.adds(offset, nbytes));
    void* pointer = nullptr;
    change(arena, [&] { pointer = arena.take(offset, nbytes); });
    live_ += nbytes;
    return pointer;
  }

  void drop(Arena& arena, const void* pointer) {
    change(arena, [&] { live_ -= arena.drop(pointer); });
    exhausted_ = false;
    unmap_if_done(arena);
  }

  // An arena that nobody will use again holds no more than the tensors that are in it.
  void left(Arena& arena) {
    arena.leave();
    if (!unmap_if_done(arena)) {
      change(arena, [&] { arena.give(arena.nbytes); });
    }
  }

  // Without arenas the program would add so many bytes to the tensors that are there.
  void expect(int64_t nbytes) {
    plain_ = std::max(plain_, live_ + nbytes);
  }

  // A step begins, or goes on: it needs the pages of its arena.
  void begun(Arena* arena) {
    ++steps_;
    runs(arena, 1);
  }

  void stopped(Arena* arena) {
    --steps_;
    runs(arena, -1);
    exhausted_ = false;
  }

  // Nobody has counted for a while.
  void begin_to_count() {
    plain_ = live_;
  }

  // Tells all meters of a block that came or went.
  void count(int64_t nbytes) {
    level(nbytes);
    each_meter([nbytes](Meter& meter) { meter.allocations += nbytes > 0; });
  }

  int64_t start_meter() {
    int64_t slot = std::countr_one(running_);
    if (slot == kMeters) {
      return kBusy;
    }
    running_ |= uint64_t{1} << slot;
    meters_[slot] = Meter{};
    return slot;
  }

  void stop_meter(int64_t slot) {
    running_ &= ~(uint64_t{1} << slot);
  }

  Meter& meter(int64_t slot) {
    return meters_[slot];
  }

  int64_t start_recording(int64_t limit) {
    if (recorder_taken_) {
      return kBusy;
    }
    recorder_taken_ = true;
    recording_ = true;
    limit_ = limit;
    first_ = born_;
    lost_ = 0;
    return 0;
  }

  void stop_recording() {
    recording_ = false;
  }

  int64_t recorded() const {
    return static_cast<int64_t>(events_.size());
  }

  int64_t lost() const {
    return lost_;
  }

  // Gives the events away, and the recorder to the next one who asks.
  std::vector<Event> take_recording() {
    recorder_taken_ = false;
    return std::exchange(events_, {});
  }

 private:
  // So many more steps run in an arena, if there is one.
  void runs(Arena* arena, int64_t more) {
    if (arena != nullptr) {
      change(*arena, [&] { arena->running += more; });
    }
  }

  bool unmap_if_done(Arena& arena) {
    const bool done = arena.unmap_if_done();
    if (done) {
      held_ -= arena.held();
      show(-arena.shown());
    }
    return done;
  }

  // Does something to an arena, and counts what it holds then.
  template <typename Function>
  void change(Arena& arena, const Function& function) {
    const int64_t held = arena.held(), shown = arena.shown();
    function();
    held_ += arena.held() - held;
    show(arena.shown() - shown);
  }

  // Memory came or went.
  void level(int64_t nbytes) {
    held_ += nbytes;
    show(nbytes);
  }

  // Tells all meters.
  void show(int64_t nbytes) {
    each_meter([nbytes](Meter& meter) {
      meter.current += nbytes;
      meter.peak = std::max(meter.peak, meter.current);
    });
  }

  // Before tensors of so many bytes come, and so many bytes of memory with them: where that is more than the program
  // would ever have held without arenas, those that no step runs in give back pages that no tensor is in.
  void make_room(int64_t live, int64_t nbytes) {
    if (steps_ == 0) {
      plain_ = std::max(plain_, live_ + live);
    }
    int64_t wanted = held_ + nbytes - plain_;
    if (wanted <= 0 || exhausted_) {
      return;
    }
    for (const bool empty : {true, false}) {
      Arena::find([&](Arena& arena) {
        if (arena.running == 0 && empty == (arena.used() == 0)) {
          change(arena, [&] { wanted -= arena.give(wanted); });
        }
        return wanted <= 0;
      });
    }
    exhausted_ = wanted > 0;
  }

  template <typename Function>
  void each_meter(Function function) {
    for (uint64_t rest = running_; rest != 0; rest &= rest - 1) {
      function(meters_[std::countr_zero(rest)]);
    }
  }

  void note(Kind kind, const Block& block) noexcept {
    if (!recording_) {
      return;
    }
    if (recorded() >= limit_) {
      ++lost_;
      return;
    }
    try {
      events_.push_back({kind, block.number - first_, block.nbytes});
    } catch (const std::bad_alloc&) {  // a block must be freed all the same
      ++lost_;
    }
  }

  std::unordered_map<void*, Block> alive_;
  int64_t born_ = 0;

  // Bytes, all counted from the same unknown level.
  int64_t live_ = 0;   // of tensors, in arenas or not
  int64_t held_ = 0;   // of tensors outside of arenas, and of pages of arenas
  int64_t plain_ = 0;  // the most that the program would have held without arenas, as far as that was seen
  int64_t steps_ = 0;  // that run now
  bool exhausted_ = false;  // no arena has anything to give

  std::array<Meter, kMeters> meters_;
  uint64_t running_ = 0;

  bool recorder_taken_ = false;
  bool recording_ = false;
  int64_t limit_ = 0;
  int64_t first_ = 0;  // number of the first block born in the recording
  int64_t lost_ = 0;   // events beyond the limit
  std::vector<Event> events_;
};

// Never destroyed: tensors are freed after the destructors of this library would have run.
Ledger& ledger() {
  static Ledger* const only = new Ledger;
  return *only;
}

// The allocator that makes the blocks. It stays known after we are uninstalled, because a tensor born under us asks us
// again when it is resized.
std::atomic<c10::Allocator*> source{nullptr};

void give_back(void* pointer, int64_t nbytes, c10::DeleterFnPtr free) {
  if (free == nullptr) {
    munmap(pointer, nbytes);
  } else {
    free(pointer);
  }
}

void release(void* pointer) {
  if (Arena* arena = arena_of(pointer)) {
    std::lock_guard<std::mutex> guard(ledger().lock);
    ledger().drop(*arena, pointer);
    return;
  }
  Block block;
  if (!ledger().died(pointer, block)) {  // before its address can be handed out again
    source.load()->raw_deleter()(pointer);
    return;
  }
  if (Step* step = stepping) {
    step->freed(block.number, block.nbytes);
  }
  give_back(pointer, block.nbytes, block.free);
}

class LowtideAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t requested) override {
    const auto nbytes = static_cast<int64_t>(requested);
    Step* step = stepping;
    if (step != nullptr && nbytes > 0 && !step->learns()) {
      std::lock_guard<std::mutex> guard(ledger().lock);
      if (const int64_t offset = step->place(nbytes); offset != kNowhere) {
        void* place = ledger().take(*step->arena, offset, nbytes);
        return {place, place, &release, c10::DeviceType::CPU};
      }
    }
    c10::Allocator* maker = source.load();
    // While a step learns, its large blocks leave nothing behind in the heap, where its arena will not need them.
    void* pointer = step != nullptr && step->learns() && nbytes >= kMapped ? map(nbytes) : nullptr;
    const bool mapped = pointer != nullptr;
    if (!mapped) {
      pointer = maker->raw_allocate(requested);
    }
    if (pointer != nullptr) {  // torch's answer to zero bytes is null, and nothing frees that
      const int64_t number = enter(pointer, nbytes, mapped ? nullptr : maker->raw_deleter());
      if (step != nullptr) {
        step->made(number, nbytes);
      }
    }
    return {pointer, pointer, &release, c10::DeviceType::CPU};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* destination, const void* origin, size_t nbytes) const override {
    default_copy_data(destination, origin, nbytes);
  }

 private:
  // The number of a new block; without memory for its place in the table there is no block.
  static int64_t enter(void* pointer, int64_t nbytes, c10::DeleterFnPtr free) {
    try {
      return ledger().born(pointer, nbytes, free);
    } catch (const std::bad_alloc&) {
      give_back(pointer, nbytes, free);
      throw;
    }
  }
};

LowtideAllocator& ours() {
  static LowtideAllocator* const only = new LowtideAllocator;
  return *only;
}

// Both are made when the library is loaded: torch hands the pointer to other threads without a lock.
[[maybe_unused]] const bool made = (ledger(), ours(), true);

// Puts our allocator in place while anybody uses it. Guarded by the ledger's lock.
class Installation {
 public:
  bool enter() {
    if (users_ == 0) {
      if (!install()) {
        return false;
      }
      ledger().begin_to_count();
    }
    ++users_;
    return true;
  }

  void leave() {
    if (--users_ == 0) {
      uninstall();
    }
  }

 private:
  bool install() {
    c10::Allocator* found = c10::GetCPUAllocator();
    if (found == &ours()) {
      return true;
    }
    // An allocator that was put over ours may forward to ours; forwarding to it would never end.
    bool forwards_to_us = buried_ && found != source.load();
    if (forwards_to_us || found->raw_deleter() == nullptr) {
      return false;
    }
    source.store(found);
    return put(&ours());
  }

  void uninstall() {
    buried_ = c10::GetCPUAllocator() != &ours();
    if (!buried_) {
      put(source.load());
    }
  }

  // torch ignores, without a word, an allocator of a lower priority than the highest it has seen. The least priority
  // that is heard leaves the field to others as we found it.
  static bool put(c10::Allocator* allocator) {
    for (int priority = 0; priority <= UINT8_MAX; ++priority) {
      c10::SetCPUAllocator(allocator, static_cast<uint8_t>(priority));
      if (c10::GetCPUAllocator() == allocator) {
        return true;
      }
    }
    return false;
  }

  int64_t users_ = 0;
  bool buried_ = false;  // another allocator was over ours when we last left
};

Installation installation;

// A child must not inherit the lock from a thread that it does not have.
void lock_before_fork() {
  ledger().lock.lock();
}

void unlock_after_fork() {
  ledger().lock.unlock();
}

const int at_fork = pthread_atfork(&lock_before_fork, &unlock_after_fork, &unlock_after_fork);

using Guard = std::lock_guard<std::mutex>;

// Takes a step out of a chain and returns it; null where it is not in it.
Step* take_out(Step*& chain, int64_t number) {
  Step** link = &chain;
  while (*link != nullptr && (*link)->number != number) {
    link = &(*link)->outer;
  }
  Step* step = *link;
  if (step != nullptr) {
    *link = step->outer;
  }
  return step;
}

Step* paused = nullptr;  // the steps that no thread has, a chain; guarded by the ledger's lock

void write(const Meter& meter, int64_t* counters) {
  counters[0] = meter.current;
  counters[1] = meter.peak;
  counters[2] = meter.allocations;
}

}  // namespace

extern "C" {

int64_t lowtide_installed() {
  return c10::GetCPUAllocator() == &ours();
}

// Keeps our allocator in place while it is: for a block that will be given back to whichever is in place by then.
int64_t lowtide_hold() {
  Guard guard(ledger().lock);
  return c10::GetCPUAllocator() == &ours() && installation.enter();
}

void lowtide_let_go() {
  Guard guard(ledger().lock);
  installation.leave();
}

// Returns the slot of a new meter, kRefused or kBusy.
int64_t lowtide_meter_start() {
  Guard guard(ledger().lock);
  if (!installation.enter()) {
    return kRefused;
  }
  int64_t slot = ledger().start_meter();
  if (slot < 0) {
    installation.leave();
  }
  return slot;
}

// Writes current, peak and allocations.
void lowtide_meter_read(int64_t slot, int64_t* counters) {
  Guard guard(ledger().lock);
  write(ledger().meter(slot), counters);
}

// Writes the last counters and gives the slot back.
void lowtide_meter_stop(int64_t slot, int64_t* counters) {
  Guard guard(ledger().lock);
  write(ledger().meter(slot), counters);
  ledger().stop_meter(slot);
  installation.leave();
}

void lowtide_meter_reset(int64_t slot) {
  Guard guard(ledger().lock);
  Meter& meter = ledger().meter(slot);
  meter.peak = meter.current;
}

// Returns zero, kRefused or kBusy.
int64_t lowtide_record_start(int64_t limit) {
  Guard guard(ledger().lock);
  if (!installation.enter()) {
    return kRefused;
  }
  int64_t answer = ledger().start_recording(limit);
  if (answer < 0) {
    installation.leave();
  }
  return answer;
}

// Writes how many events there are and how many more were lost to the limit.
void lowtide_record_stop(int64_t* counts) {
  Guard guard(ledger().lock);
  ledger().stop_recording();
  installation.leave();
  counts[0] = ledger().recorded();
  counts[1] = ledger().lost();
}

// Writes the events of the stopped recording, three numbers each: kind, block, nbytes.
void lowtide_record_take(int64_t* numbers) {
  static_assert(sizeof(Event) == 3 * sizeof(int64_t));
  Guard guard(ledger().lock);
  std::vector<Event> events = ledger().take_recording();
  std::copy_n(reinterpret_cast<const int64_t*>(events.data()), 3 * events.size(), numbers);
}

// Maps an arena; null where the system has not that much. As long as there is one, our allocator sees what others need.
Arena* lowtide_arena_map(int64_t nbytes) {
  Arena* arena = Arena::make(nbytes);
  if (arena != nullptr) {
    Guard guard(ledger().lock);
    arena->counted = installation.enter();
  }
  return arena;
}

// The arena is unmapped now, or when the last tensor in it is gone.
void lowtide_arena_unmap(Arena* arena) {
  Guard guard(ledger().lock);
  ledger().left(*arena);
  if (std::exchange(arena->counted, false)) {
    installation.leave();
  }
}

// The bytes of its pages that were not given back.
int64_t lowtide_arena_held(const Arena* arena) {
  Guard guard(ledger().lock);
  return arena->held();
}

// Where the allocations of each instruction go: those of instruction k are the entries from start[k] to start[k + 1].
// Null where there is no memory for it, or where `start` is none.
Tape* lowtide_tape_make(
    int64_t instructions, const int64_t* start, int64_t entries, const int64_t* nbytes, const int64_t* offset) {
  if (instructions < 0 || start[0] != 0 || start[instructions] != entries ||
      !std::is_sorted(start, start + instructions + 1)) {
    return nullptr;
  }
  try {
    return new Tape{{start, start + instructions + 1}, {nbytes, nbytes + entries}, {offset, offset + entries}};
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void lowtide_tape_drop(Tape* tape) {
  delete tape;
}

// From here on the allocations of this thread are those of a step: they go where the tape says or, without one, are
// written down; with a tape and no arena they go where all others go. The cursor is the instruction that runs; the
// number is nobody else's. Returns zero, kRefused or kNoMemory.
int64_t lowtide_step_begin(int64_t number, Arena* arena, const Tape* tape, const int64_t* cursor) {
  Guard guard(ledger().lock);
  if (!installation.enter()) {
    return kRefused;
  }
  auto* step = new (std::nothrow) Step(number, arena, tape, cursor, stepping);
  if (step == nullptr) {
    installation.leave();
    return kNoMemory;
  }
  stepping = step;
  ledger().begun(arena);
  return 0;
}

// Eager's step would add so many bytes to what is there now.
void lowtide_step_expect(int64_t nbytes) {
  Guard guard(ledger().lock);
  ledger().expect(nbytes);
}

// Ends this step, of this thread or paused, and returns it, for lowtide_step_take; null where it has ended already.
Step* lowtide_step_end(int64_t number) {
  Guard guard(ledger().lock);
  Step* step = take_out(stepping, number);
  if (step != nullptr) {
    ledger().stopped(step->arena);
  } else {
    step = take_out(paused, number);
  }
  if (step != nullptr) {
    installation.leave();
  }
  return step;
}

// Takes this step from this thread, until lowtide_step_resume: what is allocated before that is not the step's. All
// three say by its number which step they mean, and do nothing where it is not there: whoever was interrupted between
// two calls can call again.
void lowtide_step_pause(int64_t number) {
  Guard guard(ledger().lock);
  if (Step* step = take_out(stepping, number)) {
    step->outer = paused;
    paused = step;
    ledger().stopped(step->arena);
  }
}

// This thread goes on with a step that was paused, and that has so many more bytes now. In its place eager's would have
// `eager` bytes at most from here on.
void lowtide_step_resume(int64_t number, int64_t nbytes, int64_t eager) {
  Guard guard(ledger().lock);
  if (Step* step = take_out(paused, number)) {
    step->outer = stepping;
    ledger().expect(eager - step->holds() - nbytes);
    ledger().begun(step->arena);
    step->given(nbytes);
    stepping = step;
  }
}

// The bytes that a step holds which is paused; zero where there is none of this number.
int64_t lowtide_step_holds(int64_t number) {
  Guard guard(ledger().lock);
  for (const Step* step = paused; step != nullptr; step = step->outer) {
    if (step->number == number) {
      return step->holds();
    }
  }
  return 0;
}

// Writes the most bytes outside the arena, the allocations that had a place, those that did not follow the tape, and
// the number of events that were written down.
void lowtide_step_read(const Step* step, int64_t* counters) {
  step->write(counters);
}

// Writes the events of a step that learned, four numbers each: instruction, kind, block, nbytes; then forgets the step.
void lowtide_step_take(Step* step, int64_t* numbers) {
  step->write_events(numbers);
  delete step;
}

// Tensors that are in the arena.
int64_t lowtide_arena_blocks(const Arena* arena) {
  Guard guard(ledger().lock);
  return arena->blocks();
}

}  // extern "C"
