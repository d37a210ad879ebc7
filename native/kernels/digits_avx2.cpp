#include "digits.h"
#if BITPORT_X86
#include "int8_avx2.h"

namespace bitport {
namespace {

AVX2 uint16_t largest(const uint16_t* x, int64_t k) {
  const __m256i size = _mm256_set1_epi16(0x7fff);
  __m256i most = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 16 <= k; i += 16)
    most = _mm256_max_epu16(most, _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i)), size));
  alignas(32) uint16_t each[16];
  _mm256_store_si256(reinterpret_cast<__m256i*>(each), most);
  uint16_t found = 0;
  for (const uint16_t value : each) found = value > found ? value : found;
  for (; i < k; ++i) found = (x[i] & 0x7fff) > found ? x[i] & 0x7fff : found;
  return found;
}

AVX2 void split(const uint16_t* x, int64_t from, int64_t to, float unit, int8_t* codes, int64_t next, float* high_sum,
                float* low_sum) {
  const __m256 inverse = _mm256_set1_ps(1.0f / unit);
  __m256i highs = _mm256_setzero_si256(), lows = highs;
  for (int64_t k = from; k < from + ceil_div(to - from, 16) * 16; k += 8) {
    alignas(16) uint16_t some[8] = {};
    if (to - k < 8)
      for (int64_t i = k; i < to; ++i) some[i - k] = x[i];
    const __m256 values = load8(to - k < 8 ? some : x + k, BITPORT_BF16, 0);
    const __m256i whole = _mm256_cvtps_epi32(_mm256_mul_ps(values, inverse));
    const __m256i high = _mm256_srai_epi32(_mm256_add_epi32(whole, _mm256_set1_epi32(128)), 8);
    const __m256i low = _mm256_sub_epi32(whole, _mm256_slli_epi32(high, 8));
    int8_t* at = codes + k / kInt8Step * next + k % kInt8Step;
    store_bytes(at, high);
    store_bytes(at + kInt8Step, low);
    highs = _mm256_add_epi32(highs, high);
    lows = _mm256_add_epi32(lows, low);
  }
  *high_sum = float(sum_of(highs));
  *low_sum = float(sum_of(lows));
}

AVX2 void join(float* sum, float unit) {
  for (int64_t j = 0; j < 32; j += 8) {
    const __m256 high = _mm256_load_ps(sum + j), low = _mm256_load_ps(sum + 32 + j);
    const __m256 whole = _mm256_fmadd_ps(high, _mm256_set1_ps(256.0f), low);
    _mm256_store_ps(sum + j, _mm256_mul_ps(whole, _mm256_set1_ps(unit)));
  }
}

}  // namespace

const Digits avx2_digits = {avx2_engine, avx2_int8_fused, kInt8Stretch * 2 * 32, kInt8Stretch, largest, split, join};

}  // namespace bitport
#endif
