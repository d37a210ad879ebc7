// The product with AMX: 16 x 16 float32 sums in a tile register, 16 x 32 bfloat16 of x times 32 x 16 of the weight a step.
#include "engine.h"
#if BITPORT_X86
#include "amx.h"
#include "avx512_bf16.h"

namespace bitport {
namespace {

AMX void begin() { configure(16, 16, 64); }
AMX void end() { release(); }

template <class Beside>
AMX_INLINE void multiply_panel(const Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum, Beside& beside) {
  const uint16_t* x = static_cast<const uint16_t*>(job.rows) + job.at(row, panel.k);
  multiply_rows<Floats>(x, 2048, steps_of(*job.weight) * 2048, rows, panel.data, panel.count / 32, panel.k == 0, sum, beside);
}

AMX void multiply(const Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum) {
  Nothing nothing;
  multiply_panel(job, panel, row, rows, sum, nothing);
}

template <class Format, bool Scaled>
AMX void multiply_as(const Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum, const Panel& next) {
  using All = Quarters<Format, Scaled>;
  Ahead<All> ahead(All(*job.weight, next), (rows + 31) / 32 * (panel.count / 32));
  multiply_panel(job, panel, row, rows, sum, ahead);
}

void multiply_ahead(const Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum, const Panel& next,
                    bool late) {
  if (late) { BITPORT_WITH_CODES(*job.weight, (multiply_as<Format, false>(job, panel, row, rows, sum, next))) }
  else { BITPORT_WITH_CODES(*job.weight, (multiply_as<Format, true>(job, panel, row, rows, sum, next))) }
}

constexpr int64_t kDepth = 256;
constexpr int64_t kFusedRows = 48;

bool fuses(const BitportTiles& w, int64_t m) {
  return m == 1 || (has_long_groups(w, 2 * kDepth) ? m <= kFusedRows : w.group < 64 && m <= 2);
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
  if (job.m == 1 || !has_long_groups(w, 2 * kDepth)) return avx512_fused_bf16(job, tile, panel, sum);
  const int64_t groups = groups_of(w), columns = steps_of(w) * 32, m = job.m;
  if (job.block < 32) configure(job.block > 16 ? 16 : m, job.block > 16 ? m - 16 : 16, 64);
  alignas(64) float part[32 * 32];
  for (int64_t i = 0; i < m * 32; i += 16) _mm512_store_ps(sum + i, _mm512_setzero_ps());
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t first = g * w.group, last = g + 1 < groups ? first + w.group : columns;
    avx512_look_up_bf16(w, {tile, first, last - first, panel});
    const Affine a[2] = {affine(w, (tile * groups + g) * 32), affine(w, (tile * groups + g) * 32 + 16)};
    for (int64_t row = 0; row < m; row += 32) {
      const int64_t rows = m - row < 32 ? m - row : 32;
      const uint16_t* x = static_cast<const uint16_t*>(job.rows) + job.at(row, first);
      const uint16_t* values = static_cast<const uint16_t*>(panel);
      Nothing nothing;
      multiply_rows<Floats>(x, job.block * 64, 0, rows, values, (last - first) / 32, true, part, nothing);
      for (int64_t r = 0; r < rows; ++r)
        for (int h = 0; h < 2; ++h)
          add_scaled(a[h], w.zero, part + r * 32 + h * 16, w.zero ? job.sums[(row + r) * groups + g] : 0.0f,
                     sum + (row + r) * 32 + h * 16);
    }
  }
}

}  // namespace

const Engine amx_engine = {
    true, kDepth, kUsual, avx512_widen, avx512_decode_bf16, avx512_look_up_bf16, avx512_finish, multiply, multiply_ahead, fuses,
    fused, avx512_store, avx512_stream, begin, end};

}  // namespace bitport
#endif
