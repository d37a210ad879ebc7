// Where a code lies in a tile (drawn in bitport_kernels.h), one code at a time, and how many tiles and groups there are.
#pragma once
#include "bitport_kernels.h"

namespace bitport {

constexpr int64_t kMost = int64_t(1) << 31;   // rows or columns: products of two sizes fit

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t tiles_of(const BitportTiles& w) { return ceil_div(w.n, 32); }
static inline int64_t steps_of(const BitportTiles& w) { return ceil_div(w.k, 32); }
// A group may be as large as a number can be: nothing is added to it.
static inline int64_t groups_of(const BitportTiles& w) { return w.group < w.k ? ceil_div(w.k, w.group) : 1; }

// The group of a column; columns that only fill up the last step belong to the last group.
static inline int64_t group_of(const BitportTiles& w, int64_t column) {
  const int64_t group = column / w.group, last = groups_of(w) - 1;
  return group < last ? group : last;
}

// Whether the 32 columns of a step may lie in two groups: then its first and last 16 differ.
static inline bool splits_steps(const BitportTiles& w) { return w.group % 32 && w.group < w.k; }

static inline const uint8_t* tile_at(const BitportTiles& w, int64_t tile, int64_t step) {
  return w.codes + (tile * steps_of(w) + step) * 128 * w.bits;
}

// The zero of an integer without one: table[0] = -middle.
static inline float middle(const BitportTiles& w) { return -w.table[0]; }

int32_t check_weight(const BitportTiles* w);   // a Status

// Place of a code in its line of 64.
static inline int64_t place(int64_t row, int64_t column) { return column % 4 / 2 * 32 + row % 16 * 2 + (column & 1); }

// Bits of a code in wider digits than this one: they lie below it in the code, and their planes before its in the tile.
static constexpr int32_t below(int32_t bits, int32_t digit) { return bits & ~(2 * digit - 1); }

// The first byte of a line in the plane of a digit.
static constexpr int64_t plane_of(int32_t bits, int32_t digit, int64_t line) {
  return 128 * below(bits, digit) + line * 8 * digit;
}

// The code whose digit is the slot-th from the lowest bits of a byte of that line.
static constexpr int64_t code_in(int32_t digit, int64_t byte, int64_t slot) {
  return digit == 1 ? byte * 8 + slot : byte + slot * 8 * digit;
}

// row and column within the tile
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
