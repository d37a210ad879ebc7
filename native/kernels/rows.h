// Rows of a weight: their dense codes, and the conversion of these to numbers.
#pragma once
#include "machine.h"
#include "tiles.h"

namespace bitport {

// Codes of up to 4 bits are stored as nibbles, two per byte, the first one low; wider codes take a byte each.
static inline bool are_nibbles(int32_t bits) { return bits <= 4; }

// Adjacent columns of a row. Their values are (table[code] - shift) * scale, with scale and shift per group.
struct Stretch {
  const uint8_t* codes;         // nibbles or bytes
  int64_t count, first, group;  // columns: in total, in the first group (at most all), in other groups
  const float* scale;           // per group
  const float* shift;
  const float* table;
  int32_t bits;
  bool integer;                 // table[code] is code + table[0]
  int32_t type;                 // of the output
};

using WriteStretch = void (*)(const Stretch& stretch, char* y);

// Reads the codes of columns [first, first + count) of a row stored in tiles, or dense along k. first is a multiple of
// 32, and `to` has room for count rounded up to a multiple of 32. next: the row that is read after this one, or
// negative.
using ReadCodes = void (*)(const BitportTiles& w, int64_t row, int64_t first, int64_t count, int64_t next, uint8_t* to);

ReadCodes codes_of_tiles(int32_t bits);
ReadCodes codes_of_dense(int32_t bits);   // null for 4 and 8 bits: codes are used in place

#if BITPORT_X86
WriteStretch avx2_write(int32_t bits);
// For nibbles, or bytes of integers. Columns and groups must be multiples of 32, unless there is one group.
WriteStretch avx512_write(int32_t isa, int32_t bits, int32_t type);
#elif defined(__aarch64__)
WriteStretch neon_write(int32_t bits);
#endif

// bitport_rows, or with `dense` bitport_dense_rows, on a supported instruction set.
int32_t rows_on(int32_t isa, const BitportTiles* w, bool dense, const int64_t* ids, int64_t count, void* y,
                int32_t type, int32_t threads);

// Rows [first, first + count) of a validated weight as float32, with a row stride of `apart` elements.
void write_rows(int32_t isa, const BitportTiles& w, bool dense, int64_t first, int64_t count, int64_t apart, float* y);

}  // namespace bitport
