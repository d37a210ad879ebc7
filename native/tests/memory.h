// Memory of exactly the size that the interface requires, in three places:
//   heap    the address sanitizer detects an access to the byte after it; aligned to 16 bytes
//   skewed  the same, shifted by one element: aligned to an element only
//   fenced  ends at an inaccessible page; this also detects what the sanitizer misses: masked vectors, gathers, tile
//           registers
#pragma once
#if defined(_WIN32)
#define NOMINMAX
#include <windows.h>
#else
#include <sys/mman.h>
#include <unistd.h>
#endif
#include <cstdint>
#include <cstring>
#include "check.h"

enum class Place { heap, skewed, fenced };

// `size` bytes, whole pages, followed by one that is inaccessible.
#if defined(_WIN32)
inline size_t page() { return 4096; }
inline void* fenced(size_t size) {
  DWORD before = 0;
  char* base = static_cast<char*>(VirtualAlloc(nullptr, size + page(), MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE));
  EXPECT(base, "no memory");
  EXPECT(VirtualProtect(base + size, page(), PAGE_NOACCESS, &before), "no fence");
  return base;
}
inline void release(void* base, size_t) { VirtualFree(base, 0, MEM_RELEASE); }
#else
inline size_t page() { return size_t(sysconf(_SC_PAGESIZE)); }
inline void* fenced(size_t size) {
  void* base = mmap(nullptr, size + page(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  EXPECT(base != MAP_FAILED, "no memory");
  EXPECT(mprotect(static_cast<char*>(base) + size, page(), PROT_NONE) == 0, "no fence");
  return base;
}
inline void release(void* base, size_t size) { munmap(base, size + page()); }
#endif

template <class T>
class Exact {
 public:
  Exact(int64_t count, Place place) : count_(size_t(count)), place_(place) {
    if (place == Place::fenced) {
      size_ = (bytes() + page() - 1) / page() * page();
      base_ = fenced(size_);
      data_ = reinterpret_cast<T*>(static_cast<char*>(base_) + size_ - bytes());
    } else {
      const size_t skew = place == Place::skewed ? sizeof(T) : 0;
      base_ = std::malloc(bytes() + skew);
      EXPECT(base_ || !(bytes() + skew), "no memory");
      data_ = reinterpret_cast<T*>(static_cast<char*>(base_) + skew);
    }
    if (bytes()) std::memset(data_, 0xff, bytes());   // NaN in every float type
  }
  ~Exact() {
    if (place_ == Place::fenced) release(base_, size_);
    else std::free(base_);
  }
  Exact(const Exact&) = delete;
  Exact& operator=(const Exact&) = delete;

  T* data() { return data_; }
  const T* data() const { return data_; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }
  size_t bytes() const { return count_ * sizeof(T); }

 private:
  size_t count_, size_ = 0;
  Place place_;
  void* base_;
  T* data_;
};
