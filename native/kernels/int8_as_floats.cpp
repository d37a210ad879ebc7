// Rows of x rounded to int8, as bfloat16. With short groups, converting integer sums to floats takes longer than the
// products in tile registers; integers up to 256 are exact in bfloat16, so the same product can be computed by the
// bfloat16 tile instructions with scaled weights. These are rounded to bfloat16, as for x that is not rounded.
#include "buffer.h"
#include "int8.h"
#include "round.h"
#if BITPORT_X86
#include "avx512.h"
#endif

namespace bitport {

#if BITPORT_X86
namespace {

thread_local Buffer codes_buffer;

AVX512 void widen_codes(const int8_t* codes, int64_t k, int32_t zero, uint16_t* to) {
  const __m512i minus = _mm512_set1_epi32(zero);
  for (int64_t i = 0; i < k; i += 16) {
    const __mmask16 mask = k - i < 16 ? __mmask16((1u << (k - i)) - 1) : __mmask16(0xffff);
    const __m512i whole = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i)));
    const __m512i bits = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_sub_epi32(whole, minus)));
    _mm256_mask_storeu_epi16(to + i, mask, _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
  }
}

}  // namespace

bool int8_as_floats(const Product& p, int32_t act) {
  const int64_t group = p.weight.group;
  if (act == BITPORT_INT8_TENSOR || !p.weight.integer || p.isa != BITPORT_AMX || p.x_type != BITPORT_BF16 || group >= p.weight.k)
    return false;
  return group % 32 ? p.m > 8 : group == 32 && p.m > 24;   // measured; other groups do not fill steps of the int8 registers
}

bool round_row_to_int8(const Product& p, int32_t act, int64_t row, uint16_t* to, float* factor) {
  const Int8Engine& engine = int8_engine_for(p.isa, p.weight);
  const int64_t k = p.weight.k;
  int8_t* codes = reinterpret_cast<int8_t*>(codes_buffer.need(size_t(ceil_div(k, kInt8Step) * kInt8Step)));
  if (!codes) return false;
  const uint16_t* x = static_cast<const uint16_t*>(p.x) + row * k;
  float low, high;
  engine.range(x, BITPORT_BF16, k, &low, &high);
  const Rounding rounding = rounding_of(low, high, BITPORT_BF16, act);
  engine.round(x, BITPORT_BF16, k, rounding, codes, 0, kInt8Step);
  widen_codes(codes, k, int32_t(rounding.zero), to);
  *factor = rounding.scale;
  return true;
}
#else
bool int8_as_floats(const Product&, int32_t) { return false; }
bool round_row_to_int8(const Product&, int32_t, int64_t, uint16_t*, float*) { return false; }
#endif

}  // namespace bitport
