// The allocator under many threads, for ThreadSanitizer: meters, recordings, arenas, steps that change threads, blocks
// that are freed by another thread than made them. Prints what was done; the sanitizer says what was wrong.

#include "allocator.cpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <thread>

namespace {

constexpr int kThreads = 6;
constexpr int kRounds = 3000;
constexpr int64_t kBytes = 1 << 14;

// Blocks that one thread leaves for another to free.
class Shelf {
 public:
  void leave(c10::DataPtr block) {
    std::lock_guard<std::mutex> guard(lock_);
    blocks_.push_back(std::move(block));
  }

  c10::DataPtr take() {
    std::lock_guard<std::mutex> guard(lock_);
    if (blocks_.empty()) {
      return {};
    }
    c10::DataPtr block = std::move(blocks_.front());
    blocks_.pop_front();
    return block;
  }

 private:
  std::mutex lock_;
  std::deque<c10::DataPtr> blocks_;
};

Shelf shelf;
std::atomic<int64_t> numbers{0};
std::atomic<int64_t> placed{0};

void use(const c10::DataPtr& block, int64_t nbytes, int value) {
  if (block.get() != nullptr) {
    std::memset(block.get(), value, nbytes);
  }
}

void allocate(std::mt19937& chance) {
  const int64_t nbytes = chance() % kBytes;
  c10::DataPtr block = c10::GetCPUAllocator()->allocate(nbytes);
  use(block, nbytes, 1);
  if (chance() % 2 == 0) {
    shelf.leave(std::move(block));
  }
  shelf.take();
}

void measure(std::mt19937& chance) {
  const int64_t slot = lowtide_meter_start();
  if (slot < 0) {
    return;
  }
  int64_t counters[3];
  allocate(chance);
  lowtide_meter_read(slot, counters);
  lowtide_meter_reset(slot);
  lowtide_meter_stop(slot, counters);
}

void record(std::mt19937& chance) {
  if (lowtide_record_start(50) < 0) {
    return;
  }
  int64_t counts[2];
  allocate(chance);
  lowtide_record_stop(counts);
  std::vector<int64_t> events(3 * counts[0] + 3);
  lowtide_record_take(events.data());
}

// A step of two instructions in an arena, or one that learns; in the middle another thread goes on with it.
void step(std::mt19937& chance) {
  const bool learns = chance() % 2 == 0;
  Arena* arena = learns ? nullptr : lowtide_arena_map(4 * kBytes);
  const int64_t start[] = {0, 2, 3}, nbytes[] = {kBytes, 512, kBytes}, offset[] = {0, kBytes, 2 * kBytes};
  Tape* tape = learns ? nullptr : lowtide_tape_make(2, start, 3, nbytes, offset);
  int64_t cursor = 0;
  const int64_t number = numbers.fetch_add(1);
  if (lowtide_step_begin(number, arena, tape, &cursor) == 0) {
    c10::DataPtr first = c10::GetCPUAllocator()->allocate(kBytes), second = c10::GetCPUAllocator()->allocate(512);
    use(first, kBytes, 2);
    use(second, 512, 3);
    lowtide_step_expect(kBytes);
    lowtide_step_pause(number);
    std::thread other([&] {
      lowtide_step_resume(number, 0, 0);
      cursor = 1;
      c10::DataPtr third = c10::GetCPUAllocator()->allocate(kBytes);
      use(third, kBytes, 4);
      second.clear();
      Step* ended = lowtide_step_end(number);
      int64_t counters[4];
      lowtide_step_read(ended, counters);
      placed += counters[1];
      std::vector<int64_t> events(4 * counters[3] + 4);
      lowtide_step_take(ended, events.data());
      shelf.leave(std::move(third));
    });
    other.join();
    shelf.leave(std::move(first));
  }
  if (tape != nullptr) {
    lowtide_tape_drop(tape);
  }
  if (arena != nullptr) {
    lowtide_arena_blocks(arena);
    lowtide_arena_unmap(arena);
  }
}

void work(int seed) {
  std::mt19937 chance(seed);
  for (int round = 0; round < kRounds; ++round) {
    switch (chance() % 5) {
      case 0: measure(chance); break;
      case 1: record(chance); break;
      case 2: step(chance); break;
      default: allocate(chance);
    }
  }
}

// More arenas at a time than a shelf has places, from all threads.
void many_arenas() {
  std::vector<Arena*> arenas;
  for (int number = 0; number < 100; ++number) {
    arenas.push_back(lowtide_arena_map(kPage));
  }
  for (Arena* arena : arenas) {
    if (arena == nullptr || arena_of(arena->base) != arena) {
      std::abort();
    }
    lowtide_arena_unmap(arena);
  }
}

}  // namespace

int main() {
  std::vector<std::thread> threads;
  for (int seed = 0; seed < kThreads; ++seed) {
    threads.emplace_back([=] {
      work(seed);
      many_arenas();
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  while (shelf.take()) {
  }
  std::printf("%lld steps, %lld places, installed: %lld\n", static_cast<long long>(numbers.load()),
              static_cast<long long>(placed.load()), static_cast<long long>(lowtide_installed()));
  return lowtide_installed() != 0;
}
