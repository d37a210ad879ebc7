// The product with 256-bit vectors, in float32: for x of every type on machines without AVX-512.
#include "engine.h"
#if BITPORT_X86
#include "avx2.h"

namespace bitport {
namespace {

AVX2 void widen(const void* from, int32_t type, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) _mm256_storeu_ps(to + i, load8(from, type, i));
  for (; i < count; ++i) to[i] = load_number(from, type, i);
}

// What codes mean: a permutation knows 8 entries, bit 3 of a code picks between two of them; longer tables are gathered.
struct Meaning {
  __m256 low, high;
  const float* table;   // null for up to 16 entries
};

AVX2_INLINE Meaning meaning(const BitportTiles& w) {
  alignas(32) float first[16];
  for (int i = 0; i < 16; ++i) first[i] = w.table[i & ((1 << w.bits) - 1)];
  return {_mm256_load_ps(first), _mm256_load_ps(first + 8), w.bits > 4 ? w.table : nullptr};
}

AVX2_INLINE __m256 look_up(__m256i codes, const Meaning& m) {
  if (m.table) return _mm256_i32gather_ps(m.table, codes, 4);
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(m.low, codes), _mm256_permutevar8x32_ps(m.high, codes),
                          _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
}

// panel [count][32]
AVX2 void decode(const BitportTiles& w, const Panel& panel) {
  const auto [tile, k, count, data] = panel;
  const Meaning table = meaning(w);
  const int64_t groups = groups_of(w);
  const __m256i byte = _mm256_set1_epi32(255);
  for (int64_t step = k / 32; step < (k + count) / 32; ++step) {
    const uint8_t* codes = tile_at(w, tile, step);
    for (int64_t column = 0; column < 32; column += 16)
      for (int64_t part = 0; part < 4; ++part) {   // 8 rows
        const int64_t at = (tile * groups + group_of(w, step * 32 + column)) * 32 + part * 8;
        const __m256 scale = load8(w.scale, w.scale_type, at);
        const __m256 shift = w.zero ? _mm256_sub_ps(load8(w.zero, w.zero_type, at), _mm256_set1_ps(middle(w)))
                                    : _mm256_setzero_ps();
        float* to = static_cast<float*>(data) + (step * 32 + column - k) * 32 + part * 8;
        for (int64_t line = part / 2 * 8 + column / 4, end = line + 4; line < end; ++line, to += 128) {
          alignas(32) uint8_t bytes[64];
          read_codes(codes, w.bits, line, bytes);
          for (int64_t pair = 0; pair < 2; ++pair) {   // of columns
            const __m256i lanes = _mm256_cvtepu16_epi32(
                _mm_load_si128(reinterpret_cast<const __m128i*>(bytes + pair * 32 + part % 2 * 16)));
            const __m256 even = look_up(_mm256_and_si256(lanes, byte), table);
            const __m256 odd = look_up(_mm256_srli_epi32(lanes, 8), table);
            _mm256_store_ps(to + pair * 64, _mm256_mul_ps(_mm256_sub_ps(even, shift), scale));
            _mm256_store_ps(to + pair * 64 + 32, _mm256_mul_ps(_mm256_sub_ps(odd, shift), scale));
          }
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

AVX2 void multiply(const Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum) {
  if (panel.k == 0) std::memset(sum, 0, size_t(rows) * 128);
  const float* weights = static_cast<const float*>(panel.data);
  const int64_t stride = job.block * 32;
  for (int64_t r = 0; r < rows;) {
    const int64_t line = (row + r) % job.block;
    const float* x = static_cast<const float*>(job.rows) + job.at(row + r, panel.k);
    const bool three = rows - r >= 3 && job.block - line >= 3, two = rows - r >= 2 && job.block - line >= 2;
    if (three) multiply_rows<3>(x, stride, panel.count / 32, weights, sum + r * 32);
    else if (two) multiply_rows<2>(x, stride, panel.count / 32, weights, sum + r * 32);
    else multiply_rows<1>(x, stride, panel.count / 32, weights, sum + r * 32);
    r += three ? 3 : two ? 2 : 1;
  }
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

const Engine avx2_engine = {false, 256, kUsual, widen, decode, nullptr, nullptr, multiply, nullptr, nullptr, nullptr, store, nullptr, nullptr, nullptr};

}  // namespace bitport
#endif
