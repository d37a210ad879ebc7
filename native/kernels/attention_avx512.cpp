// Attention over a panel, with 512-bit vectors.
#include "attention.h"
#include "engine.h"
#if BITPORT_X86
#include "avx512.h"
#define INLINE AVX512_INLINE
#define TARGET AVX512

namespace bitport {
namespace {

using V = __m512;
constexpr int64_t kWidth = 16;

INLINE V all(float x) { return _mm512_set1_ps(x); }
INLINE V load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store(float* p, V v) { _mm512_storeu_ps(p, v); }
INLINE V madd(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
INLINE V larger(V limit, V x) { return _mm512_max_ps(limit, x); }   // returns the second operand if either is NaN
INLINE V whole(V x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE V two_to(V x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(x), _mm512_set1_epi32(127)), 23));
}

// Within lanes of four floats: each step adds two vectors pairwise, until four have become one.
INLINE V four(V a, V b, V c, V d) {
  const V ab = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b), cd = _mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d);
  const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
  return _mm512_castpd_ps(_mm512_unpacklo_pd(x, y)) + _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
}
INLINE V sums(const V* v) {
  const V a = four(v[0], v[1], v[2], v[3]), b = four(v[4], v[5], v[6], v[7]);
  const V c = four(v[8], v[9], v[10], v[11]), d = four(v[12], v[13], v[14], v[15]);
  const V ab = _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
  const V cd = _mm512_shuffle_f32x4(c, d, 0x88) + _mm512_shuffle_f32x4(c, d, 0xdd);
  return _mm512_shuffle_f32x4(ab, cd, 0x88) + _mm512_shuffle_f32x4(ab, cd, 0xdd);
}
INLINE float sum_of(V v) { return _mm512_reduce_add_ps(v); }
INLINE float most_of(V v) { return _mm512_reduce_max_ps(v); }

template <Kind Of>
INLINE V numbers(const uint8_t* codes) {
  if constexpr (Of == kE4M3) return load16(codes, BITPORT_E4M3, 0);
  if constexpr (Of == kInt8) return load16(codes, BITPORT_U8, 0);
  if constexpr (Of == kInt4) {   // a byte per 64 bits: its nibbles go to both double words
    const __m512i pairs = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    const __m512i apart = _mm512_or_si512(pairs, _mm512_slli_epi64(pairs, 28));
    return _mm512_cvtepi32_ps(_mm512_and_si512(apart, _mm512_set1_epi32(15)));
  }
  int32_t word;   // 16 codes
  __builtin_memcpy(&word, codes, 4);
  const __m512i places = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srlv_epi32(_mm512_set1_epi32(word), places), _mm512_set1_epi32(3)));
}

}  // namespace
}  // namespace bitport

#include "attention_vectors.h"

namespace bitport {

extern const Attending avx512_attending;
const Attending avx512_attending{{decode<kInt2>, decode<kInt4>, decode<kInt8>, decode<kE4M3>}, score, largest, weigh, mix};

}  // namespace bitport
#endif
