// Work shared among torch's own threads, and code for each kind of processor.

#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#define INLINE inline __attribute__((always_inline))
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

namespace {

// torch's own threads: a second runtime beside them would fight for the same cores.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
const Parallel parallel = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));

// Each thread takes the next piece of work as long as there is one.
template <typename Work>
void share(int64_t count, int64_t threads, const Work& work) {
  struct Shared {
    const Work& work;
    int64_t count;
    std::atomic<int64_t> next;
  } shared{work, count, 0};
  const auto take = [](void* data) {
    Shared& all = *static_cast<Shared*>(data);
    for (int64_t piece; (piece = all.next.fetch_add(1, std::memory_order_relaxed)) < all.count;) {
      all.work(piece);
    }
  };
  if (parallel != nullptr && std::min(threads, count) > 1) {
    parallel(take, &shared, static_cast<unsigned>(std::min(threads, count)), 0);
  } else {
    take(&shared);
  }
}

}  // namespace
