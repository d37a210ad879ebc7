// Shared by the files with NEON: conversions, and reading the codes of a line (layout in bitport_kernels.h).
#pragma once
#include <arm_neon.h>
#include "number.h"
#include "tiles.h"

#define INLINED __attribute__((always_inline))
#define NEON_MEMBER INLINED inline
#define NEON_INLINE INLINED static inline

namespace bitport {

NEON_INLINE float32x4_t load4(const void* p, int32_t type, int64_t i) {
  switch (type) {
    case BITPORT_F32: return vld1q_f32(static_cast<const float*>(p) + i);
    case BITPORT_BF16:
      return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(static_cast<const uint16_t*>(p) + i)), 16));
    case BITPORT_F16: return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(static_cast<const uint16_t*>(p) + i)));
    default: break;
  }
  uint32_t four;
  __builtin_memcpy(&four, static_cast<const uint8_t*>(p) + i, 4);
  const uint16x4_t words = vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four))));
  if (type == BITPORT_E4M3) {   // float16 has the same fields, but an exponent bias of 15, not 7
    const uint16x4_t size = vand_u16(words, vdup_n_u16(0x7f)), sign = vshl_n_u16(vsub_u16(words, size), 8);
    const uint16x4_t none = vand_u16(vceq_u16(size, vdup_n_u16(0x7f)), vdup_n_u16(0x7e00));   // all bits set: NaN
    return vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(vorr_u16(vorr_u16(sign, vshl_n_u16(size, 7)), none))), 256.0f);
  }
  const uint32x4_t codes = vmovl_u16(words);
  if (type == BITPORT_U8) return vcvtq_f32_u32(codes);
  const uint32x4_t power = vbslq_u32(vceqzq_u32(codes), vdupq_n_u32(0x00400000), vshlq_n_u32(codes, 23));   // e8m0
  return vreinterpretq_f32_u32(vbslq_u32(vceqq_u32(codes, vdupq_n_u32(255)), vdupq_n_u32(0x7fc00000), power));
}

// Four numbers, those past the end 0.
NEON_INLINE float32x4_t load_some(const void* x, int32_t type, int64_t i, int64_t end) {
  if (end - i >= 4) return load4(x, type, i);
  float some[4] = {};
  for (int64_t j = i; j < end; ++j) some[j - i] = load_number(x, type, j);
  return vld1q_f32(some);
}

// To bfloat16 (nearest even; a NaN stays one) or float16.
NEON_INLINE uint16x4_t halves(float32x4_t v, int32_t type) {
  if (type != BITPORT_BF16) return vreinterpret_u16_f16(vcvt_f16_f32(v));
  const uint32x4_t bits = vreinterpretq_u32_f32(v), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), rounded, quiet), 16);
}

NEON_INLINE void store4(float32x4_t v, void* p, int32_t type, int64_t i) {
  if (type == BITPORT_F32) vst1q_f32(static_cast<float*>(p) + i, v);
  else vst1_u16(static_cast<uint16_t*>(p) + i, halves(v, type));
}

// The 64 codes of a line in the order of the layout: columns 0 and 1 of rows 0 .. 7, of rows 8 .. 15, then 2 and 3.
struct Line { uint8x16_t v[4]; };

NEON_INLINE Line read_line(const uint8_t* tile, int32_t bits, int64_t line) {
  Line codes{};
  int below = 0;
  const auto put = [&](int i, uint8x16_t digits) INLINED {   // above the digits already there
    codes.v[i] = vorrq_u8(codes.v[i], vshlq_u8(digits, vdupq_n_s8(int8_t(below))));
  };
  if (bits & 8)
    for (int i = 0; i < 4; ++i) codes.v[i] = vld1q_u8(tile + line * 64 + i * 16);
  if (bits & 4) {
    for (int i = 0; i < 2; ++i) {
      const uint8x16_t both = vld1q_u8(tile + line * 32 + i * 16);
      codes.v[i] = vandq_u8(both, vdupq_n_u8(15));
      codes.v[2 + i] = vshrq_n_u8(both, 4);
    }
    tile += 16 * 32;
    below = 4;
  }
  if (bits & 2) {
    const uint8x16_t all = vld1q_u8(tile + line * 16), digit = vdupq_n_u8(3);
    put(0, vandq_u8(all, digit));
    put(1, vandq_u8(vshrq_n_u8(all, 2), digit));
    put(2, vandq_u8(vshrq_n_u8(all, 4), digit));
    put(3, vshrq_n_u8(all, 6));
    tile += 16 * 16;
    below += 2;
  }
  if (bits & 1) {
    const uint8x16_t all = vcombine_u8(vld1_u8(tile + line * 8), vdup_n_u8(0));
    const uint8x16_t own = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201u));   // the bit of each code in its byte
    uint8x16_t bytes = vcombine_u8(vdup_n_u8(0), vdup_n_u8(1));
    for (int i = 0; i < 4; ++i, bytes = vaddq_u8(bytes, vdupq_n_u8(2)))
      put(i, vandq_u8(vtstq_u8(vqtbl1q_u8(all, bytes), own), vdupq_n_u8(1)));
  }
  return codes;
}

// For the product with floats.
constexpr int64_t kNeonRows = 4;   // rows of x multiplied at once: with 16 rows of the weight, 16 registers of sums
void neon_widen(const void* from, int32_t type, int64_t count, float* to);
void neon_store(const float* sum, int64_t count, const float* bias, void* y, int32_t type);

// Reorders a line by rows: the four columns of each, for rows 0 .. 3, 4 .. 7, ..
NEON_INLINE Line by_rows(const Line& line) {
  Line rows;
  for (int i = 0; i < 2; ++i) {   // pairs of columns
    const uint16x8_t low = vreinterpretq_u16_u8(line.v[i]), high = vreinterpretq_u16_u8(line.v[2 + i]);
    rows.v[2 * i] = vreinterpretq_u8_u16(vzip1q_u16(low, high));
    rows.v[2 * i + 1] = vreinterpretq_u8_u16(vzip2q_u16(low, high));
  }
  return rows;
}

// Sums of products of bytes, for R rows of x and 16 rows of the weight.
template <int R>
struct RowSums {
  int32x4_t v[R][4];
  NEON_MEMBER explicit RowSums(const int32_t (&first)[R]) {
    for (int r = 0; r < R; ++r)
      for (int32x4_t& each : v[r]) each = vdupq_n_s32(first[r]);
  }
  NEON_MEMBER int32x4_t of(int row, int four) const { return v[row][four]; }
};

// Pairs of rows of x, as matrix products take them: sums are [x0 w0, x0 w1, x1 w0, x1 w1]. The last of an odd number of
// rows is paired with itself.
template <int R>
struct Pairs {
  static constexpr int kCount = (R + 1) / 2;
  static constexpr int second(int pair) { return 2 * pair + 1 < R ? 2 * pair + 1 : 2 * pair; }
};

// For the product with x in integers (Int8Engine and Digits); `fused` differs between variants.
struct Int8Job;
struct Rounding;
constexpr int64_t kInt8Stretch = 256;   // columns: a panel of 8 KiB
void neon_int8_fused(const Int8Job& job, int64_t tile, void* panel, float* sum);
void neon_dot_int8_fused(const Int8Job& job, int64_t tile, void* panel, float* sum);
void neon_matrix_int8_fused(const Int8Job& job, int64_t tile, void* panel, float* sum);
void neon_range(const void* x, int32_t type, int64_t count, float* low, float* high);
int32_t neon_round(const void* x, int32_t type, int64_t count, Rounding rounding, int8_t* to, int64_t from,
                   int64_t next);
void neon_finish(float* sum, const float* ones, Rounding rounding, int64_t count, const float* bias, void* y,
                 int32_t type, bool stream);

}  // namespace bitport
