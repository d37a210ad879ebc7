// Attention over a panel, with pairs of 128-bit vectors: eight numbers, so that enough sums are in flight.
#include "attention.h"
#include "engine.h"
#if BITPORT_ARM
#include "neon.h"
#define INLINE NEON_INLINE
#define TARGET

namespace bitport {
namespace {

struct V { float32x4_t low, high; };
constexpr int64_t kWidth = 8;

INLINE V operator+(V a, V b) { return {a.low + b.low, a.high + b.high}; }
INLINE V operator-(V a, V b) { return {a.low - b.low, a.high - b.high}; }
INLINE V operator*(V a, V b) { return {a.low * b.low, a.high * b.high}; }
INLINE V all(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
INLINE V load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
INLINE void store(float* p, V v) { vst1q_f32(p, v.low), vst1q_f32(p + 4, v.high); }
INLINE V madd(V a, V b, V c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }
INLINE V larger(V limit, V x) {   // a NaN is kept
  return {vmaxq_f32(limit.low, x.low), vmaxq_f32(limit.high, x.high)};
}
INLINE V whole(V x) { return {vrndnq_f32(x.low), vrndnq_f32(x.high)}; }
INLINE float32x4_t two_to(float32x4_t x) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(x), vdupq_n_s32(127)), 23));
}
INLINE V two_to(V x) { return {two_to(x.low), two_to(x.high)}; }
INLINE float32x4_t half(V v) { return v.low + v.high; }
INLINE float32x4_t four(const V* v) {
  return vpaddq_f32(vpaddq_f32(half(v[0]), half(v[1])), vpaddq_f32(half(v[2]), half(v[3])));
}
INLINE V sums(const V* v) { return {four(v), four(v + 4)}; }
INLINE float sum_of(V v) { return vaddvq_f32(half(v)); }
INLINE float most_of(V v) { return vmaxvq_f32(vmaxq_f32(v.low, v.high)); }

template <Kind Of>
INLINE V numbers(const uint8_t* codes) {
  if constexpr (Of == kE4M3 || Of == kInt8) {
    const uint16x8_t words = vmovl_u8(vld1_u8(codes));
    if constexpr (Of == kInt8)
      return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(words))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(words)))};
    // float16 has the same fields, but an exponent bias of 15, not 7. All bits set is NaN.
    const uint16x8_t size = vandq_u16(words, vdupq_n_u16(0x7f)), sign = vshlq_n_u16(vsubq_u16(words, size), 8);
    const uint16x8_t none = vandq_u16(vceqq_u16(size, vdupq_n_u16(0x7f)), vdupq_n_u16(0x7e00));
    const float16x8_t floats = vreinterpretq_f16_u16(vorrq_u16(vorrq_u16(sign, vshlq_n_u16(size, 7)), none));
    return V{vcvt_f32_f16(vget_low_f16(floats)), vcvt_f32_f16(vget_high_f16(floats))} * all(256.0f);
  }
  constexpr int kBits = Of == kInt4 ? 4 : 2;
  uint32_t word = 0;   // 8 codes
  __builtin_memcpy(&word, codes, kBits);
  const int32_t to_right[] = {0, -kBits, -2 * kBits, -3 * kBits};
  const int32x4_t low = vld1q_s32(to_right), high = vsubq_s32(low, vdupq_n_s32(4 * kBits));
  const uint32x4_t eight = vdupq_n_u32(word), mask = vdupq_n_u32((1 << kBits) - 1);
  return {vcvtq_f32_u32(vandq_u32(vshlq_u32(eight, low), mask)),
          vcvtq_f32_u32(vandq_u32(vshlq_u32(eight, high), mask))};
}

}  // namespace
}  // namespace bitport

#include "attention_vectors.h"

namespace bitport {

extern const Attending neon_attending;
const Attending neon_attending{
    {decode<kInt2>, decode<kInt4>, decode<kInt8>, decode<kE4M3>}, score, largest, weigh, mix};

}  // namespace bitport
#endif
