// The functions after a product, with 512-bit vectors.
#include "activation.h"
#include "engine.h"
#if BITPORT_X86
#include "avx512.h"
#define INLINE AVX512_INLINE

namespace bitport {
namespace {

using V = __m512;
constexpr int64_t kWidth = 16;

INLINE V all(float x) { return _mm512_set1_ps(x); }
INLINE V madd(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
INLINE V smaller(V limit, V x) { return _mm512_min_ps(limit, x); }   // returns the second operand if either is NaN
INLINE V larger(V limit, V x) { return _mm512_max_ps(limit, x); }
INLINE V size(V x) { return _mm512_abs_ps(x); }
INLINE V fraction(V x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
INLINE V scaled(V v, V x) { return _mm512_scalef_ps(v, x); }
INLINE V over_one(V x) {   // 14 bits, doubled by a Newton step
  const V near = _mm512_rcp14_ps(x);
  return near * _mm512_fnmadd_ps(near, x, all(2.0f));
}
INLINE V load_part(const void* numbers, int32_t type, int64_t i, int64_t count) {
  return i < count ? load_some(numbers, type, i, count) : all(0.0f);
}

}  // namespace
}  // namespace bitport

#include "activation_vectors.h"

namespace bitport {

AVX512 void avx512_activate(const Following& f, float* sum, int64_t rows) { activate(f, sum, rows); }

}  // namespace bitport
#endif
