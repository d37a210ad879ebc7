// Rounding of rows of x to int8, and finishing of rows of y, with 512-bit vectors.
#include "int8.h"
#if BITPORT_X86
#include "int8_avx512.h"

namespace bitport {
AVX512 void avx512_int8_range(const void* x, int32_t type, int64_t count, float* low, float* high) {
  __m512 least = _mm512_setzero_ps(), most = _mm512_setzero_ps();
  __mmask16 nan = 0;
  for (int64_t i = 0; i < count; i += 16) {
    const __m512 v = load_some(x, type, i, count);
    least = _mm512_min_ps(least, v);
    most = _mm512_max_ps(most, v);
    nan |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  }
  *low = nan ? float_of_bits(0x7fc00000u) : _mm512_reduce_min_ps(least);
  *high = nan ? float_of_bits(0x7fc00000u) : _mm512_reduce_max_ps(most);
}

// Multiplication by the reciprocal yields the same code as division unless x / scale is near the midpoint between two
// codes: it is off by less than 3 * 2^-24 of at most 256 steps. Only there, and if the reciprocal is not a normal
// number, divide.
AVX512 int32_t avx512_int8_round(const void* x, int32_t type, int64_t count, Rounding rounding, int8_t* to,
                                 int64_t from, int64_t next) {
  const float size = rounding.scale < 0 ? -rounding.scale : rounding.scale;
  const bool normal = size >= 0x1p-126f && size <= 0x1p126f;
  const __m512 scale = _mm512_set1_ps(rounding.scale);
  const __m512 reciprocal = _mm512_set1_ps(normal ? 1 / rounding.scale : float_of_bits(0x7fc00000u));
  const __m512 most = _mm512_set1_ps(1024), least = _mm512_set1_ps(-1024), clear = _mm512_set1_ps(0.4998f);
  const __m512i zero = _mm512_set1_epi32(int32_t(rounding.zero));
  constexpr int kToInteger = 8;   // x minus the nearest integer, no exceptions
  __m512i sum = _mm512_setzero_si512();
  for (int64_t i = 0, at = from; i < count; i += 16, at += 16) {
    const __m512 v = load_some(x, type, i, count);
    __m512 steps = _mm512_mul_ps(v, reciprocal);
    const __m512 off = _mm512_abs_ps(_mm512_reduce_ps(steps, kToInteger));
    if (_mm512_cmp_ps_mask(off, clear, _CMP_NLT_UQ)) steps = _mm512_div_ps(v, scale);
    const __mmask16 number = _mm512_cmp_ps_mask(steps, steps, _CMP_ORD_Q);
    steps = _mm512_max_ps(least, _mm512_min_ps(most, steps));
    __m512i codes = _mm512_maskz_cvt_roundps_epi32(number, steps, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    codes = _mm512_add_epi32(codes, zero);
    codes = _mm512_min_epi32(_mm512_max_epi32(codes, _mm512_set1_epi32(-128)), _mm512_set1_epi32(127));
    if (count - i < 16) codes = _mm512_maskz_mov_epi32(__mmask16((1u << (count - i)) - 1), codes);
    sum = _mm512_add_epi32(sum, codes);
    _mm_store_si128(reinterpret_cast<__m128i*>(to + at / kInt8Step * next + at % kInt8Step),
                    _mm512_cvtepi32_epi8(codes));
  }
  return _mm512_reduce_add_epi32(sum);
}

AVX512 void avx512_int8_finish(float* sum, const float* ones, Rounding rounding, int64_t count, const float* bias,
                               void* y, int32_t type, bool stream) {
  const __m512 scale = _mm512_set1_ps(rounding.scale), zero = _mm512_set1_ps(rounding.zero);
  for (int64_t j = 0; j < 32; j += 16) {
    __m512 v = _mm512_load_ps(sum + j);
    if (ones) v = _mm512_fnmadd_ps(zero, _mm512_load_ps(ones + j), v);
    _mm512_store_ps(sum + j, _mm512_mul_ps(v, scale));
  }
  if (stream) avx512_stream(sum, bias, y, type);
  else avx512_store(sum, count, bias, y, type);
}

}  // namespace bitport
#endif
