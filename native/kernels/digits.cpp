// A few rows of x in bfloat16 times whole numbers, in integers: x becomes 256 high + low, two digits of 8 bits, which
// the int8 product takes as two rows. What few rows cost is the turning of codes into something to multiply with, and
// bytes are nearer to codes than floats are.
//
// x is cut at 2^-14 of its largest number. Of K numbers that is less than the rounding of y to bfloat16 as long as
// sqrt(K) < 2^7, however large a single number is, and far less where none stands out.
#include <atomic>
#include <cmath>
#include "activation.h"
#include "buffer.h"
#include "int8.h"
#include "share.h"
#include "status.h"
#if BITPORT_X86
#include "int8_avx512.h"

namespace bitport {
namespace {

constexpr int64_t kMostRows = 4;

thread_local Buffer digits_buffer;

// The power of two by which the largest of k numbers stays below 2^15 - 128; 0 where one is not finite, or the power and
// its inverse would not both be normal.
AVX512 float unit_of(const uint16_t* x, int64_t k) {
  __m512i most = _mm512_setzero_si512();
  for (int64_t i = 0; i < k; i += 32) {
    const __mmask32 mask = k - i < 32 ? (1u << (k - i)) - 1 : ~0u;
    most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_maskz_loadu_epi16(mask, x + i), _mm512_set1_epi16(0x7fff)));
  }
  alignas(64) uint16_t each[32];
  _mm512_store_si512(each, most);
  uint16_t largest = 0;
  for (const uint16_t value : each) largest = value > largest ? value : largest;
  if (largest == 0) return 1;
  const int exponent = (largest >> 7) - 127;
  if (exponent < -112 || exponent > 127) return 0;
  const int shift = (largest & 0x7f) == 0x7f ? 13 : 14;   // 255 * 2^7 + 128 would be one too many for the high digit
  return std::ldexp(1.0f, exponent - shift);
}

// The digits of columns [from, to), whole units of 16 but for the end of the row, in two rows of steps that lie `next`
// bytes apart, and the sums of both.
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

// y of a row from the sums of both digits [2][32].
AVX512 void join(float* sum, float unit) {
  for (int64_t j = 0; j < 32; j += 16) {
    const __m512 high = _mm512_load_ps(sum + j), low = _mm512_load_ps(sum + 32 + j);
    const __m512 whole = _mm512_fmadd_ps(high, _mm512_set1_ps(256.0f), low);
    _mm512_store_ps(sum + j, _mm512_mul_ps(whole, _mm512_set1_ps(unit)));
  }
}

}  // namespace

bool takes_digits(const Product& p) {
  const int64_t most = p.weight.bits > 6 ? kMostRows : 2;   // measured; codes of few bits become floats by a permutation
  return p.m <= most && p.weight.integer && p.x_type == BITPORT_BF16 && p.isa >= BITPORT_AVX512_VNNI && p.weight.k > 0;
}

int32_t linear_digits(const Product& p, bool* taken) {
  const BitportTiles& w = p.weight;
  const uint16_t* x = static_cast<const uint16_t*>(p.x);
  float unit[kMostRows];
  for (int64_t row = 0; row < p.m; ++row)
    if ((unit[row] = unit_of(x + row * w.k, w.k)) == 0) { *taken = false; return kOk; }
  *taken = true;
  const int64_t digits = 2 * p.m, pieces = pieces_before(w, kInt32Columns, w.k);
  const size_t code_bytes = size_t(int8_steps(w) * digits * kInt8Step), sum_bytes = aligned(size_t(pieces * digits) * 4);
  char* memory = digits_buffer.need(code_bytes + sum_bytes + size_t(w.n) * 4);
  if (!memory) return kNoMemory;
  int8_t* codes = reinterpret_cast<int8_t*>(memory);
  float* sums = reinterpret_cast<float*>(memory + code_bytes);
  float* bias = p.bias ? reinterpret_cast<float*>(memory + code_bytes + sum_bytes) : nullptr;
  if (bias) avx512_widen(p.bias, p.y_type, w.n, bias);
  for (int64_t row = 0; row < p.m; ++row) {
    float* high = sums + row * 2 * pieces;
    for (int64_t k = 0; k < w.k; ++high) {
      const int64_t end = piece_end(w, kInt32Columns, k);
      split(x + row * w.k, k, end, unit[row], codes + row * 2 * kInt8Step, digits * kInt8Step, high, high + pieces);
      k = end;
    }
  }
  const Int8Job job{&w, codes, sums, digits, digits, kInt32Columns, pieces};
  const Activate activate = activate_for(p.isa);
  const int64_t tiles = tiles_of(w), piece = ceil_div(tiles, int64_t(p.threads) * 4);
  share(ceil_div(tiles, piece), p.threads, [&](int64_t i) {
    alignas(64) float sum[kMostRows * 2 * 32];
    for (int64_t tile = i * piece; tile < tiles && tile < (i + 1) * piece; ++tile) {
      const int64_t n = tile * 32, count = w.n - n < 32 ? w.n - n : 32;
      avx512_int8_fused(job, tile, nullptr, sum);
      for (int64_t row = 0; row < p.m; ++row) {
        float* own = sum + row * 64;
        const int64_t at = row * w.n + n;
        const uint16_t* factor = p.times ? static_cast<const uint16_t*>(p.times) + at : nullptr;
        join(own, unit[row]);
        if (p.then) activate({p.then, bias ? bias + n : nullptr, factor, BITPORT_BF16, w.n, count}, own, 1);
        avx512_store(own, count, bias && !p.then ? bias + n : nullptr, static_cast<uint16_t*>(p.y) + at, BITPORT_BF16);
      }
    }
  });
  return kOk;
}

}  // namespace bitport
#endif
