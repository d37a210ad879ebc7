// The product with int8 inputs with 256-bit vectors, in parts.
#pragma once
#include "avx2.h"
#include "int8.h"

namespace bitport {

constexpr int64_t kInt8Stretch = 256;   // columns: a panel of 8 KiB, or 16 if codes have more than 4 bits

AVX2_INLINE int32_t sum_of(__m256i v) {
  alignas(32) int32_t each[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(each), v);
  return ((each[0] + each[1]) + (each[2] + each[3])) + ((each[4] + each[5]) + (each[6] + each[7]));
}

AVX2_INLINE void store_bytes(int8_t* to, __m256i words) {   // 8 32-bit integers
  const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(half, half));
}

// Parts of Int8Engine; few rows by Digits too.
void avx2_int8_range(const void* x, int32_t type, int64_t count, float* low, float* high);
int32_t avx2_int8_round(const void* x, int32_t type, int64_t count, Rounding rounding, int8_t* to, int64_t from,
                        int64_t next);
void avx2_int8_finish(float* sum, const float* ones, Rounding rounding, int64_t count, const float* bias, void* y,
                      int32_t type, bool stream);
void avx2_int8_fused(const Int8Job& job, int64_t tile, void* panel, float* sum);

}  // namespace bitport
