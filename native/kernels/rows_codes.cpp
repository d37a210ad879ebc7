// The codes of one row, a byte each: of tiles four columns at a time, of dense ones eight.
#include <cstring>
#include "bits.h"
#include "rows.h"

namespace bitport {
namespace {

// Four columns of a row lie in a line as two pairs, 32 codes apart (tiles.h): their digits, in the bytes of a word.
template <int Digit>
uint32_t four(const uint8_t* line, int64_t row) {
  if constexpr (Digit == 1) {
    const uint32_t a = line[row / 4] >> row % 4 * 2, b = line[4 + row / 4] >> row % 4 * 2;
    return (a & 1) | (a & 2) << 7 | (b & 1) << 16 | (b & 2) << 23;
  } else {
    constexpr uint32_t kBoth = 0x101 * ((1u << Digit) - 1);
    constexpr int64_t kRows = 4 * Digit;   // whose pairs lie side by side in the bytes of the line
    uint16_t a, b;
    std::memcpy(&a, line + row % kRows * 2, 2);
    b = a;
    if constexpr (Digit == 8) std::memcpy(&b, line + 32 + row * 2, 2);
    const int64_t slot = Digit == 2 ? row / kRows * 2 : 0;
    return (uint32_t(a) >> slot & kBoth) | (uint32_t(b) >> (Digit == 8 ? 0 : slot + 4) & kBoth) << 16;
  }
}

template <int Bits>
void from_tiles(const BitportTiles& w, int64_t row, int64_t first, int64_t count, uint8_t* codes) {
  const uint8_t* tile = tile_at(w, row / 32, first / 32);
  const int64_t line = row % 32 / 16 * 8, r = row % 16;
  for (int64_t column = 0; column < count; column += 32, tile += 128 * Bits)
    for (int64_t p = line; p < line + 8; ++p, codes += 4) {
      uint32_t found = 0;
      if constexpr (Bits & 8) found |= four<8>(tile + plane_of(Bits, 8, p), r) << below(Bits, 8);
      if constexpr (Bits & 4) found |= four<4>(tile + plane_of(Bits, 4, p), r) << below(Bits, 4);
      if constexpr (Bits & 2) found |= four<2>(tile + plane_of(Bits, 2, p), r) << below(Bits, 2);
      if constexpr (Bits & 1) found |= four<1>(tile + plane_of(Bits, 1, p), r) << below(Bits, 1);
      std::memcpy(codes, &found, 4);
    }
}

template <int Bits>
void from_dense(const BitportTiles& w, int64_t row, int64_t first, int64_t count, uint8_t* codes) {
  const int64_t row_bytes = ceil_div(w.k * Bits, 8), from = first * Bits / 8;
  const int64_t columns = w.k - first < count ? w.k - first : count, bytes = ceil_div(columns * Bits, 8);
  const uint8_t* data = w.codes + row * row_bytes + from;
  if constexpr (Bits == 8) {
    std::memcpy(codes, data, size_t(bytes));
  } else if constexpr (Bits == 4) {
    for (int64_t i = 0; i < bytes; ++i) {
      codes[2 * i] = data[i] & 15;
      codes[2 * i + 1] = data[i] >> 4;
    }
  } else {
    for (int64_t i = 0; i < bytes; i += Bits) {
      uint64_t eight = 0;
      std::memcpy(&eight, data + i, size_t(bytes - i < Bits ? bytes - i : Bits));
      eight = spread<Bits>(eight);
      std::memcpy(codes + i / Bits * 8, &eight, 8);
    }
  }
}

}  // namespace

ReadCodes codes_of_tiles(int32_t bits) {
  constexpr ReadCodes all[] = {from_tiles<1>, from_tiles<2>, from_tiles<3>, from_tiles<4>,
                               from_tiles<5>, from_tiles<6>, from_tiles<7>, from_tiles<8>};
  return all[bits - 1];
}

ReadCodes codes_of_dense(int32_t bits) {
  constexpr ReadCodes all[] = {from_dense<1>, from_dense<2>, from_dense<3>, from_dense<4>,
                               from_dense<5>, from_dense<6>, from_dense<7>, from_dense<8>};
  return all[bits - 1];
}

}  // namespace bitport
