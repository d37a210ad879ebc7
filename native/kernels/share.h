// Work over threads: the pool of the OpenMP library the process already has.
#pragma once
#include <cstdint>
#if defined(_OPENMP)
#include <omp.h>
#endif

namespace bitport {

// Calls work(i) for every i below count, at most `threads` at a time; alone within a parallel region of the caller.
template <class Work>
static void share(int64_t count, int32_t threads, const Work& work) {
#if defined(_OPENMP)
  if (threads > 1 && count > 1 && !omp_in_parallel()) {
    const int team = count < threads ? int(count) : int(threads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(team)
    for (int64_t i = 0; i < count; ++i) work(i);
    return;
  }
#endif
  for (int64_t i = 0; i < count; ++i) work(i);
}

}  // namespace bitport
