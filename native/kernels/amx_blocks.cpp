// The product with AMX if x has a scale per 128 columns.
#include "engine.h"
#if BITPORT_X86
#include "amx.h"
#include "avx512_bf16.h"

namespace bitport {
namespace {

constexpr int64_t kDepth = 256;

// The factors behind a whole panel.
float* scales_of(const Panel& panel) { return reinterpret_cast<float*>(static_cast<uint16_t*>(panel.data) + kDepth * 32); }

void decode(const BitportTiles& w, const Panel& panel) { avx512_decode_blocks(w, panel, scales_of(panel)); }

// sum += part * scale of 128 columns of the weight * scale of 128 columns of a row
struct Piece {
  static constexpr int64_t kAtOnce = 2;
  int64_t rows;
  float* sum;
  const float *of_weight, *of_x;

  struct Scales { __m512 of[2]; };
  AMX_MEMBER Scales scales() const { return {{_mm512_load_ps(of_weight), _mm512_load_ps(of_weight + 16)}}; }
  AMX_MEMBER void add(const Scales& scales, const float* parts, int64_t row) const {
    const __m512 times = _mm512_set1_ps(of_x[row]);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      float* to = sum + row * 32 + half * 16;
      const __m512 part = _mm512_mul_ps(_mm512_load_ps(parts + half * 16), scales.of[half]);
      _mm512_store_ps(to, _mm512_fmadd_ps(part, times, _mm512_load_ps(to)));
    }
  }
};

// Multiplies rows of a block, up to 32 (or 16), by a panel.
template <bool Two, class Work>
AMX_INLINE void multiply_block(const Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum,
                               Stages<Piece, Work>& stages) {
  const uint16_t* x = static_cast<const uint16_t*>(job.rows) + job.at(row, panel.k);
  const uint16_t* weights = static_cast<const uint16_t*>(panel.data);
  const float* of_weight = scales_of(panel);
  const float* of_x = job.scales + panel.k / kScaled * job.m + row;
  for (int64_t k = 0; k < panel.count; k += kScaled, of_x += job.m, of_weight += 32)
    stages.template multiply<Floats, Two>(
        {rows, sum, of_weight, of_x}, [&](int64_t step) AMX { return x + (k / 32 + step) * 1024; },
        weights + k * 32, 2048, smaller(panel.count - k, kScaled) / 32);
}

template <class Work>
AMX_INLINE void multiply_panel(const Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum, Work& work) {
  alignas(64) float memory[2][32 * 32];
  Stages<Piece, Work> stages(work, memory);
  if (panel.k == 0) std::memset(sum, 0, size_t(ceil_div(rows, 16)) * 2048);
  for (; rows > 16; row += 32, rows -= 32, sum += 1024) multiply_block<true>(job, panel, row, smaller(rows, 32), sum, stages);
  if (rows > 0) multiply_block<false>(job, panel, row, rows, sum, stages);
  stages.close();
  stages.add_all();
}

AMX void multiply(const Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum) {
  Nothing nothing;
  multiply_panel(job, panel, row, rows, sum, nothing);
}

template <class Format, class By>
AMX void multiply_as(const Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum, const Panel& next) {
  using All = Quarters<Format, By, beside_products(Format::kBits)>;
  Ahead<All> ahead(All(*job.weight, next), (rows + 31) / 32 * (panel.count / 32));
  avx512_scales_of_blocks(*job.weight, next, scales_of(next));
  multiply_panel(job, panel, row, rows, sum, ahead);
}

void multiply_ahead(const Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum, const Panel& next, bool) {
  if (scales_act_on_blocks(*job.weight)) {
    BITPORT_WITH_CODES(*job.weight, (multiply_as<Format, Unscaled>(job, panel, row, rows, sum, next)))
  } else {
    BITPORT_WITH_CODES(*job.weight, (multiply_as<Format, Twice>(job, panel, row, rows, sum, next)))
  }
}

void begin() { amx_engine.begin(); }
void end() { amx_engine.end(); }

}  // namespace

const Engine amx_blocks_engine = {
    true, kDepth, 0, kUsualOfBytes, avx512_widen, decode, nullptr, nullptr, multiply, multiply_ahead, nullptr, nullptr, avx512_store,
    avx512_stream, begin, end};

}  // namespace bitport
#endif
