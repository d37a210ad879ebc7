// Dense codes to tiles and back (the layout is drawn in bitport_kernels.h).
#include "bitport_kernels.h"
#include "share.h"
#include "status.h"

namespace {

// Byte of a tile <-> nibble of the dense codes: row 16h + j/2, columns 4p + (j & 1) and two further on.
struct Place { int64_t row, column; };
Place place(int64_t byte) { return {byte / 256 * 16 + byte % 32 / 2, byte % 256 / 32 * 4 + (byte & 1)}; }

int32_t check(const void* a, const void* b, int64_t n, int64_t k) {
  if (!a || !b) return bitport::kNullPointer;
  return n < 0 || k <= 0 || k % 32 ? bitport::kBadShape : bitport::kOk;
}

}  // namespace

int32_t bitport_tiles4_pack(const uint8_t* dense, int64_t n, int64_t k, uint8_t* tiles, int32_t threads) {
  if (const int32_t code = check(dense, tiles, n, k)) return code;
  bitport::share((n + 31) / 32, threads, [&](int64_t tile) {
    for (int64_t step = 0; step < k / 32; ++step) {
      uint8_t* to = tiles + (tile * (k / 32) + step) * 512;
      for (int64_t byte = 0; byte < 512; ++byte) {
        const Place at = place(byte);
        const int64_t row = tile * 32 + at.row, column = step * 32 + at.column, odd = at.column & 1 ? 4 : 0;
        const uint8_t* from = dense + row * (k / 2) + column / 2;
        to[byte] = row < n ? uint8_t((from[0] >> odd & 15) | (from[1] >> odd & 15) << 4) : 0;
      }
    }
  });
  return bitport::kOk;
}

int32_t bitport_tiles4_unpack(const uint8_t* tiles, int64_t n, int64_t k, uint8_t* dense, int32_t threads) {
  if (const int32_t code = check(tiles, dense, n, k)) return code;
  bitport::share((n + 31) / 32, threads, [&](int64_t tile) {
    for (int64_t step = 0; step < k / 32; ++step) {
      const uint8_t* from = tiles + (tile * (k / 32) + step) * 512;
      for (int64_t byte = 0; byte < 512; byte += 2) {   // this byte and the next: even and odd columns of one row
        const Place at = place(byte);
        const int64_t row = tile * 32 + at.row;
        if (row >= n) continue;
        uint8_t* to = dense + row * (k / 2) + (step * 32 + at.column) / 2;
        to[0] = uint8_t((from[byte] & 15) | (from[byte + 1] & 15) << 4);
        to[1] = uint8_t(from[byte] >> 4 | (from[byte + 1] & 0xf0));
      }
    }
  });
  return bitport::kOk;
}
