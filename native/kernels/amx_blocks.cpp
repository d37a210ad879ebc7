// The product with AMX where a scale of x holds for 128 columns.
#include "engine.h"
#if BITPORT_X86
#include "amx.h"
#include "avx512_bf16.h"

namespace bitport {
namespace {

// 32 rows (or 16) over a stretch of K. All of them are multiplied, whether x has them or not; `rows` are added.
template <bool Two>
AMX_INLINE void multiply_block(const uint16_t* x, int64_t rows, int64_t count, const uint16_t* panel,
                               const float* row_scale, int64_t scales, float* sum) {
  const float* scale = reinterpret_cast<const float*>(panel + kBlocksPanel);
  alignas(64) float part[32 * 32];
  Nothing nothing;
  for (int64_t k = 0; k < count; ++row_scale, scale += 32) {
    zero_sums<Two>();
    asm volatile("" ::: "memory");   // g++ 12 does not see that loads of tiles read memory
    for (const int64_t end = k + kScaled < count ? k + kScaled : count; k < end; k += 32, x += 1024, panel += 1024)
      multiply_step<Floats, Two>(x, panel, 1024, Stay{}, nothing);
    store_sums<Two>(part);
    const __m512 s0 = _mm512_load_ps(scale), s1 = _mm512_load_ps(scale + 16);
    for (int64_t r = 0; r < rows; ++r) {
      const __m512 times = _mm512_set1_ps(row_scale[r * scales]);
      float* to = sum + r * 32;
      const __m512 p0 = _mm512_mul_ps(_mm512_load_ps(part + r * 32), s0);
      const __m512 p1 = _mm512_mul_ps(_mm512_load_ps(part + r * 32 + 16), s1);
      _mm512_store_ps(to, _mm512_fmadd_ps(p0, times, _mm512_load_ps(to)));
      _mm512_store_ps(to + 16, _mm512_fmadd_ps(p1, times, _mm512_load_ps(to + 16)));
    }
  }
}

AMX void multiply(const Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum) {
  const int64_t scales = ceil_div(job.weight->k, kScaled);
  const uint16_t* weights = static_cast<const uint16_t*>(panel.data);
  if (panel.k == 0) std::memset(sum, 0, size_t(rows) * 128);
  for (int64_t r = 0; r < rows; r += 32) {
    const int64_t part = rows - r < 32 ? rows - r : 32;
    const uint16_t* x = static_cast<const uint16_t*>(job.rows) + job.at(row + r, panel.k);
    const float* scale = job.scales + (row + r) * scales + panel.k / kScaled;
    if (part > 16) multiply_block<true>(x, part, panel.count, weights, scale, scales, sum + r * 32);
    else multiply_block<false>(x, part, panel.count, weights, scale, scales, sum + r * 32);
  }
}

void begin() { amx_engine.begin(); }
void end() { amx_engine.end(); }

}  // namespace

const Engine amx_blocks_engine = {
    true, kBlocksDepth, kUsual, avx512_widen, avx512_decode_blocks, nullptr, nullptr, multiply, nullptr, nullptr, nullptr, avx512_store, avx512_stream, begin, end};

}  // namespace bitport
#endif
