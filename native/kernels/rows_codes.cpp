// Reads the codes of one row densely, as nibbles or bytes (rows.h).
#include <cstring>
#include "bits.h"
#include "rows.h"

namespace bitport {
namespace {

// A row has few bytes in each cache line of a tile; these are prefetched this many tiles ahead.
constexpr int64_t kAhead = 12;

constexpr uint64_t words(uint64_t word) { return word * 0x1000100010001u; }

// 16 columns of a row, whose digits are in four lines (tiles.h), as nibbles.
template <int Digit>
uint64_t sixteen(const uint8_t* line, int64_t row) {
  uint64_t found = 0;
  for (int i = 0; i < 4; ++i, line += 8 * Digit) {
    uint16_t word;   // nibbles: digits of columns 0, 2, 1 and 3; 1-bit digits of columns 0 and 1 share a byte
    if constexpr (Digit == 1) word = uint16_t(line[row / 4] | line[4 + row / 4] << 8);
    else std::memcpy(&word, line + row % (4 * Digit) * 2, 2);
    found |= uint64_t(word) << 16 * i;
  }
  if constexpr (Digit == 1) {
    found >>= row % 4 * 2;
    return (found & words(0x0101)) | (found & words(0x0202)) << 3;
  }
  if constexpr (Digit == 2) found = found >> row / 8 * 2 & words(0x3333);
  return (found & words(0xf00f)) | (found & words(0x0f00)) >> 4 | (found & words(0x00f0)) << 4;
}

// The digits of `Bits` that are no wider than Digits.
template <int Bits, int Digits>
uint64_t nibbles(const uint8_t* tile, int64_t line, int64_t row) {
  uint64_t found = 0;
  if constexpr (Bits & Digits & 4) found |= sixteen<4>(tile + plane_of(Bits, 4, line), row) << below(Bits & Digits, 4);
  if constexpr (Bits & Digits & 2) found |= sixteen<2>(tile + plane_of(Bits, 2, line), row) << below(Bits & Digits, 2);
  if constexpr (Bits & Digits & 1) found |= sixteen<1>(tile + plane_of(Bits, 1, line), row) << below(Bits & Digits, 1);
  return found;
}

// Writes 16 columns of a row to codes; returns the position after them.
template <int Bits>
uint8_t* read_16(const uint8_t* tile, int64_t line, int64_t row, uint8_t* codes) {
  if constexpr (Bits == 8) {
    const uint8_t* pair = tile + line * 64 + row * 2;
    for (int i = 0; i < 8; ++i) std::memcpy(codes + 2 * i, pair + 32 * i, 2);
    return codes + 16;
  } else if constexpr (Bits <= 4) {
    const uint64_t found = nibbles<Bits, 7>(tile, line, row);
    std::memcpy(codes, &found, 8);
    return codes + 8;
  } else {
    const uint64_t low = nibbles<Bits, 4>(tile, line, row), high = nibbles<Bits, 3>(tile, line, row);
    for (int i = 0; i < 2; ++i) {
      const uint64_t eight = spread<4>(low >> 32 * i) | spread<4>(high >> 32 * i) << 4;
      std::memcpy(codes + 8 * i, &eight, 8);
    }
    return codes + 16;
  }
}

// Prefetches the cache lines of a tile that hold these 16 rows.
template <int Bits>
__attribute__((always_inline)) inline void fetch(const uint8_t* tile, int64_t line) {
  for (int digit = 8; digit; digit /= 2)
    for (int at = 0; at < (Bits & digit); ++at) __builtin_prefetch(tile + plane_of(Bits, digit, line) + 64 * at);
}

template <int Bits>
void from_tiles(const BitportTiles& w, int64_t row, int64_t first, int64_t count, int64_t next, uint8_t* codes) {
  constexpr int64_t kTile = 128 * Bits;
  const int64_t line = row % 32 / 16 * 8, next_line = next % 32 / 16 * 8, r = row % 16;
  const int64_t steps = steps_of(w), ahead = smaller(steps, kAhead), end = ceil_div(first + count, 32);
  const uint8_t* const tiles = tile_at(w, row / 32, 0);
  const uint8_t* const next_tiles = next < 0 ? nullptr : tile_at(w, next / 32, 0);
  for (int64_t step = first / 32; step < end; ++step) {
    const int64_t soon = step + ahead;
    if (soon < steps) fetch<Bits>(tiles + soon * kTile, line);
    else if (next_tiles) fetch<Bits>(next_tiles + (soon - steps) * kTile, next_line);
    for (int half = 0; half < 2; ++half) codes = read_16<Bits>(tiles + step * kTile, line + 4 * half, r, codes);
  }
}

template <int Bits>
void from_dense(const BitportTiles& w, int64_t row, int64_t first, int64_t count, int64_t, uint8_t* codes) {
  const uint8_t* data = w.codes + row * ceil_div(w.k * Bits, 8) + first * Bits / 8;
  for (int64_t left = ceil_div(count * Bits, 8); left > 0; left -= Bits, data += Bits) {
    uint64_t eight = 0;
    std::memcpy(&eight, data, size_t(smaller(left, Bits)));
    eight = spread<Bits>(eight);
    if constexpr (Bits <= 4) eight = gather<4>(eight);
    std::memcpy(codes, &eight, Bits <= 4 ? 4 : 8);
    codes += Bits <= 4 ? 4 : 8;
  }
}

}  // namespace

ReadCodes codes_of_tiles(int32_t bits) {
  constexpr ReadCodes all[] = {from_tiles<1>, from_tiles<2>, from_tiles<3>, from_tiles<4>,
                               from_tiles<5>, from_tiles<6>, from_tiles<7>, from_tiles<8>};
  return all[bits - 1];
}

ReadCodes codes_of_dense(int32_t bits) {
  constexpr ReadCodes all[] = {from_dense<1>, from_dense<2>, from_dense<3>, nullptr,
                               from_dense<5>, from_dense<6>, from_dense<7>, nullptr};
  return all[bits - 1];
}

}  // namespace bitport
