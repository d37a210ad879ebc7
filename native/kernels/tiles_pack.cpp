// Dense codes to tiles and back (layout in bitport_kernels.h), processing eight codes of a row at a time, or a word of
// them.
#include <cstring>
#include "bits.h"
#include "share.h"
#include "status.h"
#include "tiles.h"

namespace bitport {
namespace {

constexpr int64_t kSteps = 8;   // steps copied at once: distant rows may map to the same cache set

struct Line { uint16_t pair[2][16]; };   // by place(): two neighbours in K of each row, then the next two

// Writes the digits of a line of codes to their plane. 1-bit digits of eight neighbours are moved together.
template <int Digit>
void write_digits(const uint8_t* codes, int32_t below, uint8_t* plane) {
  for (int64_t byte = 0; byte < 8 * Digit; ++byte) {
    if constexpr (Digit == 1) {
      uint64_t eight;
      std::memcpy(&eight, codes + code_in(1, byte, 0), 8);
      plane[byte] = uint8_t(gather<1>(eight >> below));
    } else {
      uint32_t value = 0;
      for (int64_t slot = 0; slot < 8 / Digit; ++slot)
        value |= (codes[code_in(Digit, byte, slot)] >> below & low(Digit)) << slot * Digit;
      plane[byte] = uint8_t(value);
    }
  }
}

template <int Digit>
void read_digits(const uint8_t* plane, int32_t below, uint8_t* codes) {
  for (int64_t slot = 0; slot < (Digit == 1 ? 1 : 8 / Digit); ++slot)
    for (int64_t byte = 0; byte < 8 * Digit; ++byte) {
      if constexpr (Digit == 1) {
        uint64_t eight;
        std::memcpy(&eight, codes + code_in(1, byte, 0), 8);
        eight |= spread<1>(plane[byte]) << below;
        std::memcpy(codes + code_in(1, byte, 0), &eight, 8);
      } else {
        codes[code_in(Digit, byte, slot)] |= uint8_t((plane[byte] >> slot * Digit & low(Digit)) << below);
      }
    }
}

template <int Bits>
void write_line(const Line& line, int64_t number, uint8_t* tile) {
  uint8_t codes[64];
  std::memcpy(codes, &line, 64);
  if constexpr (Bits & 4) write_digits<4>(codes, below(Bits, 4), tile + plane_of(Bits, 4, number));
  if constexpr (Bits & 2) write_digits<2>(codes, below(Bits, 2), tile + plane_of(Bits, 2, number));
  if constexpr (Bits & 1) write_digits<1>(codes, below(Bits, 1), tile + plane_of(Bits, 1, number));
}

template <int Bits>
Line read_line(const uint8_t* tile, int64_t number) {
  uint8_t codes[64] = {};
  if constexpr (Bits & 4) read_digits<4>(tile + plane_of(Bits, 4, number), below(Bits, 4), codes);
  if constexpr (Bits & 2) read_digits<2>(tile + plane_of(Bits, 2, number), below(Bits, 2), codes);
  if constexpr (Bits & 1) read_digits<1>(tile + plane_of(Bits, 1, number), below(Bits, 1), codes);
  Line line;
  std::memcpy(&line, codes, 64);
  return line;
}

// 32 rows of dense codes, of which `rows` exist, and their tiles.
struct Strip { uint8_t* dense; int64_t rows, row_bytes, k; uint8_t* tiles; };

template <int Bits>
struct Block {   // of kSteps steps
  static constexpr int64_t kBytes = kSteps * 4 * Bits, kRow = kBytes + 8;   // eight codes are moved as 8 bytes
  uint8_t bytes[32 * kRow];
  uint8_t* at(int64_t row, int64_t step, int64_t eight) { return bytes + row * kRow + (step * 4 + eight) * Bits; }
};

using Eights = uint64_t[4][32];   // for one step: groups of eight columns of each row

// Clears the columns of a step that are past the end of the row.
void cut_off(Eights& codes, int64_t columns) {
  for (int64_t eight = 0; eight < 4 && columns < 32; ++eight) {
    const int64_t left = columns - eight * 8;
    for (int64_t row = 0; row < 32; ++row) codes[eight][row] &= left <= 0 ? 0 : low(int(left < 8 ? left : 8) * 8);
  }
}

// Packs one step of the block into its tile; columns: how many are left in the row.
template <int Bits>
void pack_lines(Block<Bits>& block, int64_t step, int64_t columns, uint8_t* tile) {
  Eights codes;
  for (int64_t row = 0; row < 32; ++row)
    for (int64_t eight = 0; eight < 4; ++eight) std::memcpy(&codes[eight][row], block.at(row, step, eight), 8);
  for (auto& eight : codes)
    for (uint64_t& v : eight) v = spread<Bits>(v);
  cut_off(codes, columns);
  for (int64_t half = 0; half < 2; ++half)
    for (int64_t eight = 0; eight < 4; ++eight) {
      Line lines[2];
      for (int64_t row = 0; row < 16; ++row) {
        const uint64_t v = codes[eight][half * 16 + row];
        lines[0].pair[0][row] = uint16_t(v);
        lines[0].pair[1][row] = uint16_t(v >> 16);
        lines[1].pair[0][row] = uint16_t(v >> 32);
        lines[1].pair[1][row] = uint16_t(v >> 48);
      }
      write_line<Bits>(lines[0], half * 8 + eight * 2, tile);
      write_line<Bits>(lines[1], half * 8 + eight * 2 + 1, tile);
    }
}

template <int Bits>
void unpack_lines(Block<Bits>& block, int64_t step, int64_t columns, const uint8_t* tile) {
  Eights codes;
  for (int64_t half = 0; half < 2; ++half)
    for (int64_t eight = 0; eight < 4; ++eight) {
      const int64_t line = half * 8 + eight * 2;
      const Line a = read_line<Bits>(tile, line), b = read_line<Bits>(tile, line + 1);
      for (int64_t row = 0; row < 16; ++row)
        codes[eight][half * 16 + row] = a.pair[0][row] | uint64_t(a.pair[1][row]) << 16 |
                                        uint64_t(b.pair[0][row]) << 32 | uint64_t(b.pair[1][row]) << 48;
    }
  cut_off(codes, columns);
  for (auto& eight : codes)
    for (uint64_t& v : eight) v = gather<Bits>(v);
  for (int64_t row = 0; row < 32; ++row)   // bytes written beyond a group of eight are overwritten by the next one
    for (int64_t eight = 0; eight < 4; ++eight) std::memcpy(block.at(row, step, eight), &codes[eight][row], 8);
}

// Codes of 4 and 8 bits have a single plane: 128 bytes of it are one word of each of 16 rows, transposed in pairs of
// columns. Row 4g + r is at [r][g], so that transpose() handles four words side by side.
using Words = uint64_t[4][4];

// Transposes four rows of four pairs of columns, and back: first halves of words are exchanged, then quarters.
void transpose(Words& words) {
  constexpr uint64_t kFirst = 0xffffffffu, kOdd = 0xffff0000ffff0000u;
  for (int64_t g = 0; g < 4; ++g) {
    const uint64_t a = words[0][g], b = words[1][g], c = words[2][g], d = words[3][g];
    const uint64_t ac = (a & kFirst) | c << 32, bd = (b & kFirst) | d << 32;
    const uint64_t ca = a >> 32 | (c & ~kFirst), db = b >> 32 | (d & ~kFirst);
    words[0][g] = (ac & ~kOdd) | (bd & ~kOdd) << 16;
    words[1][g] = (ac & kOdd) >> 16 | (bd & kOdd);
    words[2][g] = (ca & ~kOdd) | (db & ~kOdd) << 16;
    words[3][g] = (ca & kOdd) >> 16 | (db & kOdd);
  }
}

// Swaps the second and third of four 4-bit codes, so that two neighbours in K are a byte apart.
uint64_t swap_middle(uint64_t v) {
  const uint64_t differ = (v ^ v >> 4) & 0x00f000f000f000f0u;
  return v ^ differ ^ differ << 4;
}

template <int Bits>
constexpr bool kOnePlane = Bits == 4 || Bits == 8;

template <int Bits>
void pack_words(Block<Bits>& block, int64_t step, int64_t columns, uint8_t* tile) {
  for (int64_t half = 0; half < 2; ++half)
    for (int64_t word = 0; word < Bits / 2; ++word) {
      const int64_t left = columns * Bits - word * 64;
      const uint64_t there = low(int(left < 0 ? 0 : smaller(left, 64)));
      Words words;
      for (int64_t row = 0; row < 16; ++row) {
        uint64_t v;
        std::memcpy(&v, block.at(half * 16 + row, step, 0) + word * 8, 8);
        words[row % 4][row / 4] = v & there;
      }
      if constexpr (Bits == 4)
        for (auto& four : words)
          for (uint64_t& v : four) v = swap_middle(v);
      transpose(words);
      std::memcpy(tile + (half * Bits / 2 + word) * 128, words, 128);
    }
}

template <int Bits>
void unpack_words(Block<Bits>& block, int64_t step, int64_t columns, const uint8_t* tile) {
  for (int64_t half = 0; half < 2; ++half)
    for (int64_t word = 0; word < Bits / 2; ++word) {
      const int64_t left = columns * Bits - word * 64;
      const uint64_t there = low(int(left < 0 ? 0 : smaller(left, 64)));
      Words words;
      std::memcpy(words, tile + (half * Bits / 2 + word) * 128, 128);
      transpose(words);
      if constexpr (Bits == 4)
        for (auto& four : words)
          for (uint64_t& v : four) v = swap_middle(v);
      for (int64_t row = 0; row < 16; ++row) {
        const uint64_t v = words[row % 4][row / 4] & there;
        std::memcpy(block.at(half * 16 + row, step, 0) + word * 8, &v, 8);
      }
    }
}

// Copies a part of a row, nearly always of the compile-time size.
template <int64_t Whole>
void copy(uint8_t* to, const uint8_t* from, int64_t count) {
  if (count == Whole) std::memcpy(to, from, Whole);
  else std::memcpy(to, from, size_t(count));
}

template <int Bits>
void pack_strip(const Strip& strip) {
  Block<Bits> block;
  std::memset(block.bytes, 0, sizeof block.bytes);
  for (int64_t first = 0; first < ceil_div(strip.k, 32); first += kSteps) {
    const int64_t from = first * 4 * Bits, count = smaller(strip.row_bytes - from, block.kBytes);
    for (int64_t row = 0; row < strip.rows; ++row)
      copy<Block<Bits>::kBytes>(block.bytes + row * block.kRow, strip.dense + row * strip.row_bytes + from, count);
    for (int64_t step = first; step < first + kSteps && step * 32 < strip.k; ++step) {
      uint8_t* tile = strip.tiles + step * 128 * Bits;
      if constexpr (kOnePlane<Bits>) pack_words(block, step - first, strip.k - step * 32, tile);
      else pack_lines(block, step - first, strip.k - step * 32, tile);
    }
  }
}

template <int Bits>
void unpack_strip(const Strip& strip) {
  Block<Bits> block;
  for (int64_t first = 0; first < ceil_div(strip.k, 32); first += kSteps) {
    for (int64_t step = first; step < first + kSteps && step * 32 < strip.k; ++step) {
      const uint8_t* tile = strip.tiles + step * 128 * Bits;
      if constexpr (kOnePlane<Bits>) unpack_words(block, step - first, strip.k - step * 32, tile);
      else unpack_lines(block, step - first, strip.k - step * 32, tile);
    }
    const int64_t to = first * 4 * Bits, count = smaller(strip.row_bytes - to, block.kBytes);
    for (int64_t row = 0; row < strip.rows; ++row)
      copy<Block<Bits>::kBytes>(strip.dense + row * strip.row_bytes + to, block.bytes + row * block.kRow, count);
  }
}

struct Moves { void (*pack)(const Strip& strip); void (*unpack)(const Strip& strip); };

template <int Bits>
constexpr Moves kMoves = {pack_strip<Bits>, unpack_strip<Bits>};

constexpr Moves kByBits[] = {kMoves<1>, kMoves<2>, kMoves<3>, kMoves<4>, kMoves<5>, kMoves<6>, kMoves<7>, kMoves<8>};

int32_t check(const void* a, const void* b, int32_t bits, int64_t n, int64_t k) {
  if (n < 0 || k <= 0 || n > kMost || k > kMost || bits < 1 || bits > 8) return kBadShape;
  return n == 0 || (a && b) ? kOk : kNullPointer;
}

void each_strip(void (*move)(const Strip&), uint8_t* dense, uint8_t* tiles, int32_t bits, int64_t n, int64_t k,
                int32_t threads) {
  constexpr int64_t kAlone = 1 << 18;   // codes
  const int64_t row_bytes = ceil_div(k * bits, 8), strip_bytes = ceil_div(k, 32) * 128 * bits;
  share(ceil_div(n, 32), n * k < kAlone ? 1 : threads, [&](int64_t i) {
    move({dense + i * 32 * row_bytes, smaller(n - i * 32, 32), row_bytes, k, tiles + i * strip_bytes});
  });
}

}  // namespace
}  // namespace bitport

int32_t bitport_pack(const uint8_t* dense, int32_t bits, int64_t n, int64_t k, uint8_t* tiles, int32_t threads) {
  using namespace bitport;
  if (const int32_t code = check(dense, tiles, bits, n, k)) return code;
  each_strip(kByBits[bits - 1].pack, const_cast<uint8_t*>(dense), tiles, bits, n, k, threads);
  return kOk;
}

int32_t bitport_unpack(const uint8_t* tiles, int32_t bits, int64_t n, int64_t k, uint8_t* dense, int32_t threads) {
  using namespace bitport;
  if (const int32_t code = check(tiles, dense, bits, n, k)) return code;
  each_strip(kByBits[bits - 1].unpack, dense, const_cast<uint8_t*>(tiles), bits, n, k, threads);
  return kOk;
}
