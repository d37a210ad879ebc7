// The product with int8 inputs by AMX: 16 x 16 int32 sums in a tile register, 16 x 64 codes of x times 64 x 16 of the
// weight a step, all signed. Groups of an odd number of 32 columns take steps of 32.
#include "int8.h"
#if BITPORT_X86
#include "int8_avx512.h"

#define AMX_INT8 __attribute__((target(AVX512_TARGET ",amx-tile,amx-int8")))
#define AMX_INT8_INLINE AMX_INT8 __attribute__((always_inline)) static inline

namespace bitport {
namespace {

int64_t step_of(const BitportTiles& w) { return w.group >= w.k || w.group % 64 == 0 ? 64 : 32; }

// Tiles 0..3 hold sums, 4 and 5 two times 16 rows of x, 6 and 7 two times 16 rows of the weight.
AMX_INT8 void configure(int64_t step) {
  struct __attribute__((packed)) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int i = 0; i < 8; ++i) { config.bytes[i] = 64; config.rows[i] = 16; }
  config.bytes[4] = config.bytes[5] = uint16_t(step);
  config.rows[6] = config.rows[7] = uint8_t(step / 4);
  asm volatile("" ::"r"(&config) : "memory");   // g++ 12 does not see that the next line reads it
  _tile_loadconfig(&config);
}

AMX_INT8 void begin(const BitportTiles& w) { configure(step_of(w)); }
AMX_INT8 void end() { _tile_release(); }

// panel [K / step][2 halves of 16 rows][step / 4][16 rows][4], less the center
template <int Bits>
AVX512 void unpack_as(const BitportTiles& w, int64_t tile, int64_t k, int64_t count, uint8_t* panel) {
  const int64_t half = step_of(w) * 16;
  const __m512i middle_of_codes = _mm512_set1_epi8(char(center(w)));
  for (int64_t at = 0; at < count; at += 32) {
    const uint8_t* codes = tile_at(w, tile, (k + at) / 32);
    uint8_t* to = panel + at / (half / 16) * half * 2 + at % (half / 16) * 16;
    prefetch_ahead(codes, 128 * Bits);
#pragma GCC unroll 8
    for (int64_t line = 0; line < 8; ++line, to += 64) {
      _mm512_store_si512(to, _mm512_sub_epi8(read_quads<Bits>(codes, line), middle_of_codes));
      _mm512_store_si512(to + half, _mm512_sub_epi8(read_quads<Bits>(codes, 8 + line), middle_of_codes));
    }
  }
}

void unpack(const BitportTiles& w, int64_t tile, int64_t k, int64_t count, uint8_t* panel) {
  BITPORT_WITH_BITS(w.bits, unpack_as<Bits>(w, tile, k, count, panel))
}

// 32 rows of int32 sums (or 16) over a stretch of K in steps of 64.
template <bool Two>
AMX_INT8 void multiply_whole(const int8_t* x, int64_t next, int64_t steps, const uint8_t* panel, float* sum) {
  asm volatile("" ::: "memory");   // g++ 12 does not see that loads of tiles read memory
  _tile_loadd(0, sum, 128);
  _tile_loadd(1, sum + 16, 128);
  if (Two) {
    _tile_loadd(2, sum + 512, 128);
    _tile_loadd(3, sum + 528, 128);
  }
  for (int64_t step = 0; step < steps; ++step, x += next, panel += 2048) {
    _tile_loadd(6, panel, 64);
    _tile_loadd(4, x, 64);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(7, panel + 1024, 64);
    _tile_dpbssd(1, 4, 7);
    if (Two) {
      _tile_loadd(5, x + 1024, 64);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
  }
  _tile_stored(0, sum, 128);
  _tile_stored(1, sum + 16, 128);
  if (Two) {
    _tile_stored(2, sum + 512, 128);
    _tile_stored(3, sum + 528, 128);
  }
  asm volatile("" ::: "memory");
}

// The same over several pieces, whose sums become float32 one by one. All 32 (or 16) rows are worked off, whether x has
// them or not.
template <bool Two, bool Shifts>
AMX_INT8 void multiply_pieces(const Int8Job& job, int64_t tile, int64_t row, int64_t first, int64_t last,
                              const uint8_t* panel, float* sum) {
  const BitportTiles& w = *job.weight;
  const int64_t step = step_of(w);
  const int8_t* x = codes_at(job, row, 0);
  const float* sums = job.sums + row * job.pieces + pieces_before(w, job.stretch, first);
  alignas(64) int32_t whole[32 * 32];
  for (int64_t k = first; k < last; ++sums) {
    const PieceScale scale[2] = {piece_scale(w, tile, k, 0), piece_scale(w, tile, k, 1)};
    _tile_zero(0);
    _tile_zero(1);
    if (Two) { _tile_zero(2); _tile_zero(3); }
    asm volatile("" ::: "memory");   // g++ 12 does not see that loads of tiles read memory
    for (const int64_t end = piece_end(w, job.stretch, k); k < end; k += step, panel += step * 32) {
      const int8_t* at = x + k / kInt8Step * job.block * kInt8Step + k % kInt8Step;
      _tile_loadd(4, at, 64);
      _tile_loadd(6, panel, 64);
      _tile_dpbssd(0, 4, 6);
      _tile_loadd(7, panel + step * 16, 64);
      _tile_dpbssd(1, 4, 7);
      if (Two) {
        _tile_loadd(5, at + 1024, 64);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
      }
    }
    _tile_stored(0, whole, 128);
    _tile_stored(1, whole + 16, 128);
    if (Two) { _tile_stored(2, whole + 512, 128); _tile_stored(3, whole + 528, 128); }
    asm volatile("" ::: "memory");
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

template <bool Two>
void multiply_block(const Int8Job& job, int64_t tile, int64_t row, int64_t k, int64_t last, const uint8_t* panel,
                    float* sum) {
  if (has_shift(*job.weight)) multiply_pieces<Two, true>(job, tile, row, k, last, panel, sum);
  else multiply_pieces<Two, false>(job, tile, row, k, last, panel, sum);
}

bool stays_int(const BitportTiles& w) { return w.group >= w.k && w.k <= kInt32Columns; }

void multiply(const Int8Job& job, int64_t tile, int64_t row, int64_t rows, int64_t k, int64_t count,
              const uint8_t* panel, float* sum) {
  const BitportTiles& w = *job.weight;
  if (stays_int(w)) {
    const int64_t steps = ceil_div(count, 64), next = job.block * kInt8Step;
    if (rows > 16) multiply_whole<true>(codes_at(job, row, k), next, steps, panel, sum);
    else multiply_whole<false>(codes_at(job, row, k), next, steps, panel, sum);
    return;
  }
  if (rows > 16) multiply_block<true>(job, tile, row, k, k + count, panel, sum);
  else multiply_block<false>(job, tile, row, k, k + count, panel, sum);
}

AVX512 void settle(const Int8Job& job, int64_t tile, int64_t row, int64_t rows, float* sum) {
  const bool shifts = has_shift(*job.weight);
  for (int64_t half = 0; half < 2; ++half) {
    const PieceScale s = piece_scale(*job.weight, tile, 0, half);
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

const Int8Engine amx_int8_engine = {512, avx512_int8_range, avx512_int8_round, fuses, avx512_int8_fused, unpack,
                                    multiply, stays_int, settle, avx512_int8_finish, begin, end};

}  // namespace bitport
#endif
