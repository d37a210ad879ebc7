// The product with AMX: 16 x 16 float32 sums in a tile register, 16 x 32 bfloat16 of x times 32 x 16 of the weight a step.
#include "engine.h"
#if BITPORT_X86
#include "avx512.h"
#include "avx512_bf16.h"

#define AMX __attribute__((target(AVX512_TARGET ",avx512bf16,amx-tile,amx-bf16")))
#define AMX_INLINE AMX __attribute__((always_inline)) static inline

namespace bitport {
namespace {

// Tiles 0..3 hold sums, 4 and 5 two times 16 rows of x, 6 and 7 two times 16 rows of the weight.
AMX void configure(int64_t rows0, int64_t rows1) {
  struct __attribute__((packed)) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int i = 0; i < 8; ++i) config.bytes[i] = 64;
  config.rows[0] = config.rows[1] = config.rows[4] = uint8_t(rows0);
  config.rows[2] = config.rows[3] = config.rows[5] = uint8_t(rows1);
  config.rows[6] = config.rows[7] = 16;
  asm volatile("" ::"r"(&config) : "memory");   // g++ 12 does not see that the next line reads it
  _tile_loadconfig(&config);
}

AMX void begin() { configure(16, 16); }
AMX void end() { _tile_release(); }

// 32 rows of sums (or 16) over a stretch of K; x and panel advance by what one step of 32 columns takes.
template <bool Two>
AMX_INLINE void multiply_block(const uint16_t* x, int64_t stride, const uint16_t* panel, int64_t steps) {
  asm volatile("" ::: "memory");   // g++ 12 does not see that loads of tiles read memory
  for (int64_t step = 0; step < steps; ++step, x += stride, panel += 1024) {
    _tile_loadd(6, panel, 64);
    _tile_loadd(4, x, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + 512, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (Two) {
      _tile_loadd(5, x + 512, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

AMX void multiply(const Job& job, int64_t row, int64_t rows, int64_t k, int64_t count, const void* panel, float* sum) {
  const uint16_t* weights = static_cast<const uint16_t*>(panel);
  for (int64_t r = 0; r < rows; r += 32, sum += 1024) {
    const int64_t step = (row + r) / 32 * (steps_of(*job.weight)) + k / 32;
    const uint16_t* x = static_cast<const uint16_t*>(job.rows) + step * 1024;
    _tile_loadd(0, sum, 128);
    _tile_loadd(1, sum + 16, 128);
    if (rows - r > 16) {
      _tile_loadd(2, sum + 512, 128);
      _tile_loadd(3, sum + 528, 128);
      multiply_block<true>(x, 1024, weights, count / 32);
      _tile_stored(2, sum + 512, 128);
      _tile_stored(3, sum + 528, 128);
    } else {
      multiply_block<false>(x, 1024, weights, count / 32);
    }
    _tile_stored(0, sum, 128);
    _tile_stored(1, sum + 16, 128);
  }
}

constexpr int64_t kDepth = 256;

// Small groups are not worth tile registers: what is done for each of them takes longer than rounding scaled values.
bool has_large_groups(const BitportTiles& w) { return w.group >= w.k || (w.group >= 64 && w.group % 32 == 0); }

bool fuses(const BitportTiles& w, int64_t m) { return m <= kVectorRows || (m <= 32 && has_large_groups(w)); }

// Up to 32 rows: values of the table in bfloat16 and exact scales, applied to the float32 sums of a group.
AMX void fused(const Job& job, int64_t tile, void* panel, float* sum) {
  const BitportTiles& w = *job.weight;
  if (job.m == 1 || !has_large_groups(w)) return avx512_fused_bf16(job, tile, panel, sum);
  const int64_t groups = groups_of(w), steps = steps_of(w), m = job.m, stride = m * 32;
  const bool two = m > 16;
  configure(two ? 16 : m, two ? m - 16 : 16);
  uint16_t* values = static_cast<uint16_t*>(panel);
  alignas(64) float part[32 * 32];
  const uint16_t* x = static_cast<const uint16_t*>(job.rows);
  for (int64_t i = 0; i < m * 32; i += 16) _mm512_store_ps(sum + i, _mm512_setzero_ps());
  for (int64_t g = 0, step = 0; g < groups; ++g) {
    _tile_zero(0);
    _tile_zero(1);
    if (two) { _tile_zero(2); _tile_zero(3); }
    for (const int64_t end = g + 1 < groups ? (g + 1) * w.group / 32 : steps; step < end;) {
      const int64_t count = end - step < kDepth / 32 ? end - step : kDepth / 32;
      avx512_look_up_bf16(w, tile, step, step + count, values);
      if (two) multiply_block<true>(x, stride, values, count);
      else multiply_block<false>(x, stride, values, count);
      x += stride * count;
      step += count;
    }
    _tile_stored(0, part, 128);
    _tile_stored(1, part + 16, 128);
    if (two) { _tile_stored(2, part + 512, 128); _tile_stored(3, part + 528, 128); }
    for (int h = 0; h < 2; ++h) {
      const Affine a = affine(w, (tile * groups + g) * 32 + h * 16);
      for (int64_t r = 0; r < m; ++r) {
        __m512 s = _mm512_load_ps(part + r * 32 + h * 16);
        if (w.zero) s = _mm512_fnmadd_ps(a.shift, _mm512_set1_ps(job.sums[r * groups + g]), s);
        float* to = sum + r * 32 + h * 16;
        _mm512_store_ps(to, _mm512_fmadd_ps(s, a.scale, _mm512_load_ps(to)));
      }
    }
  }
}

}  // namespace

const Engine amx_engine = {
    true, kDepth, avx512_widen, avx512_decode_bf16, multiply, fuses, fused, avx512_store, begin, end};

}  // namespace bitport
#endif
