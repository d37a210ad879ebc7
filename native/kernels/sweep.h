// The order in which a product of many rows is worked off. A part of the rows of x, of which a span of K stays in L2,
// meets one tile of the weight after another. A tile is unpacked by stretches of K, into panels that stay in L1 while the
// rows of the part go over them; there are two, so that an engine can unpack one while it multiplies by the other. Where
// K has several spans, the sums of a few tiles wait in L2 for the next one.
#pragma once
#include <atomic>
#include "buffer.h"
#include "engine.h"
#include "share.h"
#include "tiles.h"

namespace bitport {

constexpr int64_t kRowsAtOnce = 128;             // of a part: their sums of a tile take 16 KiB
constexpr size_t kSpanBytes = size_t(1) << 20;   // of x in L2
constexpr int64_t kTilesAtOnce = 16;             // whose sums wait there: 256 KiB

struct Sweep {
  int64_t m, tiles, columns, stretch;
  size_t column_bytes, panel_bytes;   // of one row of x, of a whole panel
  int32_t threads;
};

// Work brings
//   start(), stop()                           once per thread and piece of work
//   unpack(panel)
//   multiply(panel, row, rows, sum, next)     adds to sum [rows][32], which the first panel of a tile overwrites, and
//                                             unpacks next, unless it is null
//   done(tile, row, rows, sum, scratch)       scratch: the memory of a panel that nobody needs any more
// False where there is no memory.
template <class Work>
bool sweep(const Sweep& s, const Work& work) {
  const auto smaller = [](int64_t a, int64_t b) { return a < b ? a : b; };
  const int64_t parts = ceil_div(s.m, kRowsAtOnce), part = ceil_div(ceil_div(s.m, parts), 32) * 32;
  const int64_t stays = int64_t(kSpanBytes / (size_t(part) * s.column_bytes)) / s.stretch * s.stretch;
  const int64_t spans = ceil_div(s.columns, stays ? stays : s.stretch);
  const int64_t span = ceil_div(ceil_div(s.columns, spans), s.stretch) * s.stretch;
  const int64_t pieces = ceil_div(int64_t(s.threads) * 4, parts), piece = ceil_div(s.tiles, pieces);
  const int64_t together = span < s.columns ? smaller(piece, kTilesAtOnce) : piece, waiting = span < s.columns ? together : 1;
  const size_t sums = size_t(part) * 32;   // of a tile; engines may write whole blocks of 32 rows
  std::atomic<bool> failed{false};

  share(parts * pieces, s.threads, [&](int64_t i) {
    const int64_t row = i / pieces * part, rows = smaller(s.m - row, part);
    const int64_t tiles = i % pieces * piece, tiles_end = smaller(tiles + piece, s.tiles);
    if (rows <= 0 || tiles >= tiles_end) return;
    char* memory = own_buffer.need(2 * s.panel_bytes + sums * size_t(waiting) * 4);
    if (!memory) { failed = true; return; }
    float* sum = reinterpret_cast<float*>(memory + 2 * s.panel_bytes);
    work.start();
    for (int64_t first = tiles; first < tiles_end; first += together)
      for (int64_t begin = 0; begin < s.columns; begin += span) {
        const int64_t end = smaller(begin + span, s.columns), stretches = ceil_div(end - begin, s.stretch);
        const int64_t panels = smaller(together, tiles_end - first) * stretches;
        const auto panel_at = [&](int64_t p) {
          const int64_t k = begin + p % stretches * s.stretch;
          return Panel{first + p / stretches, k, smaller(s.stretch, end - k), memory + (p & 1 ? s.panel_bytes : 0)};
        };
        work.unpack(panel_at(0));
        for (int64_t p = 0; p < panels; ++p) {
          const Panel panel = panel_at(p), next = panel_at(p + 1);
          float* to = sum + (panel.tile - first) % waiting * int64_t(sums);
          work.multiply(panel, row, rows, to, p + 1 < panels ? &next : nullptr);
          if (panel.k + panel.count == s.columns) work.done(panel.tile, row, rows, to, panel.data);
        }
      }
    work.stop();
  });
  return !failed;
}

}  // namespace bitport
