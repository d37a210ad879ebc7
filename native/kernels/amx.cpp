// The product with AMX: 16 x 16 float32 sums in a tile register, 16 x 32 bfloat16 of x times 32 x 16 of the weight per
// step.
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

template <class Format, class By>
AMX void multiply_as(const Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum, const Panel& next) {
  using All = Quarters<Format, By, beside_products(Format::kBits)>;
  Ahead<All> ahead(All(*job.weight, next), (rows + 31) / 32 * (panel.count / 32));
  multiply_panel(job, panel, row, rows, sum, ahead);
}

void multiply_ahead(const Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum, const Panel& next,
                    bool late) {
  const BitportTiles& w = *job.weight;
  if (late) { BITPORT_WITH_CODES(w, (multiply_as<Format, Unscaled>(job, panel, row, rows, sum, next))) }
  else if (avx512_raises(w, next)) { BITPORT_WITH_FLOATS(w, (multiply_as<Format, Raised>(job, panel, row, rows, sum, next))) }
  else { BITPORT_WITH_CODES(w, (multiply_as<Format, Twice>(job, panel, row, rows, sum, next))) }
}

constexpr int64_t kDepth = 256;

bool fuses(const BitportTiles& w, int64_t m) {
  return m == 1 || (has_long_groups(w, 2 * kDepth) ? m <= (w.zero ? 32 : 48) : w.group < 64 && m <= 2);
}

// sum += (part - shift * sum of x) * scale
template <bool Shifts>
struct Piece {
  static constexpr int64_t kAtOnce = 2;
  int64_t rows;
  float* sum;
  const float* of_x;
  int64_t next;   // stride between rows
  const BitportTiles* weight;
  int64_t at;     // position of the scales

  struct Scales { Affine of[2]; };
  AMX_MEMBER Scales scales() const { return {{affine(*weight, at), affine(*weight, at + 16)}}; }
  AMX_MEMBER void add(const Scales& scales, const float* parts, int64_t row) const {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const Affine& s = scales.of[half];
      __m512 part = _mm512_load_ps(parts + half * 16);
      if (Shifts) part = _mm512_fnmadd_ps(s.shift, _mm512_set1_ps(of_x[row * next]), part);
      float* to = sum + row * 32 + half * 16;
      _mm512_store_ps(to, _mm512_fmadd_ps(part, s.scale, _mm512_load_ps(to)));
    }
  }
};

// Groups as pieces: table values in bfloat16, looked up while the previous group is multiplied, and exact scales
// applied to float32 sums.
template <class Format, bool Shifts>
AMX void fused_as(const Job& job, int64_t tile, void* panels, float* sum) {
  using All = Quarters<Format, Unscaled, Fetch::at_once>;
  const BitportTiles& w = *job.weight;
  const int64_t groups = groups_of(w), columns = steps_of(w) * 32, blocks = ceil_div(job.m, 32);
  const auto group_at = [&](int64_t g) {
    const int64_t first = g < groups ? g * w.group : columns, last = g + 1 < groups ? first + w.group : columns;
    return Panel{tile, first, last - first, static_cast<char*>(panels) + (g & 1) * 2 * kDepth * 64};
  };
  alignas(64) float memory[2][32 * 32] = {};   // rows that the tile registers lack are never written
  std::memset(sum, 0, size_t(blocks) * 4096);
  avx512_look_up_bf16(w, group_at(0));
  Ahead<All> none(All(w, group_at(groups)), 1);
  Stages<Piece<Shifts>, Ahead<All>> stages(none, memory);
  for (int64_t g = 0; g < groups; ++g) {
    const Panel panel = group_at(g);
    Ahead<All> ahead(All(w, group_at(g + 1)), blocks * (panel.count / 32));
    stages.work = &ahead;
    for (int64_t row = 0; row < job.m; row += 32) {
      const uint16_t* x = static_cast<const uint16_t*>(job.rows) + job.at(row, panel.k);
      const float* of_x = Shifts ? job.sums + row * groups + g : nullptr;
      const auto x_at = [&](int64_t step) AMX { return x + step * job.block * 32; };
      const Piece<Shifts> piece = {smaller(job.m - row, 32), sum + row * 32, of_x, groups, &w, (tile * groups + g) * 32};
      if (piece.rows > 16) stages.template multiply<Floats, true>(piece, x_at, panel.data, 2048, panel.count / 32);
      else stages.template multiply<Floats, false>(piece, x_at, panel.data, 2048, panel.count / 32);
    }
  }
  stages.close();
  stages.add_all();
}

// A few blocks of rows.
AMX void fused(const Job& job, int64_t tile, void* panels, float* sum) {
  const BitportTiles& w = *job.weight;
  if (job.m == 1 || !has_long_groups(w, 2 * kDepth)) return avx512_fused_bf16(job, tile, panels, sum);
  if (job.block < 32) configure(job.block > 16 ? 16 : job.m, job.block > 16 ? job.m - 16 : 16, 64);
  if (w.zero) { BITPORT_WITH_CODES(w, (fused_as<Format, true>(job, tile, panels, sum))) }
  else { BITPORT_WITH_CODES(w, (fused_as<Format, false>(job, tile, panels, sum))) }
}

}  // namespace

const Engine amx_engine = {
    true, kDepth, 0, kUsual, avx512_widen, avx512_decode_bf16, avx512_look_up_bf16, avx512_finish, multiply, multiply_ahead, fuses,
    fused, avx512_store, avx512_stream, begin, end};

}  // namespace bitport
#endif
