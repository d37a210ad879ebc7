// What follows a product, with 256-bit vectors.
#include "activation.h"
#include "engine.h"
#if BITPORT_X86
#include "avx2.h"
#define INLINE AVX2_INLINE

namespace bitport {
namespace {

using F = __m256;
constexpr int64_t kWidth = 8;

INLINE F all(float x) { return _mm256_set1_ps(x); }
INLINE F madd(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
INLINE F smaller(F limit, F x) { return _mm256_min_ps(limit, x); }   // of a NaN and a number the second is taken
INLINE F larger(F limit, F x) { return _mm256_max_ps(limit, x); }
INLINE F size(F x) { return _mm256_andnot_ps(all(-0.0f), x); }
INLINE F whole(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE F power(F n) {   // the exponent of a normal number
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
INLINE F over_one(F x) { return _mm256_div_ps(all(1.0f), x); }
INLINE F load_part(const void* numbers, int32_t type, int64_t i, int64_t count) {
  if (count - i >= 8) return load8(numbers, type, i);
  alignas(32) float part[8] = {};
  for (int64_t j = i; j < count; ++j) part[j - i] = load_number(numbers, type, j);
  return _mm256_load_ps(part);
}

}  // namespace
}  // namespace bitport

#include "activation_vectors.h"

namespace bitport {

AVX2 void avx2_activate(int32_t then, float* sum, const float* bias, const void* times, int32_t type, int64_t count) {
  activate(then, sum, bias, times, type, count);
}

}  // namespace bitport
#endif
