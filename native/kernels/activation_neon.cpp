// The functions after a product, with 128-bit vectors.
#include "activation.h"
#include "engine.h"
#if BITPORT_ARM
#include "neon.h"
#define INLINE NEON_INLINE

namespace bitport {
namespace {

using V = float32x4_t;
constexpr int64_t kWidth = 4;

INLINE V all(float x) { return vdupq_n_f32(x); }
INLINE V madd(V a, V b, V c) { return vfmaq_f32(c, a, b); }
INLINE V smaller(V limit, V x) { return vminq_f32(limit, x); }   // a NaN in either is kept
INLINE V larger(V limit, V x) { return vmaxq_f32(limit, x); }
INLINE V size(V x) { return vabsq_f32(x); }
INLINE V fraction(V x) { return x - vrndmq_f32(x); }
INLINE V scaled(V v, V x) {   // through the exponent field of a normal number
  return v * vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtmq_s32_f32(x), vdupq_n_s32(127)), 23));
}
INLINE V over_one(V x) { return vdivq_f32(all(1.0f), x); }
INLINE V load_part(const void* numbers, int32_t type, int64_t i, int64_t count) {
  return load_some(numbers, type, i, count);
}

}  // namespace
}  // namespace bitport

#include "activation_vectors.h"

namespace bitport {

void neon_activate(const Following& f, float* sum, int64_t rows) { activate(f, sum, rows); }

}  // namespace bitport
#endif
