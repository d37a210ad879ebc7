// Positions of single codes in a tile (layout in bitport_kernels.h), and the number of tiles and groups.
#pragma once
#include <numeric>
#include "bitport_kernels.h"

namespace bitport {

constexpr int64_t kMost = int64_t(1) << 31;   // limit on rows and columns: the product of two sizes fits into int64

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t tiles_of(const BitportTiles& w) { return ceil_div(w.n, 32); }
static inline int64_t steps_of(const BitportTiles& w) { return ceil_div(w.k, 32); }
// group may be as large as INT64_MAX, so nothing must be added to it.
static inline int64_t groups_of(const BitportTiles& w) { return w.group < w.k ? ceil_div(w.k, w.group) : 1; }

// The group of a column; padding columns in the last step belong to the last group.
static inline int64_t group_of(const BitportTiles& w, int64_t column) {
  const int64_t group = column / w.group, last = groups_of(w) - 1;
  return group < last ? group : last;
}

// Iterates over the pieces of a row, its groups cut where a stretch of K ends, from a column on and without divisions.
struct Pieces {
  const int64_t length, stretch, k;
  int64_t index, group, begin, end;   // index: within the row

  // column: the start of a piece
  Pieces(const BitportTiles& w, int64_t stretch, int64_t column)
      : length(w.group < w.k ? w.group : w.k), stretch(stretch), k(w.k), index(count(length, stretch, column)),
        group(length ? column / length : 0), begin(column), next_group((group + 1) * length),
        next_stretch((column / stretch + 1) * stretch) {
    cut();
  }
  void next() {
    if (end == next_group) { ++group; next_group += length; }
    if (end == next_stretch) next_stretch += stretch;
    begin = end;
    ++index;
    cut();
  }

  // The number of pieces that begin before a column: at multiples of either length.
  static int64_t count(int64_t length, int64_t stretch, int64_t column) {
    if (!column || length % stretch == 0) return ceil_div(column, stretch);
    if (stretch % length == 0) return ceil_div(column, length);
    return ceil_div(column, length) + ceil_div(column, stretch) - ceil_div(column, std::lcm(length, stretch));
  }

 private:
  int64_t next_group, next_stretch;
  void cut() {
    const int64_t first = next_group < next_stretch ? next_group : next_stretch;
    end = first < k ? first : k;
  }
};

static inline int64_t pieces_of(const BitportTiles& w, int64_t stretch) {
  return Pieces::count(w.group < w.k ? w.group : w.k, stretch, w.k);
}

// Whether the 32 columns of a step can span two groups; if so, the first 16 and the last 16 may differ.
static inline bool splits_steps(const BitportTiles& w) { return w.group % 32 && w.group < w.k; }

static inline const uint8_t* tile_at(const BitportTiles& w, int64_t tile, int64_t step) {
  return w.codes + (tile * steps_of(w) + step) * 128 * w.bits;
}

// The zero point of an integer weight without one: table[0] = -middle.
static inline float middle(const BitportTiles& w) { return -w.table[0]; }

int32_t check_weight(const BitportTiles* w);   // a Status

// Position of a code in its line of 64.
static inline int64_t place(int64_t row, int64_t column) { return column % 4 / 2 * 32 + row % 16 * 2 + (column & 1); }

// The bits of a code that belong to wider digits: they are below this digit in the code, and their planes come first.
static constexpr int32_t below(int32_t bits, int32_t digit) { return bits & ~(2 * digit - 1); }

// Byte offset of a line in the plane of a digit.
static constexpr int64_t plane_of(int32_t bits, int32_t digit, int64_t line) {
  return 128 * below(bits, digit) + line * 8 * digit;
}

// The code whose digit is in slot `slot` (lowest bits first) of a byte of the line.
static constexpr int64_t code_in(int32_t digit, int64_t byte, int64_t slot) {
  return digit == 1 ? byte * 8 + slot : byte + slot * 8 * digit;
}

// row and column are relative to the tile.
static inline uint32_t read_code(const uint8_t* tile, int32_t bits, int64_t row, int64_t column) {
  const int64_t line = row / 16 * 8 + column / 4, q = place(row, column);
  uint32_t code = 0;
  for (int32_t digit = 8; digit; digit /= 2) {
    if (!(bits & digit)) continue;
    const int64_t byte = digit == 1 ? q / 8 : q % (8 * digit);
    const int64_t slot = (q - code_in(digit, byte, 0)) / code_in(digit, 0, 1);
    code |= (tile[plane_of(bits, digit, line) + byte] >> slot * digit & ((1u << digit) - 1)) << below(bits, digit);
  }
  return code;
}

}  // namespace bitport
