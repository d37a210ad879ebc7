// The product with int8 inputs by AMX: 16 x 16 int32 sums in a tile register, 16 x 64 codes of x times 64 x 16 of the
// weight per step, all signed. Groups of an odd multiple of 32 columns take steps of 32.
#include "int8.h"
#if BITPORT_X86
#include "amx.h"
#include "int8_avx512.h"

namespace bitport {
namespace {

int64_t step_of(const BitportTiles& w) { return w.group >= w.k || w.group % 64 == 0 ? 64 : 32; }

AMX void begin(const BitportTiles& w) { configure(16, 16, step_of(w)); }
AMX void end() { release(); }

// The codes of a panel minus the center, in quarters of a tile: 16 rows by 16 columns, 4 lines of 64 codes.
//   panel [K / step][2 halves of 16 rows][step / 4][16 rows][4]
template <int Bits, Fetch How>
struct Quarters {
  struct Quarter {
    const uint8_t* codes;
    int64_t line;
    uint8_t* to;
  };

  const uint8_t* codes;
  uint8_t* to;
  const int64_t step, end;
  int64_t at = 0;
  const __m512i middle_of_codes;

  AVX512_MEMBER Quarters(const BitportTiles& w, const Panel& panel)
      : codes(tile_at(w, panel.tile, panel.k / 32)), to(static_cast<uint8_t*>(panel.data)), step(step_of(w)),
        end(ceil_div(panel.count, 32) * 4), middle_of_codes(_mm512_set1_epi8(char(center(w)))) {}

  AVX512_MEMBER Quarter next() {
    const int64_t tile = at >> 2, half = at >> 1 & 1, first = (at & 1) * 4;   // first: of 8 lines
    const int64_t wide = step == 64, place = (tile >> wide) * 2 + half, later = wide ? (tile & 1) * 512 : 0;
    const Quarter q = {codes + tile * 128 * Bits, half * 8 + first, to + place * step * 16 + later + first * 64};
    fetch<How>(q.codes + (at & 3) * 32 * Bits, 32 * Bits);
    ++at;
    return q;
  }

  AVX512_MEMBER void decode(const Quarter& q, int64_t line) const {
    _mm512_store_si512(q.to + line * 64, _mm512_sub_epi8(read_quads<Bits>(q.codes, q.line + line), middle_of_codes));
  }

  AVX512_MEMBER void decode() {
    const Quarter q = next();
#pragma GCC unroll 4
    for (int64_t line = 0; line < 4; ++line) decode(q, line);
  }
};

template <int Bits>
AVX512 void unpack_as(const BitportTiles& w, const Panel& panel) {
  Quarters<Bits, Fetch::at_once> quarters(w, panel);
  while (quarters.at < quarters.end) quarters.decode();
}

void unpack(const BitportTiles& w, const Panel& panel) { BITPORT_WITH_BITS(w.bits, unpack_as<Bits>(w, panel)) }

// sum += (part - shift * sum of x) * scale
template <bool Shifts>
struct Piece {
  static constexpr int64_t kAtOnce = 4;
  int64_t rows;
  float* sum;
  const float* of_x;
  const BitportTiles* weight;
  int64_t at;   // position of the scales

  struct Scales { PieceScale of[2]; };
  AMX_MEMBER Scales scales() const { return {{piece_scale(*weight, at), piece_scale(*weight, at + 16)}}; }
  AMX_MEMBER void add(const Scales& scales, const float* parts, int64_t row) const {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const PieceScale& s = scales.of[half];
      __m512 part = _mm512_cvtepi32_ps(_mm512_load_si512(parts + half * 16));
      if (Shifts) part = _mm512_fnmadd_ps(s.shift, _mm512_set1_ps(of_x[row]), part);
      float* to = sum + row * 32 + half * 16;
      _mm512_store_ps(to, _mm512_fmadd_ps(part, s.scale, _mm512_load_ps(to)));
    }
  }
};

// Multiplies rows of a block, up to 32 (or 16), by a panel.
template <bool Two, bool Shifts, class Work>
AMX_INLINE void multiply_block(const Int8Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum,
                               Stages<Piece<Shifts>, Work>& stages) {
  const BitportTiles& w = *job.weight;
  const int64_t step = step_of(w), last = panel.k + panel.count, scales = panel.tile * groups_of(w) * 32;
  const int8_t* x = codes_at(job, row, 0);
  const uint8_t* weights = static_cast<const uint8_t*>(panel.data);
  if (panel.k == 0) std::memset(sum, 0, Two ? 4096 : 2048);
  for (Pieces piece(w, job.stretch, panel.k); piece.begin < last; piece.next()) {
    const int64_t steps = ceil_div(piece.end - piece.begin, step);
    const auto x_at = [&](int64_t i) AMX {
      const int64_t k = piece.begin + i * step;
      return x + k / kInt8Step * job.block * kInt8Step + k % kInt8Step;
    };
    stages.template multiply<Bytes, Two>(
        {rows, sum, sums_at(job, row, piece.index), &w, scales + piece.group * 32}, x_at, weights, step * 32, steps);
    weights += steps * step * 32;
  }
}

template <bool Shifts, class Work>
AMX_INLINE void multiply_pieces(const Int8Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum, Work& work) {
  alignas(64) float memory[2][32 * 32];
  Stages<Piece<Shifts>, Work> stages(work, memory);
  for (; rows > 16; row += 32, rows -= 32, sum += 1024) multiply_block<true>(job, panel, row, smaller(rows, 32), sum, stages);
  if (rows > 0) multiply_block<false>(job, panel, row, rows, sum, stages);
  stages.close();
  stages.add_all();
}

bool stays_int(const BitportTiles& w) { return w.group >= w.k && w.k <= kInt32Columns; }

template <class Work>
AMX_INLINE void multiply_panel(const Int8Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum, Work& work) {
  const BitportTiles& w = *job.weight;
  if (stays_int(w)) {
    const int64_t next = job.block * kInt8Step;
    multiply_rows<Bytes>(codes_at(job, row, panel.k), next, int8_steps(w) * next, rows, panel.data, ceil_div(panel.count, kInt8Step),
                         panel.k == 0, sum, work);
  } else if (has_shift(w)) {
    multiply_pieces<true>(job, panel, row, rows, sum, work);
  } else {
    multiply_pieces<false>(job, panel, row, rows, sum, work);
  }
}

AMX void multiply(const Int8Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum) {
  Nothing nothing;
  multiply_panel(job, panel, row, rows, sum, nothing);
}

template <int Bits, Fetch How>
AMX void multiply_by(const Int8Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum, const Panel& next) {
  const BitportTiles& w = *job.weight;
  using All = Quarters<Bits, How>;
  Ahead<All> ahead(All(w, next), ceil_div(rows, 32) * ceil_div(panel.count, step_of(w)));
  multiply_panel(job, panel, row, rows, sum, ahead);
}

void multiply_ahead(const Int8Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum, const Panel& next) {
  if (rows > 32) {
    BITPORT_WITH_BITS(job.weight->bits, (multiply_by<Bits, beside_products(Bits)>(job, panel, row, rows, sum, next)))
  } else {   // codes are needed in bursts, which windows would lengthen
    BITPORT_WITH_BITS(job.weight->bits, (multiply_by<Bits, Fetch::stream>(job, panel, row, rows, sum, next)))
  }
}

AVX512 void settle(const Int8Job& job, int64_t tile, int64_t row, int64_t rows, float* sum) {
  const bool shifts = has_shift(*job.weight);
  for (int64_t half = 0; half < 2; ++half) {
    const PieceScale s = piece_scale(*job.weight, tile * groups_of(*job.weight) * 32 + half * 16);
    for (int64_t r = 0; r < rows; ++r) {
      float* to = sum + r * 32 + half * 16;
      __m512 part = _mm512_cvtepi32_ps(_mm512_load_si512(to));
      if (shifts) part = _mm512_fnmadd_ps(s.shift, _mm512_set1_ps(job.sums[row + r]), part);
      _mm512_store_ps(to, _mm512_mul_ps(part, s.scale));
    }
  }
}

bool fuses(const BitportTiles&, int64_t m) { return m <= 8; }

}  // namespace

const Int8Engine amx_int8_engine = {512, 1, 0, kUsualOfBytes, avx512_int8_range, avx512_int8_round, fuses, avx512_int8_fused, unpack,
                                    multiply, multiply_ahead, stays_int, settle, avx512_int8_finish, true, begin, end};

}  // namespace bitport
#endif
