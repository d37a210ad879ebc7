// Dense codes to tiles and back (the layout is drawn in bitport_kernels.h).
#include "share.h"
#include "status.h"
#include "tiles.h"

namespace bitport {
namespace {

struct Line { uint8_t code[64]; };   // by place

void write_line(const Line& codes, int32_t bits, int64_t line, uint8_t* tile) {
  for (int32_t digit = 8, below = 0; digit; digit /= 2) {
    if (!(bits & digit)) continue;
    const int64_t bytes = 8 * digit;
    const uint8_t mask = uint8_t((1u << digit) - 1);
    uint8_t* to = tile + line * bytes;
    for (int64_t j = 0; j < bytes; ++j) to[j] = 0;
    for (int64_t q = 0; q < 64; ++q) {
      const uint32_t value = codes.code[q] >> below & mask;
      if (digit == 1) to[q / 8] |= uint8_t(value << q % 8);
      else to[q % bytes] |= uint8_t(value << q / bytes * digit);
    }
    below += digit;
    tile += 16 * bytes;
  }
}

Line read_line(const uint8_t* tile, int32_t bits, int64_t line) {
  Line codes = {};
  for (int32_t digit = 8, below = 0; digit; digit /= 2) {
    if (!(bits & digit)) continue;
    const int64_t bytes = 8 * digit;
    const uint32_t mask = (1u << digit) - 1;
    const uint8_t* at = tile + line * bytes;
    for (int64_t q = 0; q < 64; ++q) {
      const uint32_t value = digit == 1 ? at[q / 8] >> q % 8 : at[q % bytes] >> q / bytes * digit;
      codes.code[q] |= uint8_t((value & mask) << below);
    }
    below += digit;
    tile += 16 * bytes;
  }
  return codes;
}

// 32 columns of a row: 4 * bits bytes, of which `left` are there.
void split(const uint8_t* dense, int64_t left, int32_t bits, uint8_t* codes) {
  uint32_t pool = 0, have = 0;
  int64_t next = 0;
  for (int64_t i = 0; i < 32; ++i) {
    if (have < uint32_t(bits)) { pool |= uint32_t(next < left ? dense[next] : 0) << have; have += 8; ++next; }
    codes[i] = uint8_t(pool & ((1u << bits) - 1));
    pool >>= bits;
    have -= bits;
  }
}

void join(const uint8_t* codes, int64_t left, int32_t bits, uint8_t* dense) {
  uint32_t pool = 0, have = 0;
  int64_t next = 0;
  for (int64_t i = 0; i < 32; ++i) {
    pool |= uint32_t(codes[i]) << have;
    have += bits;
    if (have >= 8) { if (next < left) dense[next] = uint8_t(pool); ++next; pool >>= 8; have -= 8; }
  }
}

int32_t check(const void* a, const void* b, int32_t bits, int64_t n, int64_t k) {
  if (n < 0 || k <= 0 || bits < 1 || bits > 8) return kBadShape;
  return n == 0 || (a && b) ? kOk : kNullPointer;
}

}  // namespace
}  // namespace bitport

int32_t bitport_pack(const uint8_t* dense, int32_t bits, int64_t n, int64_t k, uint8_t* tiles, int32_t threads) {
  using namespace bitport;
  if (const int32_t code = check(dense, tiles, bits, n, k)) return code;
  const int64_t steps = ceil_div(k, 32), row_bytes = ceil_div(k * bits, 8);
  share(ceil_div(n, 32), threads, [&](int64_t tile) {
    for (int64_t step = 0; step < steps; ++step) {
      uint8_t codes[32][32] = {};
      const int64_t from = step * 4 * bits;
      for (int64_t row = 0; row < 32 && tile * 32 + row < n; ++row)
        split(dense + (tile * 32 + row) * row_bytes + from, row_bytes - from, bits, codes[row]);
      if (k - step * 32 < 32)   // the last byte of a row may hold anything beyond its codes
        for (int64_t row = 0; row < 32; ++row)
          for (int64_t column = k - step * 32; column < 32; ++column) codes[row][column] = 0;
      for (int64_t line = 0; line < 16; ++line) {
        Line ordered;
        for (int64_t row = line / 8 * 16; row < line / 8 * 16 + 16; ++row)
          for (int64_t column = line % 8 * 4; column < line % 8 * 4 + 4; ++column)
            ordered.code[place(row, column)] = codes[row][column];
        write_line(ordered, bits, line, tiles + (tile * steps + step) * 128 * bits);
      }
    }
  });
  return kOk;
}

int32_t bitport_unpack(const uint8_t* tiles, int32_t bits, int64_t n, int64_t k, uint8_t* dense, int32_t threads) {
  using namespace bitport;
  if (const int32_t code = check(tiles, dense, bits, n, k)) return code;
  const int64_t steps = ceil_div(k, 32), row_bytes = ceil_div(k * bits, 8);
  share(ceil_div(n, 32), threads, [&](int64_t tile) {
    for (int64_t step = 0; step < steps; ++step) {
      uint8_t codes[32][32];
      for (int64_t line = 0; line < 16; ++line) {
        const Line ordered = read_line(tiles + (tile * steps + step) * 128 * bits, bits, line);
        for (int64_t row = line / 8 * 16; row < line / 8 * 16 + 16; ++row)
          for (int64_t column = line % 8 * 4; column < line % 8 * 4 + 4; ++column)
            codes[row][column] = ordered.code[place(row, column)];
      }
      const int64_t to = step * 4 * bits;
      for (int64_t row = 0; row < 32 && tile * 32 + row < n; ++row) {
        uint8_t* line = dense + (tile * 32 + row) * row_bytes + to;
        const int64_t left = k - step * 32;
        if (left < 32) for (int64_t column = left; column < 32; ++column) codes[row][column] = 0;
        join(codes[row], row_bytes - to, bits, line);
      }
    }
  });
  return kOk;
}
