// Attention over a panel, with 256-bit vectors.
#include "attention.h"
#include "engine.h"
#if BITPORT_X86
#include "avx2.h"
#define INLINE AVX2_INLINE
#define TARGET AVX2

namespace bitport {
namespace {

using V = __m256;
constexpr int64_t kWidth = 8;

INLINE V all(float x) { return _mm256_set1_ps(x); }
INLINE V load(const float* p) { return _mm256_loadu_ps(p); }
INLINE void store(float* p, V v) { _mm256_storeu_ps(p, v); }
INLINE V madd(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
INLINE V larger(V limit, V x) { return _mm256_max_ps(limit, x); }   // returns the second operand if either is NaN
INLINE V whole(V x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE V two_to(V x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127)), 23));
}
INLINE V four(V a, V b, V c, V d) { return _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d)); }
INLINE V sums(const V* v) {
  const V a = four(v[0], v[1], v[2], v[3]), b = four(v[4], v[5], v[6], v[7]);
  return _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31);
}
INLINE float sum_of(V v) {
  const __m128 half = _mm256_castps256_ps128(v) + _mm256_extractf128_ps(v, 1), pair = half + _mm_movehl_ps(half, half);
  return _mm_cvtss_f32(pair + _mm_movehdup_ps(pair));
}
INLINE float most_of(V v) {
  const __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ps(pair, _mm_movehdup_ps(pair)));
}

template <Kind Of>
INLINE V numbers(const uint8_t* codes) {
  if constexpr (Of == kE4M3 || Of == kInt8) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
    if constexpr (Of == kInt8) return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
    return e4m3_of(bytes);
  }
  constexpr int kBits = Of == kInt4 ? 4 : 2;
  uint32_t word = 0;   // 8 codes
  __builtin_memcpy(&word, codes, kBits);
  const __m256i places = _mm256_mullo_epi32(_mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0), _mm256_set1_epi32(kBits));
  const __m256i found = _mm256_srlv_epi32(_mm256_set1_epi32(int32_t(word)), places);
  return _mm256_cvtepi32_ps(_mm256_and_si256(found, _mm256_set1_epi32((1 << kBits) - 1)));
}

}  // namespace
}  // namespace bitport

#include "attention_vectors.h"

namespace bitport {

extern const Attending avx2_attending;
const Attending avx2_attending{{decode<kInt2>, decode<kInt4>, decode<kInt8>, decode<kE4M3>}, score, largest, weigh, mix};

}  // namespace bitport
#endif
