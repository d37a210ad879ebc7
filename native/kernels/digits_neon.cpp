#include "digits.h"
#if BITPORT_ARM
#include "neon.h"

namespace bitport {
namespace {

uint16_t largest(const uint16_t* x, int64_t k) {
  uint16x8_t most = vdupq_n_u16(0);
  int64_t i = 0;
  for (; i + 8 <= k; i += 8) most = vmaxq_u16(most, vandq_u16(vld1q_u16(x + i), vdupq_n_u16(0x7fff)));
  uint16_t found = vmaxvq_u16(most);
  for (; i < k; ++i) found = (x[i] & 0x7fff) > found ? x[i] & 0x7fff : found;
  return found;
}

void split(const uint16_t* x, int64_t from, int64_t to, float unit, int8_t* codes, int64_t next, float* high_sum,
           float* low_sum) {
  const float inverse = 1.0f / unit;
  int32_t highs = 0, lows = 0;
  for (int64_t k = from; k < to; k += 16) {
    uint16_t some[16] = {};
    if (to - k < 16)
      for (int64_t i = k; i < to; ++i) some[i - k] = x[i];
    const uint16_t* const numbers = to - k < 16 ? some : x + k;
    int16x8_t whole[2];
    for (int i = 0; i < 2; ++i)
      whole[i] = vcombine_s16(vmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(load4(numbers, BITPORT_BF16, i * 8), inverse))),
                              vmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(load4(numbers, BITPORT_BF16, i * 8 + 4), inverse))));
    const int8x16_t low = vcombine_s8(vmovn_s16(whole[0]), vmovn_s16(whole[1]));   // the rest is 256 times `high`
    const int8x16_t high = vcombine_s8(vrshrn_n_s16(whole[0], 8), vrshrn_n_s16(whole[1], 8));
    int8_t* const at = codes + k / kInt8Step * next + k % kInt8Step;
    vst1q_s8(at, high);
    vst1q_s8(at + kInt8Step, low);
    highs += vaddlvq_s8(high);
    lows += vaddlvq_s8(low);
  }
  *high_sum = float(highs);
  *low_sum = float(lows);
}

void join(float* sum, float unit) {
  for (int64_t j = 0; j < 32; j += 4)
    vst1q_f32(sum + j, vmulq_n_f32(vfmaq_n_f32(vld1q_f32(sum + 32 + j), vld1q_f32(sum + j), 256.0f), unit));
}

}  // namespace

constexpr int64_t kPanel = kInt8Stretch * 32;
const Digits neon_digits = {neon_engine, neon_int8_fused, kPanel, kInt8Stretch, largest, split, join};
const Digits neon_dot_digits = {neon_engine, neon_dot_int8_fused, kPanel, kInt8Stretch, largest, split, join};
const Digits neon_matrix_digits = {neon_engine, neon_matrix_int8_fused, kPanel, kInt8Stretch, largest, split, join};

}  // namespace bitport
#endif
