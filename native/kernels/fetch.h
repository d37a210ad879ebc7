// Prefetching of codes. Intel's hardware prefetcher follows sequential reads within a page but not beyond it. More lines
// are in flight when several pages are read side by side, so codes are divided into windows of four pages, and while the
// pieces (four lines each) of one window are used in order, those of the next are prefetched from each page in turn.
//   used       pieces 0  1  2  3  4  5 ... 63 of a window
//   fetched    pieces 0 16 32 48  1 17 ... 63 of the next
// AMD's prefetcher crosses pages, and reaches less of the memory bandwidth if lines are requested in another order.
#pragma once
#include <cstdint>
#include <type_traits>
#include "cpu.h"

namespace bitport {

constexpr int64_t kLine = 64, kPiece = 4 * kLine;
constexpr int kToL1 = 3, kToL2 = 2;   // locality argument of __builtin_prefetch

enum class Fetch {
  at_once,   // by windows to L2, and shortly before use to L1: for loops that wait for codes
  in_order,  // sequentially to L1: the same for processors whose prefetcher crosses pages
  windows,   // by windows to L2 only: beside products whose operands should stay in L1
  stream,    // sequentially to L2 only: for compute-bound products
};

// The line of the next window to prefetch while the one at `codes` is used.
static inline const char* of_next_window(const uint8_t* codes) {
  constexpr uintptr_t kPages = 4, kPage = 4096, kWindow = kPages * kPage;
  const uintptr_t at = reinterpret_cast<uintptr_t>(codes), into = at % kWindow, piece = into / kPiece;
  return reinterpret_cast<const char*>(at - into + kWindow + piece % kPages * kPage + piece / kPages * kPiece + into % kPiece);
}

// Prefetches while these bytes of codes are used. Addresses in the same piece are computed together for compute-bound
// loops; loops that wait for codes receive more of them in time if each line is requested separately. Always inlined:
// g++ considers a function that only prefetches to have no effect, and drops calls to it.
template <Fetch How>
__attribute__((always_inline)) static inline void fetch(const uint8_t* codes, int64_t bytes) {
  constexpr int64_t kSoon = 1024, kLater = 2560;   // not a whole page ahead: those lines map to the same cache sets
  if (How == Fetch::at_once || How == Fetch::in_order) {
    const uint8_t* const lines = codes + (How == Fetch::at_once ? kSoon : kLater);
    for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(lines + i, 0, kToL1);
  }
  if (How == Fetch::in_order) return;
  const int64_t together = How == Fetch::windows && bytes % kPiece == 0 ? kPiece : bytes == 2 * kLine ? bytes : kLine;
  for (int64_t i = 0; i < bytes; i += together) {
    const char* const lines =
        How == Fetch::stream ? reinterpret_cast<const char*>(codes) + kLater + i : of_next_window(codes + i);
    for (int64_t j = 0; j < together; j += kLine) __builtin_prefetch(lines + j, 0, kToL2);
  }
}

// Calls a memory-bound loop with the prefetch strategy for this processor, as a template argument: a branch inside the
// loop costs a tenth of its time.
template <class Loop>
static inline void with_fetch(const Loop& loop) {
  if (cpu().amd) loop(std::integral_constant<Fetch, Fetch::in_order>());
  else loop(std::integral_constant<Fetch, Fetch::at_once>());
}

}  // namespace bitport
