// Rows of a weight: their codes as they lie dense, and what those mean as numbers.
#pragma once
#include "tiles.h"

namespace bitport {

static inline int64_t width_of(int32_t type) {
  return type == BITPORT_F32 ? 4 : type == BITPORT_BF16 || type == BITPORT_F16 ? 2 : 1;
}

// Codes of up to 4 bits go two in a byte, the first lowest: nibbles. Wider ones have a byte each.
static inline bool are_nibbles(int32_t bits) { return bits <= 4; }

// Columns of a row side by side. Their numbers: (table[code] - shift) * scale, scale and shift those of the group.
struct Stretch {
  const uint8_t* codes;         // nibbles or bytes
  int64_t count, first, group;  // columns: of all, of the first group (not more than all), of the others
  const float* scale;           // by groups
  const float* shift;
  const float* table;
  int32_t bits;
  bool integer;                 // table[code] is code + table[0]
  int32_t type;                 // of the numbers
};

using WriteStretch = void (*)(const Stretch& stretch, char* y);

// The codes of columns [first, first + count) of a row whose codes lie in tiles, or dense along k; first is a multiple of
// 32, and `to` has room for count rounded up to one. The row `next` is read after this one, unless it is negative.
using ReadCodes = void (*)(const BitportTiles& w, int64_t row, int64_t first, int64_t count, int64_t next, uint8_t* to);

ReadCodes codes_of_tiles(int32_t bits);
ReadCodes codes_of_dense(int32_t bits);   // null for 4 and 8 bits: as they lie

#if defined(__x86_64__) && defined(__linux__)
WriteStretch avx2_write(int32_t bits);
// For nibbles, or bytes of integers. Columns and groups are multiples of 32, unless there is one group.
WriteStretch avx512_write(int32_t isa, int32_t bits, int32_t type);
#elif defined(__aarch64__)
WriteStretch neon_write(int32_t bits);
#endif

// bitport_rows, or with `dense` bitport_dense_rows, on an instruction set that this machine has.
int32_t rows_on(int32_t isa, const BitportTiles* w, bool dense, const int64_t* ids, int64_t count, void* y,
                int32_t type, int32_t threads);

// Rows [first, first + count) of a weight that was checked, as float32, `apart` numbers from one to the next.
void write_rows(int32_t isa, const BitportTiles& w, bool dense, int64_t first, int64_t count, int64_t apart, float* y);

}  // namespace bitport
