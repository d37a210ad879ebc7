// A row of a weight: its codes, a byte each, and what they mean as numbers.
#pragma once
#include "tiles.h"

namespace bitport {

static inline int64_t width_of(int32_t type) {
  return type == BITPORT_F32 ? 4 : type == BITPORT_BF16 || type == BITPORT_F16 ? 2 : 1;
}

// Of one group of a row: (table[code] - shift) * scale.
struct Piece {
  const uint8_t* codes;
  int64_t count;
  const float* table;
  int32_t bits;
  bool integer;   // table[code] is code + table[0]
  float scale, shift;
};

// As numbers of `type`; y has `at` of them before.
using WritePiece = void (*)(const Piece& piece, void* y, int32_t type, int64_t at);

// A whole row, to y.
using WriteRow = void (*)(const BitportTiles& w, int64_t row, char* y);

// The codes of columns [first, first + count) of a row, both multiples of 32; behind the last may stand what fills up a
// step. `row` within the weight: of one whose codes lie in tiles, or dense along k.
using ReadCodes = void (*)(const BitportTiles& w, int64_t row, int64_t first, int64_t count, uint8_t* codes);

ReadCodes codes_of_tiles(int32_t bits), codes_of_dense(int32_t bits);

#if defined(__x86_64__) && defined(__linux__)
void avx2_write_piece(const Piece& piece, void* y, int32_t type, int64_t at);
// Codes two in a byte, the first lowest; count is a multiple of 32, numbers of two bytes.
void avx2_write_nibbles(const Piece& piece, void* y, int32_t type, int64_t at);
// For rows of codes of 4 bits, or integers of 8, that lie row by row: as numbers of `type`. k is a multiple of 32, and the
// group too unless there is one.
WriteRow avx512_write_row(int32_t isa, int32_t bits, int32_t type);
#endif

// bitport_rows, or with `dense` bitport_dense_rows, on an instruction set that this machine has.
int32_t rows_on(int32_t isa, const BitportTiles* w, bool dense, const int64_t* ids, int64_t count, void* y,
                int32_t type, int32_t threads);

}  // namespace bitport
