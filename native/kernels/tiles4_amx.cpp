// The product with AMX: 16 x 16 float32 sums in a tile register, 16 x 32 bfloat16 of x times 32 x 16 of the weight a step.
#include "engine.h"
#if BITPORT_X86
#include "avx512.h"

#define AMX __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c,amx-tile,amx-bf16")))
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
    const int64_t step = (row + r) / 32 * (job.weight->k / 32) + k / 32;
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

// Codes of one step of K as what the table says, unscaled.
AMX_INLINE void look_up(const uint8_t* codes, __m512i table, uint16_t* to) {
#pragma GCC unroll 16
  for (int line = 0; line < 16; ++line) {
    const __m512i index =
        _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + line * 32)));
    _mm512_store_si512(to + line * 64, _mm512_permutexvar_epi16(index, table));
    _mm512_store_si512(to + line * 64 + 32, _mm512_permutexvar_epi16(_mm512_srli_epi16(index, 4), table));
  }
}

// Up to 32 rows: values of the table in bfloat16 and exact scales, applied to the float32 sums of a group.
AMX void fused(const Job& job, int64_t tile, void* panel, float* sum) {
  if (job.m == 1) return avx512_fused_bf16(job, tile, panel, sum);
  const BitportTiles4& w = *job.weight;
  const int64_t groups = w.k / w.group, m = job.m, stride = m * 32;
  const bool two = m > 16;
  configure(two ? 16 : m, two ? m - 16 : 16);
  alignas(64) uint16_t entries[32];
  for (int i = 0; i < 32; ++i) entries[i] = bf16_of_float(w.table[i & 15]);
  const __m512i table = _mm512_load_si512(entries);
  alignas(64) uint16_t values[2][1024];
  alignas(64) float part[32 * 32];
  const uint8_t* codes = w.codes + tile * w.k * 16;
  const uint16_t* x = static_cast<const uint16_t*>(job.rows);
  for (int64_t i = 0; i < m * 32; i += 16) _mm512_store_ps(sum + i, _mm512_setzero_ps());
  for (int64_t g = 0; g < groups; ++g) {
    _tile_zero(0);
    _tile_zero(1);
    if (two) { _tile_zero(2); _tile_zero(3); }
    for (int64_t step = 0; step < w.group / 32; ++step, codes += 512, x += stride) {
      for (int i = 0; i < 512; i += 64) _mm_prefetch(reinterpret_cast<const char*>(codes) + 4096 + i, _MM_HINT_T0);
      look_up(codes, table, values[step & 1]);
      if (two) multiply_block<true>(x, stride, values[step & 1], 1);
      else multiply_block<false>(x, stride, values[step & 1], 1);
    }
    _tile_stored(0, part, 128);
    _tile_stored(1, part + 16, 128);
    if (two) { _tile_stored(2, part + 512, 128); _tile_stored(3, part + 528, 128); }
    for (int h = 0; h < 2; ++h) {
      const int64_t at = (tile * groups + g) * 32 + h * 16;
      const Affine a = affine(w, at);
      for (int64_t r = 0; r < m; ++r) {
        __m512 s = _mm512_load_ps(part + r * 32 + h * 16);
        if (w.zero) s = _mm512_fnmadd_ps(a.zero, _mm512_set1_ps(job.sums[r * groups + g]), s);
        float* to = sum + r * 32 + h * 16;
        _mm512_store_ps(to, _mm512_fmadd_ps(s, a.scale, _mm512_load_ps(to)));
      }
    }
  }
}

}  // namespace

const Engine amx_engine = {
    true, 256, 32, avx512_widen, avx512_decode_bf16, multiply, fused, avx512_store, begin, end};

}  // namespace bitport
#endif
