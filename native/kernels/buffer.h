// Thread-local scratch memory, kept for the next call.
#pragma once
#include <cstddef>
#include <cstdlib>
#if defined(__linux__)
#include <sys/mman.h>
#elif defined(_WIN32)
#include <malloc.h>
#endif

namespace bitport {

// Reused, since fresh pages would cost more than the copies made into them. Huge pages where the system provides them:
// 4 KiB pages fill L2 unevenly and need more TLB entries.
struct Buffer {
  void* data = nullptr;
  size_t size = 0;
  char* need(size_t bytes) {   // null if out of memory
    if (!data || bytes > size) {
      release();
      constexpr size_t kPage = size_t(2) << 20;
      size = (bytes / kPage + 1) * kPage;
#if defined(_WIN32)
      data = _aligned_malloc(size, kPage);
#else
      data = std::aligned_alloc(kPage, size);
#endif
      if (!data) size = 0;
#if defined(__linux__)
      if (data) madvise(data, size, MADV_HUGEPAGE);   // only a hint: the result does not matter
#endif
    }
    return static_cast<char*>(data);
  }
  void trim() {
    constexpr size_t kKept = size_t(64) << 20;
    if (size > kKept) release();
  }
  void release() {
#if defined(_WIN32)
    _aligned_free(data);
#else
    std::free(data);
#endif
    data = nullptr;
    size = 0;
  }
  ~Buffer() { release(); }
};

inline thread_local Buffer own_buffer;   // for a thread that works on a part of a product

static inline size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace bitport
