// Loaded before everything else: lets one allocation fail, the n-th of those that certain libraries ask for.

#include <dlfcn.h>
#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace {

constexpr int64_t kRanges = 64;

std::atomic<bool> armed{false};
std::atomic<int64_t> left{0};  // until the one that fails, which is the first at zero
std::atomic<int64_t> asked{0};
std::atomic<int64_t> failed{0};
int64_t ranges = 0;
uintptr_t first[kRanges], last[kRanges];

// Whether this allocation is the one that fails.
bool fails(const void* caller) {
  if (!armed.load(std::memory_order_acquire)) {
    return false;
  }
  const auto address = reinterpret_cast<uintptr_t>(caller);
  for (int64_t k = 0; k < ranges; ++k) {
    if (address >= first[k] && address < last[k]) {
      asked.fetch_add(1);
      const bool now = left.fetch_sub(1) == 0;
      failed.fetch_add(now);
      return now;
    }
  }
  return false;
}

template <typename Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

// From now on the n-th allocation, from zero, that code within these addresses asks for fails; minus one: none does.
void faults_arm(int64_t n, int64_t count, const uint64_t* from, const uint64_t* to) {
  armed = false;
  ranges = count < kRanges ? count : kRanges;
  for (int64_t k = 0; k < ranges; ++k) {
    first[k] = from[k];
    last[k] = to[k];
  }
  left = n;
  asked = 0;
  failed = 0;
  armed = true;
}

// Ends it; returns how many were asked for, or minus that if one failed.
int64_t faults_disarm() {
  armed = false;
  return failed.load() > 0 ? -asked.load() : asked.load();
}

int posix_memalign(void** pointer, size_t alignment, size_t size) {
  static const auto usual = next<int (*)(void**, size_t, size_t)>("posix_memalign");
  return fails(__builtin_return_address(0)) ? ENOMEM : usual(pointer, alignment, size);
}

void* mmap(void* address, size_t length, int protection, int flags, int file, off_t offset) noexcept {
  static const auto usual = next<void* (*)(void*, size_t, int, int, int, off_t)>("mmap");
  if (fails(__builtin_return_address(0))) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  return usual(address, length, protection, flags, file, offset);
}

}  // extern "C"

void* operator new(size_t size) {
  if (!fails(__builtin_return_address(0))) {
    if (void* made = std::malloc(size > 0 ? size : 1)) {
      return made;
    }
  }
  throw std::bad_alloc();
}

void* operator new(size_t size, const std::nothrow_t&) noexcept {
  return fails(__builtin_return_address(0)) ? nullptr : std::malloc(size > 0 ? size : 1);
}

void operator delete(void* pointer) noexcept {
  std::free(pointer);
}

void operator delete(void* pointer, size_t) noexcept {
  std::free(pointer);
}

void operator delete(void* pointer, const std::nothrow_t&) noexcept {
  std::free(pointer);
}
