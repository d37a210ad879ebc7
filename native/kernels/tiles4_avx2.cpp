// The product with 256-bit vectors, in float32: for x of every type on machines without AVX-512.
#include "engine.h"
#if BITPORT_X86
#include <immintrin.h>
#include "number.h"

#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define AVX2_INLINE AVX2 __attribute__((always_inline)) static inline

namespace bitport {
namespace {

AVX2_INLINE __m256 load8(const void* p, int32_t type, int64_t i) {
  switch (type) {
    case BITPORT_F32: return _mm256_loadu_ps(static_cast<const float*>(p) + i);
    case BITPORT_BF16: {
      const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(p) + i));
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    }
    case BITPORT_F16:
      return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(p) + i)));
    default: {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(static_cast<const uint8_t*>(p) + i));
      return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
    }
  }
}

AVX2 void widen(const void* from, int32_t type, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) _mm256_storeu_ps(to + i, load8(from, type, i));
  for (; i < count; ++i) to[i] = load_number(from, type, i);
}

// table[index & 15]: a permutation knows 8 entries, bit 3 picks between two of them.
AVX2_INLINE __m256 look_up(__m256i index, __m256 low, __m256 high) {
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index), _mm256_permutevar8x32_ps(high, index),
                          _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}

// panel [count][32]. Two bytes of a row, as one lane, are its columns 0, 2, 1, 3 of the line from the low nibble up.
AVX2 void decode(const BitportTiles4& w, int64_t tile, int64_t k, int64_t count, void* panel) {
  const __m256 low = _mm256_loadu_ps(w.table), high = _mm256_loadu_ps(w.table + 8);
  for (int64_t step = k / 32; step < (k + count) / 32; ++step) {
    const uint8_t* codes = w.codes + (tile * (w.k / 32) + step) * 512;
    const int64_t group = (tile * (w.k / w.group) + step * 32 / w.group) * 32;
    for (int64_t part = 0; part < 4; ++part) {   // 8 rows
      const __m256 scale = load8(w.scale, w.scale_type, group + part * 8);
      const __m256 zero =
          w.zero ? _mm256_sub_ps(load8(w.zero, w.zero_type, group + part * 8), _mm256_set1_ps(8.0f)) : _mm256_setzero_ps();
      float* to = static_cast<float*>(panel) + (step * 32 - k) * 32 + part * 8;
      const uint8_t* from = codes + part / 2 * 256 + part % 2 * 16;
      for (int64_t line = 0; line < 8; ++line, from += 32, to += 128) {
        const __m256i pairs = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
        const __m256 c0 = look_up(pairs, low, high), c2 = look_up(_mm256_srli_epi32(pairs, 4), low, high);
        const __m256 c1 = look_up(_mm256_srli_epi32(pairs, 8), low, high);
        const __m256 c3 = look_up(_mm256_srli_epi32(pairs, 12), low, high);
        _mm256_store_ps(to, _mm256_mul_ps(_mm256_sub_ps(c0, zero), scale));
        _mm256_store_ps(to + 32, _mm256_mul_ps(_mm256_sub_ps(c1, zero), scale));
        _mm256_store_ps(to + 64, _mm256_mul_ps(_mm256_sub_ps(c2, zero), scale));
        _mm256_store_ps(to + 96, _mm256_mul_ps(_mm256_sub_ps(c3, zero), scale));
      }
    }
  }
}

template <int R>
AVX2_INLINE void multiply_rows(const float* x, int64_t stride, int64_t steps, const float* panel, float* sum) {
  __m256 a[R][4];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < 4; ++j) a[r][j] = _mm256_load_ps(sum + r * 32 + j * 8);
  for (int64_t step = 0; step < steps; ++step, x += stride)
    for (int64_t i = 0; i < 32; ++i, panel += 32)
      for (int r = 0; r < R; ++r) {
        const __m256 value = _mm256_broadcast_ss(x + r * 32 + i);
        for (int j = 0; j < 4; ++j) a[r][j] = _mm256_fmadd_ps(value, _mm256_load_ps(panel + j * 8), a[r][j]);
      }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < 4; ++j) _mm256_store_ps(sum + r * 32 + j * 8, a[r][j]);
}

AVX2 void multiply(const Job& job, int64_t row, int64_t rows, int64_t k, int64_t count, const void* panel, float* sum) {
  const float* weights = static_cast<const float*>(panel);
  const int64_t stride = job.block * 32;
  for (int64_t r = 0; r < rows;) {
    const int64_t block = (row + r) / job.block, line = (row + r) % job.block;
    const float* x =
        static_cast<const float*>(job.rows) + (block * (job.weight->k / 32) + k / 32) * stride + line * 32;
    const bool three = rows - r >= 3 && job.block - line >= 3, two = rows - r >= 2 && job.block - line >= 2;
    if (three) multiply_rows<3>(x, stride, count / 32, weights, sum + r * 32);
    else if (two) multiply_rows<2>(x, stride, count / 32, weights, sum + r * 32);
    else multiply_rows<1>(x, stride, count / 32, weights, sum + r * 32);
    r += three ? 3 : two ? 2 : 1;
  }
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

AVX2 void store(const float* sum, int64_t count, const float* bias, void* y, int32_t type) {
  int64_t j = 0;
  for (; j + 8 <= count; j += 8) {
    __m256 v = _mm256_load_ps(sum + j);
    if (bias) v = _mm256_add_ps(v, _mm256_loadu_ps(bias + j));
    if (type == BITPORT_F32) {
      _mm256_storeu_ps(static_cast<float*>(y) + j, v);
    } else {
      const __m128i half = type == BITPORT_BF16 ? bf16_of(v) : _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<uint16_t*>(y) + j), half);
    }
  }
  for (; j < count; ++j) store_number(bias ? sum[j] + bias[j] : sum[j], y, type, j);
}

}  // namespace

const Engine avx2_engine = {false, 256, 0, widen, decode, multiply, nullptr, store, nullptr, nullptr};

}  // namespace bitport
#endif
