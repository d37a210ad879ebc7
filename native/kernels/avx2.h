// Shared by the files with 256-bit vectors: conversions, and reading the codes of a line (layout in bitport_kernels.h).
#pragma once
#include <immintrin.h>
#include "fetch.h"
#include "number.h"
#include "tiles.h"

#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define AVX2_MEMBER AVX2 __attribute__((always_inline)) inline
#define AVX2_INLINE AVX2 __attribute__((always_inline)) static inline

namespace bitport {

// float16 has the same fields as e4m3, but an exponent bias of 15, not 7.
AVX2_INLINE __m256 e4m3_of(__m128i bytes) {
  const __m128i codes = _mm_cvtepu8_epi16(bytes), size = _mm_and_si128(codes, _mm_set1_epi16(0x7f));
  const __m128i sign = _mm_slli_epi16(_mm_and_si128(codes, _mm_set1_epi16(0x80)), 8);
  const __m128i none = _mm_cmpeq_epi16(size, _mm_set1_epi16(0x7f));
  const __m128i half = _mm_blendv_epi8(_mm_slli_epi16(size, 7), _mm_set1_epi16(0x7e00), none);
  return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(half, sign)), _mm256_set1_ps(256.0f));
}

AVX2_INLINE __m256 e8m0_of(__m128i bytes) {
  const __m256i codes = _mm256_cvtepu8_epi32(bytes);   // exponents of float32; 0 and 255 are special
  const __m256i least = _mm256_cmpeq_epi32(codes, _mm256_setzero_si256());
  const __m256i none = _mm256_cmpeq_epi32(codes, _mm256_set1_epi32(255));
  const __m256i bits = _mm256_blendv_epi8(_mm256_slli_epi32(codes, 23), _mm256_set1_epi32(0x00400000), least);
  return _mm256_castsi256_ps(_mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7fc00000), none));
}

AVX2_INLINE __m256 load8(const void* p, int32_t type, int64_t i) {
  if (type == BITPORT_F32) return _mm256_loadu_ps(static_cast<const float*>(p) + i);
  if (type == BITPORT_BF16 || type == BITPORT_F16) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(p) + i));
    return type == BITPORT_F16 ? _mm256_cvtph_ps(half)
                               : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(static_cast<const uint8_t*>(p) + i));
  if (type == BITPORT_E8M0) return e8m0_of(bytes);
  if (type == BITPORT_E4M3) return e4m3_of(bytes);
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
}

// Rounds to bfloat16, to nearest even; a NaN stays one.
AVX2_INLINE __m128i bf16_of(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}

// The 64 codes of a line as bytes in the order of the layout: two columns of 16 rows, then the next two.
struct Line { __m256i pair[2]; };

AVX2_INLINE Line read_line(const uint8_t* tile, int32_t bits, int64_t line) {
  int below = 0;
  __m256i low = _mm256_setzero_si256(), high = low;
  if (bits & 8) {
    low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + line * 64));
    high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + line * 64 + 32));
  }
  if (bits & 4) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + line * 32));
    low = _mm256_and_si256(both, _mm256_set1_epi8(15));
    high = _mm256_and_si256(_mm256_srli_epi16(both, 4), _mm256_set1_epi8(15));
    tile += 16 * 32;
    below = 4;
  }
  if (bits & 2) {
    const __m256i times =
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(tile + line * 16)));
    const __m256i first = _mm256_srlv_epi64(times, _mm256_set_epi64x(2, 2, 0, 0));
    const __m256i second = _mm256_srlv_epi64(times, _mm256_set_epi64x(6, 6, 4, 4));
    low = _mm256_or_si256(low, _mm256_slli_epi64(_mm256_and_si256(first, _mm256_set1_epi8(3)), below));
    high = _mm256_or_si256(high, _mm256_slli_epi64(_mm256_and_si256(second, _mm256_set1_epi8(3)), below));
    tile += 16 * 16;
    below += 2;
  }
  if (bits & 1) {
    int64_t ones;
    __builtin_memcpy(&ones, tile + line * 8, 8);
    const __m256i own = _mm256_set1_epi64x(int64_t(0x8040201008040201));   // the bit of each code in its byte
    const __m256i bytes = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3,
                                           3, 3, 3, 3);
    const __m256i all = _mm256_set1_epi64x(ones), one = _mm256_set1_epi8(char(1 << below));
    const __m256i first = _mm256_and_si256(_mm256_shuffle_epi8(all, bytes), own);
    const __m256i second = _mm256_and_si256(_mm256_shuffle_epi8(all, _mm256_add_epi8(bytes, _mm256_set1_epi8(4))), own);
    low = _mm256_or_si256(low, _mm256_and_si256(_mm256_cmpeq_epi8(first, own), one));
    high = _mm256_or_si256(high, _mm256_and_si256(_mm256_cmpeq_epi8(second, own), one));
  }
  return {{low, high}};
}

}  // namespace bitport
