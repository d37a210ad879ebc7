// The product with int8 inputs by AMX: 16 x 16 int32 sums in a tile register, 16 x 64 codes of x times 64 x 16 of the
// weight a step, all signed. Groups of an odd number of 32 columns take steps of 32.
#include "int8.h"
#if BITPORT_X86
#include "amx.h"
#include "int8_avx512.h"

namespace bitport {
namespace {

int64_t step_of(const BitportTiles& w) { return w.group >= w.k || w.group % 64 == 0 ? 64 : 32; }

AMX void begin(const BitportTiles& w) { configure(16, 16, step_of(w)); }
AMX void end() { release(); }

// The codes of a panel less the center, by quarters of a tile: 16 rows by 16 columns, 4 lines of 64 codes.
//   panel [K / step][2 halves of 16 rows][step / 4][16 rows][4]
template <int Bits>
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
    prefetch_ahead<_MM_HINT_T1>(q.codes + (at & 3) * 32 * Bits, 32 * Bits);
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
  Quarters<Bits> quarters(w, panel);
  while (quarters.at < quarters.end) quarters.decode();
}

void unpack(const BitportTiles& w, const Panel& panel) { BITPORT_WITH_BITS(w.bits, unpack_as<Bits>(w, panel)) }

template <bool Two, class Beside>
AMX_INLINE void multiply_step(const int8_t* x, const uint8_t* panel, int64_t step, Beside& beside) {
  const auto work = beside.begin();
  _tile_loadd(6, panel, 64);
  _tile_stream_loadd(4, x, 64);
  _tile_dpbssd(0, 4, 6);
  beside.part(work, 0);
  _tile_loadd(7, panel + step * 16, 64);
  _tile_dpbssd(1, 4, 7);
  beside.part(work, 1);
  if (Two) {
    _tile_stream_loadd(5, x + 1024, 64);
    _tile_dpbssd(2, 5, 6);
  }
  beside.part(work, 2);
  if (Two) _tile_dpbssd(3, 5, 7);
  beside.part(work, 3);
  beside.end();
}

// 32 rows (or 16) with sums that stay int32.
template <bool Two, class Beside>
AMX_INLINE void multiply_whole(const Int8Job& job, const Panel& stretch, int64_t row, float* sum, Beside& beside) {
  const int8_t* x = codes_at(job, row, stretch.k);
  const uint8_t* panel = static_cast<const uint8_t*>(stretch.data);
  asm volatile("" ::: "memory");   // g++ 12 does not see that loads of tiles read memory
  if (stretch.k == 0) zero_sums<Two>();
  else load_sums<Two>(sum);
  for (int64_t k = 0; k < stretch.count; k += 64, x += job.block * kInt8Step, panel += 2048)
    multiply_step<Two>(x, panel, 64, beside);
  store_sums<Two>(sum);
}

// The same over several pieces, whose sums become float32 one by one. All 32 (or 16) rows are worked off, whether x has
// them or not.
template <bool Two, bool Shifts, class Beside>
AMX_INLINE void multiply_pieces(const Int8Job& job, const Panel& stretch, int64_t row, float* sum, Beside& beside) {
  const BitportTiles& w = *job.weight;
  const int64_t step = step_of(w), last = stretch.k + stretch.count;
  const int8_t* x = codes_at(job, row, 0);
  const uint8_t* panel = static_cast<const uint8_t*>(stretch.data);
  const int64_t scales = stretch.tile * groups_of(w) * 32;
  alignas(64) int32_t whole[32 * 32];
  if (stretch.k == 0) std::memset(sum, 0, Two ? 4096 : 2048);
  for (Pieces piece(w, job.stretch, stretch.k); piece.begin < last; piece.next()) {
    const float* sums = job.sums + row * job.pieces + piece.index;
    const int64_t at = scales + piece.group * 32;
    const PieceScale scale[2] = {piece_scale(w, at), piece_scale(w, at + 16)};
    zero_sums<Two>();
    asm volatile("" ::: "memory");   // g++ 12 does not see that loads of tiles read memory
    for (int64_t k = piece.begin; k < piece.end; k += step, panel += step * 32)
      multiply_step<Two>(x + k / kInt8Step * job.block * kInt8Step + k % kInt8Step, panel, step, beside);
    store_sums<Two>(whole);
#pragma GCC unroll 4
    for (int r = 0; r < (Two ? 32 : 16); ++r)
      for (int half = 0; half < 2; ++half) {
        __m512 part = _mm512_cvtepi32_ps(_mm512_load_si512(whole + r * 32 + half * 16));
        if (Shifts) part = _mm512_fnmadd_ps(scale[half].shift, _mm512_set1_ps(sums[r * job.pieces]), part);
        float* to = sum + r * 32 + half * 16;
        _mm512_store_ps(to, _mm512_fmadd_ps(part, scale[half].scale, _mm512_load_ps(to)));
      }
  }
}

bool stays_int(const BitportTiles& w) { return w.group >= w.k && w.k <= kInt32Columns; }

template <bool Two, class Beside>
AMX_INLINE void multiply_block(const Int8Job& job, const Panel& panel, int64_t row, float* sum, Beside& beside) {
  const BitportTiles& w = *job.weight;
  if (stays_int(w)) multiply_whole<Two>(job, panel, row, sum, beside);
  else if (has_shift(w)) multiply_pieces<Two, true>(job, panel, row, sum, beside);
  else multiply_pieces<Two, false>(job, panel, row, sum, beside);
}

template <class Beside>
AMX_INLINE void multiply_rows(const Int8Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum,
                                   Beside& beside) {
  for (int64_t r = 0; r < rows; r += 32, sum += 1024)
    if (rows - r > 16) multiply_block<true>(job, panel, row + r, sum, beside);
    else multiply_block<false>(job, panel, row + r, sum, beside);
}

AMX void multiply(const Int8Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum) {
  Nothing nothing;
  multiply_rows(job, panel, row, rows, sum, nothing);
}

template <int Bits>
AMX void multiply_as(const Int8Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum,
                          const Panel& next) {
  const BitportTiles& w = *job.weight;
  Ahead<Quarters<Bits>> ahead(Quarters<Bits>(w, next), ceil_div(rows, 32) * ceil_div(panel.count, step_of(w)));
  multiply_rows(job, panel, row, rows, sum, ahead);
}

void multiply_ahead(const Int8Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum, const Panel& next) {
  BITPORT_WITH_BITS(job.weight->bits, multiply_as<Bits>(job, panel, row, rows, sum, next))
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

const Int8Engine amx_int8_engine = {512, 1, kUsualOfBytes, avx512_int8_range, avx512_int8_round, fuses, avx512_int8_fused, unpack,
                                    multiply, multiply_ahead, stays_int, settle, avx512_int8_finish, true, begin, end};

}  // namespace bitport
#endif
