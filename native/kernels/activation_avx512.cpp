// What follows a product, with 512-bit vectors.
#include "activation.h"
#include "engine.h"
#if BITPORT_X86
#include "avx512.h"
#define INLINE AVX512_INLINE

namespace bitport {
namespace {

using F = __m512;
constexpr int64_t kWidth = 16;

INLINE F all(float x) { return _mm512_set1_ps(x); }
INLINE F madd(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
INLINE F smaller(F limit, F x) { return _mm512_min_ps(limit, x); }   // of a NaN and a number the second is taken
INLINE F larger(F limit, F x) { return _mm512_max_ps(limit, x); }
INLINE F size(F x) { return _mm512_abs_ps(x); }
INLINE F whole(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE F power(F n) { return _mm512_scalef_ps(all(1.0f), n); }
INLINE F over_one(F x) {   // 14 bits, doubled by a step of Newton's
  const F near = _mm512_rcp14_ps(x);
  return near * _mm512_fnmadd_ps(near, x, all(2.0f));
}
INLINE F load_part(const void* numbers, int32_t type, int64_t i, int64_t count) {
  return load_some(numbers, type, i, count);
}

}  // namespace
}  // namespace bitport

#include "activation_vectors.h"

namespace bitport {

AVX512 void avx512_activate(int32_t then, float* sum, const float* bias, const void* times, int32_t type, int64_t count) {
  activate(then, sum, bias, times, type, count);
}

}  // namespace bitport
#endif
