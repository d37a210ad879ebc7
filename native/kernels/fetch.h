// Codes are brought from memory before a loop uses them. Of a page that is read in order Intel's processors fetch some lines
// ahead by themselves, but none of the page behind it. So more of them are on their way while several pages are read side
// by side: codes lie in windows of four pages, and while the pieces of four lines of one are used in their order, those of
// the next are fetched from each page in turn.
//   used       pieces 0  1  2  3  4  5 ... 63 of a window
//   fetched    pieces 0 16 32 48  1 17 ... 63 of the next
// AMD's go on from page to page, and reach less of what memory gives if lines are asked for in another order.
#pragma once
#include <cstdint>
#include <type_traits>

namespace bitport {

constexpr int64_t kLine = 64, kPiece = 4 * kLine;
constexpr int kToL1 = 3, kToL2 = 2;   // as the compiler calls them

enum class Fetch {
  at_once,   // by windows to L2, and shortly before they are used to L1: for loops that wait for codes
  in_order,  // to L1, one line after another: for the same, where the processor goes on to the next page
  windows,   // to L2 alone: beside products, whose operands are to stay in L1
  stream,    // to L2 alone, one line after another: where products take longer than memory does
};

// The line of the next window that is fetched while the one at `codes` is used.
static inline const char* of_next_window(const uint8_t* codes) {
  constexpr uintptr_t kPages = 4, kPage = 4096, kWindow = kPages * kPage;
  const uintptr_t at = reinterpret_cast<uintptr_t>(codes), into = at % kWindow, piece = into / kPiece;
  return reinterpret_cast<const char*>(at - into + kWindow + piece % kPages * kPage + piece / kPages * kPiece + into % kPiece);
}

// While the codes of these bytes are used. Lines that lie in one piece are found together where time counts; a loop that
// waits for them gets more of them in time where they are asked for one by one. Inlined always: g++ takes a function of
// prefetches alone for one that does nothing, and leaves its calls out.
template <Fetch How>
__attribute__((always_inline)) static inline void fetch(const uint8_t* codes, int64_t bytes) {
  constexpr int64_t kSoon = 1024, kLater = 2560;   // not a whole page ahead, whose lines fall where these lie
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

// Calls a loop that waits for codes with how this processor is to fetch them. It is not asked within the loop: a branch
// there takes a tenth of its time.
template <class Loop>
static inline void with_fetch(const Loop& loop) {
  if (__builtin_cpu_is("amd")) loop(std::integral_constant<Fetch, Fetch::in_order>());
  else loop(std::integral_constant<Fetch, Fetch::at_once>());
}

// Codes that are unpacked later to L2; returns where those behind them begin.
__attribute__((always_inline)) static inline const uint8_t* fetch_next(const uint8_t* codes, int64_t bytes) {
  for (const uint8_t* end = codes + bytes; codes < end; codes += kLine) __builtin_prefetch(codes, 0, kToL2);
  return codes;
}

}  // namespace bitport
