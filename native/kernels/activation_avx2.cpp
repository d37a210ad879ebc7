// The functions after a product, with 256-bit vectors.
#include "activation.h"
#include "engine.h"
#if BITPORT_X86
#include "avx2.h"
#define INLINE AVX2_INLINE

namespace bitport {
namespace {

using V = __m256;
constexpr int64_t kWidth = 8;

INLINE V all(float x) { return _mm256_set1_ps(x); }
INLINE V madd(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
INLINE V smaller(V limit, V x) { return _mm256_min_ps(limit, x); }   // returns the second operand if either is NaN
INLINE V larger(V limit, V x) { return _mm256_max_ps(limit, x); }
INLINE V size(V x) { return _mm256_andnot_ps(all(-0.0f), x); }
INLINE V fraction(V x) { return x - _mm256_floor_ps(x); }
INLINE V scaled(V v, V x) {   // through the exponent field of a normal number
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(_mm256_floor_ps(x)), _mm256_set1_epi32(127));
  return v * _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
INLINE V over_one(V x) { return _mm256_div_ps(all(1.0f), x); }
INLINE V load_part(const void* numbers, int32_t type, int64_t i, int64_t count) {
  if (count - i >= 8) return load8(numbers, type, i);
  alignas(32) float part[8] = {};
  for (int64_t j = i; j < count; ++j) part[j - i] = load_number(numbers, type, j);
  return _mm256_load_ps(part);
}

}  // namespace
}  // namespace bitport

#include "activation_vectors.h"

namespace bitport {

AVX2 void avx2_activate(const Following& f, float* sum, int64_t rows) { activate(f, sum, rows); }

}  // namespace bitport
#endif
