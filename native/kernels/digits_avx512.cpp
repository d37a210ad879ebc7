#include "digits.h"
#if BITPORT_X86
#include "int8_avx512.h"

namespace bitport {
namespace {

AVX512 uint16_t largest(const uint16_t* x, int64_t k) {
  __m512i most = _mm512_setzero_si512();
  for (int64_t i = 0; i < k; i += 32) {
    const __mmask32 mask = k - i < 32 ? (1u << (k - i)) - 1 : ~0u;
    most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_maskz_loadu_epi16(mask, x + i), _mm512_set1_epi16(0x7fff)));
  }
  alignas(64) uint16_t each[32];
  _mm512_store_si512(each, most);
  uint16_t found = 0;
  for (const uint16_t value : each) found = value > found ? value : found;
  return found;
}

AVX512 void split(const uint16_t* x, int64_t from, int64_t to, float unit, int8_t* codes, int64_t next, float* high_sum,
                  float* low_sum) {
  const __m512 inverse = _mm512_set1_ps(1.0f / unit);
  __m512i highs = _mm512_setzero_si512(), lows = highs;
  for (int64_t k = from; k < to; k += 16) {
    const __mmask16 mask = to - k < 16 ? __mmask16((1u << (to - k)) - 1) : __mmask16(0xffff);
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x + k)), 16);
    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(bits), inverse));
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
    const __m512i low = _mm512_sub_epi32(whole, _mm512_slli_epi32(high, 8));
    int8_t* at = codes + k / kInt8Step * next + k % kInt8Step;
    _mm_store_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtepi32_epi8(high));
    _mm_store_si128(reinterpret_cast<__m128i*>(at + kInt8Step), _mm512_cvtepi32_epi8(low));
    highs = _mm512_add_epi32(highs, high);
    lows = _mm512_add_epi32(lows, low);
  }
  *high_sum = float(_mm512_reduce_add_epi32(highs));
  *low_sum = float(_mm512_reduce_add_epi32(lows));
}

AVX512 void join(float* sum, float unit) {
  for (int64_t j = 0; j < 32; j += 16) {
    const __m512 high = _mm512_load_ps(sum + j), low = _mm512_load_ps(sum + 32 + j);
    const __m512 whole = _mm512_fmadd_ps(high, _mm512_set1_ps(256.0f), low);
    _mm512_store_ps(sum + j, _mm512_mul_ps(whole, _mm512_set1_ps(unit)));
  }
}

}  // namespace

const Digits avx512_digits = {avx512_engine, avx512_int8_fused, 0, kInt32Columns, largest, split, join};

}  // namespace bitport
#endif
