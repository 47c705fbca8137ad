// How work is shared out to threads. None is told beforehand what it does: of two threads that read the same memory one
// is often faster, and the other's rest would be waited for.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace xinfer {

// Calls `work` for each of `count` units, each thread with the next one.
template <class Work>
void share_out(int64_t count, Work work) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), count), 1, [&](int64_t, int64_t) {
    for (int64_t unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < count;) work(unit);
  });
}

// Calls `work` with stretches of `count` rows, each thread with its part of what is left, of `least` rows or more. So
// stretches are long, which memory is read fastest in, and the last ones, which threads end together with, short.
template <class Work>
void share_out_rows(int64_t count, int64_t least, Work work) {
  const int64_t threads = std::clamp<int64_t>(count / least, 1, at::get_num_threads());
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t first = next; first < count;) {
      const int64_t end = std::min(count, first + std::max(least, (count - first) / threads));
      if (next.compare_exchange_weak(first, end)) {
        work(first, end);
        first = next;
      }
    }
  });
}

}  // namespace xinfer
