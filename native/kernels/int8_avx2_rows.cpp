// Rounding of rows of x to int8, and finishing of rows of y, with 256-bit vectors.
#include "int8.h"
#if BITPORT_X86
#include "int8_avx2.h"

namespace bitport {

AVX2 void avx2_int8_range(const void* x, int32_t type, int64_t count, float* low, float* high) {
  __m256 least = _mm256_setzero_ps(), most = least, odd = least;
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 v = load8(x, type, i);
    least = _mm256_min_ps(least, v);
    most = _mm256_max_ps(most, v);
    odd = _mm256_or_ps(odd, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  }
  alignas(32) float lows[8], highs[8];
  _mm256_store_ps(lows, least);
  _mm256_store_ps(highs, most);
  bool nan = _mm256_movemask_ps(odd);
  float lowest = 0, highest = 0;
  const auto take = [&](float small, float large) {
    if (small < lowest) lowest = small;
    if (large > highest) highest = large;
  };
  for (int j = 0; j < 8; ++j) take(lows[j], highs[j]);
  for (; i < count; ++i) {
    const float value = load_number(x, type, i);
    nan |= value != value;
    take(value, value);
  }
  *low = nan ? float_of_bits(0x7fc00000u) : lowest;
  *high = nan ? float_of_bits(0x7fc00000u) : highest;
}

AVX2 int32_t avx2_int8_round(const void* x, int32_t type, int64_t count, Rounding rounding, int8_t* to, int64_t from,
                             int64_t next) {
  const __m256 scale = _mm256_set1_ps(rounding.scale), zero = _mm256_set1_ps(rounding.zero);
  const __m256 most = _mm256_set1_ps(127), least = _mm256_set1_ps(-128);
  __m256i sum = _mm256_setzero_si256();
  for (int64_t i = 0, at = from; i < ceil_div(count, 16) * 16; i += 8, at += 8) {
    __m256 v;
    __m256i inside = _mm256_set1_epi32(-1);
    if (count - i >= 8) {
      v = load8(x, type, i);
    } else {
      alignas(32) float some[8] = {};
      alignas(32) int32_t which[8] = {};
      for (int64_t j = 0; i + j < count; ++j) { some[j] = load_number(x, type, i + j); which[j] = -1; }
      v = _mm256_load_ps(some);
      inside = _mm256_load_si256(reinterpret_cast<const __m256i*>(which));
    }
    __m256 steps = _mm256_div_ps(v, scale);
    steps = _mm256_and_ps(steps, _mm256_cmp_ps(steps, steps, _CMP_ORD_Q));   // NaN: 0
    steps = _mm256_add_ps(_mm256_round_ps(steps, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), zero);
    steps = _mm256_max_ps(least, _mm256_min_ps(most, steps));
    const __m256i codes = _mm256_and_si256(_mm256_cvtps_epi32(steps), inside);
    sum = _mm256_add_epi32(sum, codes);
    store_bytes(to + at / kInt8Step * next + at % kInt8Step, codes);
  }
  return sum_of(sum);
}

AVX2 void avx2_int8_finish(float* sum, const float* ones, Rounding rounding, int64_t count, const float* bias, void* y,
                           int32_t type, bool) {
  const __m256 scale = _mm256_set1_ps(rounding.scale), zero = _mm256_set1_ps(rounding.zero);
  for (int64_t j = 0; j < 32; j += 8) {
    __m256 v = _mm256_load_ps(sum + j);
    if (ones) v = _mm256_fnmadd_ps(zero, _mm256_load_ps(ones + j), v);
    _mm256_store_ps(sum + j, _mm256_mul_ps(v, scale));
  }
  avx2_engine.store(sum, count, bias, y, type);
}

}  // namespace bitport
#endif
