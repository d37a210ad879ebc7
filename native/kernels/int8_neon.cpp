// The product with int8 inputs without sdot: products of neighbours in K are 16 bits wide and accumulated in 32. With
// codes of up to 4 bits, eight products (15 * 128 * 8) are summed in 16 bits first.
#include "int8.h"
#if BITPORT_ARM
#include "neon.h"
#define TARGET

namespace bitport {
namespace {

constexpr int64_t kRows = 2, kLines = 1;

struct Lanes { int8x16_t v[4]; };   // pairs of columns, in layout order

NEON_INLINE Lanes lanes(const Line (&line)[1]) {
  Lanes pairs;
  for (int i = 0; i < 4; ++i) pairs.v[i] = vreinterpretq_s8_u8(line[0].v[i]);
  return pairs;
}

template <int R>
using Sums = RowSums<R>;

// Products of 8 pairs of columns, for rows 0 .. 3, 4 .. 7, ..
template <int R>
struct Words { int16x8_t v[R][4]; };

// The I-th pair of columns, 32 codes.
template <int32_t Bits, int I, int R>
NEON_INLINE void add_pair(const int8x16_t* codes, const int8x16_t (&x)[R], Words<R>& words, Sums<R>& whole) {
  constexpr int kSummed = Bits == 4 ? 8 : 1;   // pairs summed before they are widened
  for (int r = 0; r < R; ++r) {
    const int8x16_t two = vreinterpretq_s8_s16(vdupq_laneq_s16(vreinterpretq_s16_s8(x[r]), I));
    for (int j = 0; j < 4; j += 2) {
      int16x8_t &low = words.v[r][j], &high = words.v[r][j + 1];
      low = I % kSummed ? vmlal_s8(low, vget_low_s8(codes[j / 2]), vget_low_s8(two))
                        : vmull_s8(vget_low_s8(codes[j / 2]), vget_low_s8(two));
      high = I % kSummed ? vmlal_high_s8(high, codes[j / 2], two) : vmull_high_s8(codes[j / 2], two);
      if (I % kSummed < kSummed - 1) continue;
      whole.v[r][j] = vpadalq_s16(whole.v[r][j], low);
      whole.v[r][j + 1] = vpadalq_s16(whole.v[r][j + 1], high);
    }
  }
}

template <int32_t Bits, int I, int R>
NEON_INLINE void add_line(const Lanes& line, const int8x16_t (&x)[R], Words<R>& words, Sums<R>& whole) {
  add_pair<Bits, 2 * I>(line.v, x, words, whole);
  add_pair<Bits, 2 * I + 1>(line.v + 2, x, words, whole);
}

template <int32_t Bits, class Unit, int R>
NEON_INLINE void add_unit(const Unit& unit, const int8x16_t (&x)[R], Sums<R>& whole) {
  Words<R> words;
  add_line<Bits, 0>(unit(0), x, words, whole);
  add_line<Bits, 1>(unit(1), x, words, whole);
  add_line<Bits, 2>(unit(2), x, words, whole);
  add_line<Bits, 3>(unit(3), x, words, whole);
}

}  // namespace
}  // namespace bitport

#include "int8_neon.h"

namespace bitport {

void neon_range(const void* x, int32_t type, int64_t count, float* low, float* high) {
  float32x4_t least = vdupq_n_f32(0), most = least;   // NaN if a number is
  for (int64_t i = 0; i < count; i += 4) {
    const float32x4_t v = load_some(x, type, i, count);
    least = vminq_f32(least, v);
    most = vmaxq_f32(most, v);
  }
  *low = vminvq_f32(least);
  *high = vmaxvq_f32(most);
}

int32_t neon_round(const void* x, int32_t type, int64_t count, Rounding rounding, int8_t* to, int64_t from,
                   int64_t next) {
  const float32x4_t scale = vdupq_n_f32(rounding.scale);
  const int32x4_t zero = vdupq_n_s32(int32_t(rounding.zero));
  int32_t sum = 0;
  for (int64_t i = 0, at = from; i < count; i += 16, at += 16) {
    int16x4_t words[4];
    for (int64_t j = 0; j < 4; ++j) {   // NaN becomes 0, all else saturates
      const int64_t first = i + j * 4;
      const int32x4_t steps = vcvtnq_s32_f32(vdivq_f32(load_some(x, type, first, count), scale));
      words[j] = vqmovn_s32(vqaddq_s32(steps, zero));
    }
    int8x16_t codes = vcombine_s8(vqmovn_s16(vcombine_s16(words[0], words[1])),
                                  vqmovn_s16(vcombine_s16(words[2], words[3])));
    if (count - i < 16) {
      int8_t inside[16] = {};
      for (int64_t j = i; j < count; ++j) inside[j - i] = -1;
      codes = vandq_s8(codes, vld1q_s8(inside));
    }
    sum += vaddlvq_s8(codes);
    vst1q_s8(to + at / kInt8Step * next + at % kInt8Step, codes);
  }
  return sum;
}

void neon_finish(float* sum, const float* ones, Rounding rounding, int64_t count, const float* bias, void* y,
                 int32_t type, bool) {
  for (int64_t j = 0; j < 32; j += 4) {
    float32x4_t v = vld1q_f32(sum + j);
    if (ones) v = vfmsq_f32(v, vdupq_n_f32(rounding.zero), vld1q_f32(ones + j));
    vst1q_f32(sum + j, vmulq_n_f32(v, rounding.scale));
  }
  neon_store(sum, count, bias, y, type);
}

void neon_int8_fused(const Int8Job& job, int64_t tile, void* panel, float* sum) { fused(job, tile, panel, sum); }

const Int8Engine neon_int8_engine = {kInt8Stretch, 1, 0, kUsualOfBytes, neon_range, neon_round, fuses, fused, unpack,
                                     multiply, nullptr, nullptr, nullptr, neon_finish, false, nullptr, nullptr};

}  // namespace bitport
#endif
