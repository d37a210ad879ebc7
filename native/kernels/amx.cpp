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

// 32 rows of sums (or 16) over a stretch of K; x and panel advance by what one step of 32 columns takes. The panel is to
// stay in L1, x streams through it.
template <bool Two>
AMX_INLINE void multiply_block(const uint16_t* x, int64_t stride, const uint16_t* panel, int64_t steps) {
  asm volatile("" ::: "memory");   // g++ 12 does not see that loads of tiles read memory
  for (int64_t step = 0; step < steps; ++step, x += stride, panel += 1024) {
    _tile_loadd(6, panel, 64);
    _tile_stream_loadd(4, x, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + 512, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (Two) {
      _tile_stream_loadd(5, x + 512, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

AMX void multiply(const Job& job, int64_t row, int64_t rows, int64_t k, int64_t count, const void* panel, float* sum) {
  const uint16_t* weights = static_cast<const uint16_t*>(panel);
  for (int64_t r = 0; r < rows; r += 32, sum += 1024) {
    const uint16_t* x = static_cast<const uint16_t*>(job.rows) + job.at((row + r) / 32, k, count);
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

constexpr int64_t kDepth = 512;
constexpr int64_t kFusedRows = 64;

// Of groups that are worth tile registers: what is done for each of them takes long beside the products of a small one,
// and a panel holds no larger one.
bool has_tile_groups(const BitportTiles& w) { return w.group >= 64 && w.group <= kDepth && w.group % 32 == 0; }

bool fuses(const BitportTiles& w, int64_t m) {
  return m == 1 || (has_tile_groups(w) ? m <= kFusedRows : w.group < 64 && m <= 2);
}

// sum += (part - shift * sum of x) * scale
AMX_INLINE void add_scaled(const Affine& a, bool shifts, const float* part, float of_x, float* sum) {
  __m512 s = _mm512_load_ps(part);
  if (shifts) s = _mm512_fnmadd_ps(a.shift, _mm512_set1_ps(of_x), s);
  _mm512_store_ps(sum, _mm512_fmadd_ps(s, a.scale, _mm512_load_ps(sum)));
}

// A few blocks of rows: values of the table in bfloat16 and exact scales, applied to the float32 sums of a group.
AMX void fused(const Job& job, int64_t tile, void* panel, float* sum) {
  const BitportTiles& w = *job.weight;
  if (job.m == 1 || !has_tile_groups(w)) return avx512_fused_bf16(job, tile, panel, sum);
  const int64_t groups = groups_of(w), columns = steps_of(w) * 32, m = job.m, stride = job.block * 32;
  if (job.block < 32) configure(job.block > 16 ? 16 : m, job.block > 16 ? m - 16 : 16);
  alignas(64) float part[32 * 32];
  for (int64_t i = 0; i < m * 32; i += 16) _mm512_store_ps(sum + i, _mm512_setzero_ps());
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t first = g * w.group, last = g + 1 < groups ? first + w.group : columns;
    avx512_look_up_bf16(w, tile, first, last - first, panel);
    const Affine a[2] = {affine(w, (tile * groups + g) * 32), affine(w, (tile * groups + g) * 32 + 16)};
    for (int64_t row = 0; row < m; row += 32) {
      const int64_t rows = m - row < 32 ? m - row : 32;
      _tile_zero(0);
      _tile_zero(1);
      if (rows > 16) { _tile_zero(2); _tile_zero(3); }
      for (int64_t k = first; k < last;) {   // a group may lie in two stretches
        const int64_t start = k / kDepth * kDepth, stretch = columns - start < kDepth ? columns - start : kDepth;
        const int64_t end = start + stretch < last ? start + stretch : last;
        const uint16_t* x =
            static_cast<const uint16_t*>(job.rows) + job.at(row / 32, start, stretch) + (k - start) * job.block;
        const uint16_t* values = static_cast<const uint16_t*>(panel) + (k - first) * 32;
        if (rows > 16) multiply_block<true>(x, stride, values, (end - k) / 32);
        else multiply_block<false>(x, stride, values, (end - k) / 32);
        k = end;
      }
      _tile_stored(0, part, 128);
      _tile_stored(1, part + 16, 128);
      if (rows > 16) { _tile_stored(2, part + 512, 128); _tile_stored(3, part + 528, 128); }
      for (int64_t r = 0; r < rows; ++r)
        for (int h = 0; h < 2; ++h)
          add_scaled(a[h], w.zero, part + r * 32 + h * 16, w.zero ? job.sums[(row + r) * groups + g] : 0.0f,
                     sum + (row + r) * 32 + h * 16);
    }
  }
}

AMX void finish(const Job& job, int64_t tile, int64_t row, int64_t rows, float* sum) {
  const BitportTiles& w = *job.weight;
  for (int64_t h = 0; h < 2; ++h) {
    const Affine a = affine(w, tile * 32 + h * 16);
    for (int64_t r = 0; r < rows; ++r) {
      float* at = sum + r * 32 + h * 16;
      __m512 s = _mm512_load_ps(at);
      if (w.zero) s = _mm512_fnmadd_ps(a.shift, _mm512_set1_ps(job.sums[row + r]), s);
      _mm512_store_ps(at, _mm512_mul_ps(s, a.scale));
    }
  }
}

}  // namespace

const Engine amx_engine = {
    true,  kDepth, avx512_widen, avx512_decode_bf16, avx512_look_up_bf16, finish, multiply, fuses, fused, avx512_store,
    begin, end};

}  // namespace bitport
#endif
