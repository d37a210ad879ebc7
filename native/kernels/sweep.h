// The loop order of a product of many rows. A part of the rows of x, with a span of K resident in L2, is multiplied by
// one tile of the weight after another. A tile is unpacked in stretches of K into panels that stay in L1 while all rows
// of the part are multiplied by them; there are two panels if the engine can unpack one while it multiplies by the
// other. The sums of a few tiles are kept in L2, for the next span of K if there are several, and so that they can be
// written side by side.
#pragma once
#include <atomic>
#include "buffer.h"
#include "engine.h"
#include "share.h"
#include "tiles.h"

namespace bitport {

constexpr int64_t kDoneRows = 8;   // rows of y that are written together

struct Sweep {
  int64_t m, tiles, columns, stretch;
  size_t row_bytes, column_bytes, panel_bytes;   // bytes of a laid-out row of x, of one of its columns, of a panel
  int32_t threads;
  bool ahead;   // whether the next panel is unpacked during a product
  AtOnce at_once;

  int64_t parts() const { return ceil_div(m, part()); }
  int64_t part() const { return ceil_div(ceil_div(m, ceil_div(m, at_once.rows)), 32) * 32; }   // rows
  // Parts that are processed by one thread each, which lays out their rows in its own memory. The last parts are split
  // into pieces shared by several threads, to balance the load.
  int64_t whole() const { return threads == 1 ? parts() : parts() > threads ? parts() - threads : 0; }
  int64_t rows_apart() const { return whole() * part() < m ? whole() * part() : m; }   // rows of these parts
};

// Work provides
//   start(), stop()                              once per thread and work item
//   laid_out(row, rows, memory)                  the rows, laid out in memory, or, if memory is null, laid out before
//   unpack(panel)
//   multiply(x, panel, row, rows, sum, next)     adds to sum [rows][32], which the first panel of a tile overwrites, and
//                                                unpacks next unless null; x: the result of laid_out()
//   done(tile, row, rows, sum)
// Returns false if out of memory.
template <class Work>
bool sweep(const Sweep& s, const Work& work) {
  const int64_t parts = s.parts(), part = s.part(), whole = s.whole();
  const int64_t stays = int64_t(s.at_once.x_bytes / (size_t(part) * s.column_bytes)) / s.stretch * s.stretch;
  const int64_t spans = ceil_div(s.columns, stays ? stays : s.stretch);
  const int64_t span = ceil_div(ceil_div(s.columns, spans), s.stretch) * s.stretch;
  const int64_t pieces = whole < parts ? smaller(ceil_div(s.threads * s.at_once.pieces, parts - whole), s.tiles) : 1;
  const bool waits = span < s.columns || !s.ahead;
  const size_t sums = size_t(part) * 32;   // per tile; engines may write whole blocks of 32 rows
  std::atomic<bool> failed{false};

  share(whole + (parts - whole) * pieces, s.threads, [&](int64_t i) {
    const bool apart = i < whole;
    const int64_t row = (apart ? i : whole + (i - whole) / pieces) * part, rows = smaller(s.m - row, part);
    const int64_t nth = apart ? 0 : (i - whole) % pieces, cut = apart ? 1 : pieces;
    const int64_t tiles = s.tiles * nth / cut, tiles_end = s.tiles * (nth + 1) / cut, piece = tiles_end - tiles;
    const int64_t together = waits ? ceil_div(piece, ceil_div(piece, s.at_once.tiles)) : piece;
    const size_t sum_bytes = sums * size_t(waits ? together : 1) * 4, row_bytes = apart ? size_t(part) * s.row_bytes : 0;
    char* memory = own_buffer.need(2 * s.panel_bytes + sum_bytes + row_bytes);
    if (!memory) { failed = true; return; }
    float* sum = reinterpret_cast<float*>(memory + 2 * s.panel_bytes);
    const auto x = work.laid_out(row, rows, apart ? memory + 2 * s.panel_bytes + sum_bytes : nullptr);
    work.start();
    for (int64_t first = tiles; first < tiles_end; first += together)
      for (int64_t begin = 0; begin < s.columns; begin += span) {
        const int64_t end = smaller(begin + span, s.columns), stretches = ceil_div(end - begin, s.stretch);
        const int64_t panels = smaller(together, tiles_end - first) * stretches;
        const auto panel_at = [&](int64_t p) {
          const int64_t k = begin + p % stretches * s.stretch;
          return Panel{first + p / stretches, k, smaller(s.stretch, end - k), memory + (s.ahead && p & 1 ? s.panel_bytes : 0)};
        };
        for (int64_t p = 0; p < panels; ++p) {
          const Panel panel = panel_at(p), next = panel_at(p + 1);
          if (!s.ahead || p == 0) work.unpack(panel);
          float* to = waits ? sum + (panel.tile - first) * int64_t(sums) : sum;
          work.multiply(x, panel, row, rows, to, s.ahead && p + 1 < panels ? &next : nullptr);
          if (s.ahead && panel.k + panel.count == s.columns) work.done(panel.tile, row, rows, to);
        }
        if (s.ahead || end < s.columns) continue;
        for (int64_t r = 0; r < rows; r += kDoneRows)
          for (int64_t tile = first; tile < tiles_end && tile < first + together; ++tile)
            work.done(tile, row + r, smaller(rows - r, kDoneRows), sum + (tile - first) * int64_t(sums) + r * 32);
      }
    work.stop();
  });
  return !failed;
}

}  // namespace bitport
