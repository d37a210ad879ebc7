// Values of codes in 128-bit registers: one description of a format serves panels and few rows of x.
#pragma once
#include "neon.h"

namespace bitport {

struct Column { float32x4_t v[4]; };   // 16 rows

// Integers: a byte minus the center becomes the top of a word, which is converted as fixed point with 24 fraction bits.
struct Whole {
  uint8x16_t center, places[4];
  explicit Whole(const BitportTiles& w) : center(vdupq_n_u8(uint8_t(1 << (w.bits - 1)))) {
    const uint32_t first[] = {0x00ffffff, 0x01ffffff, 0x02ffffff, 0x03ffffff};   // an index outside the 16 bytes yields 0
    for (uint32_t i = 0; i < 4; ++i)
      places[i] = vreinterpretq_u8_u32(vaddq_u32(vld1q_u32(first), vdupq_n_u32(i << 26)));
  }
  NEON_MEMBER Column operator()(uint8x16_t codes) const {
    const uint8x16_t bytes = vsubq_u8(codes, center);
    Column found;
    for (int i = 0; i < 4; ++i)
      found.v[i] = vcvtq_n_f32_s32(vreinterpretq_s32_u8(vqtbl1q_u8(bytes, places[i])), 24);
    return found;
  }
};

// Up to 16 values of float32: all four bytes are looked up.
struct Few {
  uint8x16x4_t bytes;
  explicit Few(const BitportTiles& w) {
    float numbers[16];
    for (int i = 0; i < 16; ++i) numbers[i] = w.table[i & ((1 << w.bits) - 1)];
    bytes = vld4q_u8(reinterpret_cast<const uint8_t*>(numbers));
  }
  NEON_MEMBER Column operator()(uint8x16_t codes) const {
    const uint8x16_t first = vqtbl1q_u8(bytes.val[0], codes), second = vqtbl1q_u8(bytes.val[1], codes);
    const uint8x16_t third = vqtbl1q_u8(bytes.val[2], codes), fourth = vqtbl1q_u8(bytes.val[3], codes);
    const auto words = [](uint8x16_t v) INLINED { return vreinterpretq_u16_u8(v); };
    const auto zipped = [](uint16x8_t low, uint16x8_t high, Column& to, int at) INLINED {
      to.v[at] = vreinterpretq_f32_u16(vzip1q_u16(low, high));
      to.v[at + 1] = vreinterpretq_f32_u16(vzip2q_u16(low, high));
    };
    Column found;
    zipped(words(vzip1q_u8(first, second)), words(vzip1q_u8(third, fourth)), found, 0);
    zipped(words(vzip2q_u8(first, second)), words(vzip2q_u8(third, fourth)), found, 2);
    return found;
  }
};

// Up to 16 or 64 values that are exact in bfloat16: two bytes are looked up.
template <int Sixteens>
struct Short {
  uint8x16x4_t low, high;
  explicit Short(const BitportTiles& w) {
    for (int part = 0; part < Sixteens; ++part) {
      float numbers[16];
      for (int i = 0; i < 16; ++i) numbers[i] = w.table[part * 16 + (i & ((1 << w.bits) - 1))];
      const uint8x16x4_t bytes = vld4q_u8(reinterpret_cast<const uint8_t*>(numbers));
      low.val[part] = bytes.val[2];
      high.val[part] = bytes.val[3];
    }
  }
  NEON_MEMBER Column operator()(uint8x16_t codes) const {
    const uint8x16_t first = look_up(low, codes), second = look_up(high, codes);
    return above(vzip1q_u8(first, second), vzip2q_u8(first, second));
  }

 private:
  NEON_MEMBER static uint8x16_t look_up(const uint8x16x4_t& bytes, uint8x16_t codes) {
    if constexpr (Sixteens == 1) return vqtbl1q_u8(bytes.val[0], codes);
    else return vqtbl4q_u8(bytes, codes);
  }
  // 16-bit words as the upper halves of floats.
  NEON_MEMBER static Column above(uint8x16_t first, uint8x16_t second) {
    const uint16x8_t zero = vdupq_n_u16(0), words[] = {vreinterpretq_u16_u8(first), vreinterpretq_u16_u8(second)};
    Column found;
    for (int i = 0; i < 2; ++i) {
      found.v[2 * i] = vreinterpretq_f32_u16(vzip1q_u16(zero, words[i]));
      found.v[2 * i + 1] = vreinterpretq_f32_u16(vzip2q_u16(zero, words[i]));
    }
    return found;
  }
};

// Float8 as float16 with the same fields, which for e4m3 is smaller by 2^8. The ends of the table are rare, and are
// looked up.
template <bool E5m2>
struct Float8 {
  const float* table;
  explicit Float8(const BitportTiles& w) : table(w.table) {}
  NEON_MEMBER Column operator()(uint8x16_t codes) const {
    if (__builtin_expect(vmaxvq_u8(vandq_u8(codes, vdupq_n_u8(0x7f))) > (E5m2 ? 0x7b : 0x7e), 0)) return looked_up(codes);
    uint8x16_t low = vdupq_n_u8(0), high = codes;
    if constexpr (!E5m2) {
      low = vshlq_n_u8(codes, 7);
      high = vandq_u8(vreinterpretq_u8_s8(vshrq_n_s8(vreinterpretq_s8_u8(codes), 1)), vdupq_n_u8(0xbf));
    }
    const float16x8_t halves[] = {vreinterpretq_f16_u8(vzip1q_u8(low, high)), vreinterpretq_f16_u8(vzip2q_u8(low, high))};
    Column found;
    for (int i = 0; i < 2; ++i) {
      found.v[2 * i] = vcvt_f32_f16(vget_low_f16(halves[i]));
      found.v[2 * i + 1] = vcvt_high_f32_f16(halves[i]);
    }
    for (float32x4_t& v : found.v)
      if constexpr (!E5m2) v = vmulq_n_f32(v, 256.0f);
    return found;
  }

 private:
  Column looked_up(uint8x16_t codes) const {
    uint8_t each[16];
    float numbers[16];
    vst1q_u8(each, codes);
    for (int i = 0; i < 16; ++i) numbers[i] = table[each[i]];
    return {{vld1q_f32(numbers), vld1q_f32(numbers + 4), vld1q_f32(numbers + 8), vld1q_f32(numbers + 12)}};
  }
};

// Scales and shifts of 16 rows, half a tile, in one group.
struct Affine {
  float32x4_t scale[4], shift[4];
  Affine(const BitportTiles& w, int64_t tile, int64_t group, int64_t half) {
    const int64_t at = (tile * groups_of(w) + group) * 32 + half * 16;
    for (int i = 0; i < 4; ++i) {
      scale[i] = load4(w.scale, w.scale_type, at + i * 4);
      shift[i] = w.zero ? vsubq_f32(load4(w.zero, w.zero_type, at + i * 4), vdupq_n_f32(middle(w))) : vdupq_n_f32(0);
    }
  }
};

// The four columns of a line.
struct Columns { Column of[4]; };

// The lines of a tile; 16 rows from column k on begin at line first_line(k, half).
template <class Meaning, int32_t Bits>
struct Lines {
  const BitportTiles& w;
  const Meaning meaning;
  explicit Lines(const BitportTiles& weight) : w(weight), meaning(weight) {}
  NEON_MEMBER Columns operator()(const uint8_t* tile, int64_t number) const {
    const Line line = read_line(tile, Bits ? Bits : w.bits, number);
    return {{meaning(vuzp1q_u8(line.v[0], line.v[1])), meaning(vuzp2q_u8(line.v[0], line.v[1])),
             meaning(vuzp1q_u8(line.v[2], line.v[3])), meaning(vuzp2q_u8(line.v[2], line.v[3]))}};
  }
};
NEON_INLINE int64_t first_line(int64_t k, int64_t half) { return half * 8 + k % 32 / 4; }

// Table<Meaning, Bits>::ways for the codes of a weight.
template <template <class, int32_t> class Table>
const auto& ways_of(const BitportTiles& w) {
  if (w.integer && w.bits > 1)
    return w.bits == 4 ? Table<Whole, 4>::ways : w.bits == 8 ? Table<Whole, 8>::ways : Table<Whole, 0>::ways;
  if (w.bits == 8)   // in e4m3 1.0 is 0x38
    return w.table[0x3c] == 1 ? Table<Float8<true>, 8>::ways : Table<Float8<false>, 8>::ways;
  if (w.bits > 4) return Table<Short<4>, 6>::ways;
  if (w.bits < 4) return Table<Short<1>, 0>::ways;
  uint32_t lower = 0;
  for (int i = 0; i < 16; ++i) lower |= bits_of_float(w.table[i]) & 0xffff;
  return lower ? Table<Few, 4>::ways : Table<Short<1>, 4>::ways;
}

}  // namespace bitport
