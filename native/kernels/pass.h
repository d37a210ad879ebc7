// The loop order of a product of many rows by an engine that keeps the sums of about a dozen of them in registers. A set of
// tiles is unpacked, a long stretch of K of each, into panels that stay in L2. The rows of x pass by them, as many at a
// time as have their sums in registers: these are read from L2 or beyond once for the tiles of the set, and a panel in the
// order of its addresses, which the prefetcher follows. Compared with rows that stay in L2 while tiles pass by (sweep.h), a
// tile is unpacked once for many more rows, and sums are in memory once per stretch, which is ten times as long.
#pragma once
#include <atomic>
#include "buffer.h"
#include "engine.h"
#include "share.h"
#include "tiles.h"

namespace bitport {

constexpr size_t kPanels = size_t(384) << 10;   // bytes of the panels of a set
constexpr int64_t kLeast = 128;                 // rows that pass by a set

struct Pass {
  int64_t m, tiles, columns, stretch, block;   // block: rows of x in registers
  size_t row_bytes, column_bytes;              // bytes of a laid-out row of x, of a column of a panel
  int32_t threads;

  // The stretch, shortened so that all stretches of K have about the same length.
  int64_t span() const { return ceil_div(ceil_div(columns, ceil_div(columns, stretch)), kScaled) * kScaled; }
  size_t panel_bytes() const { return aligned(size_t(span()) * column_bytes); }
  // Whether all tiles are one set, since they are few. They take so little time that laying out x counts: each thread does
  // it for rows of its own, which stay in L2 until they pass by.
  bool apart() const { return size_t(tiles) * panel_bytes() <= 2 * kPanels; }
  // How many it lays out at a time: as fit into L2 beside the tiles, which it then unpacks again.
  int64_t together() const {
    const int64_t fit = int64_t(kPanels / row_bytes);
    return fit < kLeast ? kLeast : fit;
  }
  // Otherwise the rows that are laid out at once, by all threads: as many as a shared cache holds.
  int64_t laid_out() const {
    if (apart()) return 0;
    constexpr size_t kBytes = size_t(16) << 20;
    const int64_t fit = int64_t(kBytes / row_bytes), most = fit < block ? block : fit;
    return ceil_div(ceil_div(m, ceil_div(m, most)), block) * block;
  }
};

// Work provides what sweep() calls, and
//   placed(row, memory)             x, with rows from `row` on to be laid out in memory
//   lay_out_all(x, row, rows)       lays them out, with several threads if there is enough to do
// Returns false if out of memory.
template <class Work>
bool pass(const Pass& p, char* laid_out, const Work& work) {
  constexpr int64_t kPieces = 4;   // of work per thread, if tiles are few
  const bool apart = p.apart(), waits = p.span() < p.columns;
  const int64_t span = p.span(), most = apart ? p.m : p.laid_out();
  const size_t panel_bytes = p.panel_bytes();
  const int64_t fit = int64_t(kPanels / panel_bytes), least = ceil_div(p.tiles, fit ? fit : 1);
  const int64_t of_each = ceil_div(least, p.threads), sets = apart ? 1 : of_each * p.threads;
  std::atomic<bool> failed{false};

  for (int64_t begin = 0; begin < p.m; begin += most) {
    const int64_t rows = smaller(most, p.m - begin);
    const auto shared = work.placed(begin, laid_out);
    if (!apart) work.lay_out_all(shared, begin, rows);
    int64_t cuts = 1;
    if (apart) cuts = ceil_div(ceil_div(rows, p.together()), p.threads) * p.threads;
    else if (p.threads > 1) cuts = smaller(ceil_div(rows, kLeast), ceil_div(kPieces * p.threads, smaller(sets, p.tiles)));
    // In `shared` a part begins with a block.
    const int64_t even = ceil_div(rows, cuts), whole = ceil_div(even, p.block) * p.block, part = apart ? even : whole;

    share(sets * ceil_div(rows, part), p.threads, [&](int64_t i) {
      // Sets that are worked off at a time lie far from each other, or two threads would ask for the same new page of y.
      const int64_t at = i % sets, set = at % p.threads * of_each + at / p.threads;
      const int64_t first = p.tiles * set / sets, tiles = p.tiles * (set + 1) / sets - first;
      if (tiles == 0) return;
      const int64_t top = begin + i / sets * part, bottom = smaller(top + part, begin + rows);
      const size_t sums = size_t(waits ? part : p.block) * 32;   // per tile
      const size_t used = (panel_bytes + sums * 4) * size_t(tiles);
      char* memory = own_buffer.need(used + (apart ? size_t(whole) * p.row_bytes : 0));
      if (!memory) { failed = true; return; }
      float* const sum = reinterpret_cast<float*>(memory + panel_bytes * size_t(tiles));
      const auto x = apart ? work.laid_out(top, bottom - top, memory + used) : shared;
      work.start();
      for (int64_t k = 0; k < p.columns; k += span) {
        const auto panel = [&](int64_t tile) {
          return Panel{first + tile, k, smaller(span, p.columns - k), memory + size_t(tile) * panel_bytes};
        };
        for (int64_t tile = 0; tile < tiles; ++tile) work.unpack(panel(tile));
        for (int64_t row = top; row < bottom; row += p.block) {
          const int64_t few = smaller(p.block, bottom - row);
          const auto sum_of = [&](int64_t tile) { return sum + tile * int64_t(sums) + (waits ? (row - top) * 32 : 0); };
          for (int64_t tile = 0; tile < tiles; ++tile) work.multiply(x, panel(tile), row, few, sum_of(tile), nullptr);
          if (k + span < p.columns) continue;
          for (int64_t tile = 0; tile < tiles; ++tile) work.done(first + tile, row, few, sum_of(tile));
        }
      }
      work.stop();
    });
  }
  return !failed;
}

}  // namespace bitport
