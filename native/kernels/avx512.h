// What the files for 512-bit vectors share.
#pragma once
#include <immintrin.h>
#include "number.h"

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")))
#define AVX512_INLINE AVX512 __attribute__((always_inline)) static inline

namespace bitport {

AVX512_INLINE __m512 load16(const void* p, int32_t type, int64_t i) {
  switch (type) {
    case BITPORT_F32: return _mm512_loadu_ps(static_cast<const float*>(p) + i);
    case BITPORT_BF16: {
      const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(p) + i));
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }
    case BITPORT_F16:
      return _mm512_cvtph_ps(
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(p) + i)));
    default: {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint8_t*>(p) + i));
      return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
    }
  }
}

// What turns 16 rows of table values into weights: (value - zero) * scale, where zero is less its 8.
struct Affine { __m512 scale, zero; };

AVX512_INLINE Affine affine(const BitportTiles4& w, int64_t at) {
  return {load16(w.scale, w.scale_type, at),
          w.zero ? _mm512_sub_ps(load16(w.zero, w.zero_type, at), _mm512_set1_ps(8.0f)) : _mm512_setzero_ps()};
}

}  // namespace bitport
