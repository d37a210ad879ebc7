// Distributes work over threads: by the pool set with bitport_use_pool, else by OpenMP if compiled with it.
#pragma once
#include <atomic>
#include <cstdint>
#include "bitport_kernels.h"
#include "tiles.h"

namespace bitport {

// Calls body on [0, count), one index per thread if the pool has enough threads.
void share_pieces(int64_t count, BitportBody body, void* context);

// Calls work(i) for every i below count, at most `threads` at a time; serially within a parallel region of the caller.
// A thread starts with the item of its own index, for which its caches may still hold data from the previous call.
template <class Work>
static void share(int64_t count, int32_t threads, const Work& work) {
  if (threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) work(i);
    return;
  }
  const int64_t at_once = count < threads ? count : threads;
  struct Queue { const Work& work; int64_t count; std::atomic<int64_t> next; } queue{work, count, {at_once}};
  share_pieces(at_once, [](int64_t begin, int64_t end, void* context) {
    Queue& q = *static_cast<Queue*>(context);
    for (; begin < end; ++begin) q.work(begin);
    for (int64_t i = q.next++; i < q.count; i = q.next++) q.work(i);
  }, &queue);
}

// Calls work(first, end) on ranges that make up [0, count): four for each thread, so that they end at about the same time.
template <class Work>
static void share_ranges(int64_t count, int32_t threads, const Work& work) {
  if (count == 0) return;
  const int64_t piece = ceil_div(count, int64_t(threads) * 4);
  share(ceil_div(count, piece), threads, [&](int64_t i) { work(i * piece, smaller(i * piece + piece, count)); });
}

}  // namespace bitport
