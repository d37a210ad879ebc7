// The product with int8 inputs by vpdpbusd: unsigned codes times signed x, so that sums start at -center times the sum
// of x.
#include "int8.h"
#if BITPORT_X86
#include "int8_avx512.h"

namespace bitport {
namespace {

AVX512_INLINE __m512i four_of(const int8_t* x) {   // neighbours in K, for all 16 rows of the weight
  int32_t bits;
  __builtin_memcpy(&bits, x, 4);
  return _mm512_set1_epi32(bits);
}

AVX512_INLINE __m512i start_of(int32_t center, float sum) { return _mm512_set1_epi32(-center * int32_t(sum)); }

AVX512_INLINE void add_piece(const PieceScale& s, bool shifts, float x_sum, __m512i whole, float* to) {
  __m512 part = _mm512_cvtepi32_ps(whole);
  if (shifts) part = _mm512_fnmadd_ps(s.shift, _mm512_set1_ps(x_sum), part);
  _mm512_store_ps(to, _mm512_fmadd_ps(part, s.scale, _mm512_load_ps(to)));
}

// R rows of x times a tile as it is read. Few rows have several sums each (C), since a single one would be bound by
// latency. Rows past the last repeat it and are not stored. Every loop over sums is unrolled, as in multiply_rows.
template <int Bits, int R, Fetch How>
AVX512_VNNI void fused_rows(const Int8Job& job, int64_t tile, int64_t row, float* sum) {
  constexpr int C = R <= 4 ? 4 / R : 1;
  const BitportTiles& w = *job.weight;
  const bool shifts = has_shift(w);
  const int64_t rows = job.m - row < R ? job.m - row : R, bytes = 128 * Bits;
  const int8_t* x[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) x[r] = codes_at(job, row + (r < rows ? r : rows - 1), 0);
  for (int64_t i = 0; i < rows * 32; i += 16) _mm512_store_ps(sum + i, _mm512_setzero_ps());
  const int64_t scales = tile * groups_of(w) * 32;
  for (Pieces piece(w, job.stretch, 0); piece.begin < w.k; piece.next()) {
    const float* sums = sums_at(job, row, piece.index);
    __m512i part[R][2][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      part[r][0][0] = part[r][1][0] = start_of(center(w), sums[r < rows ? r : rows - 1]);
#pragma GCC unroll 4
      for (int c = 1; c < C; ++c) part[r][0][c] = part[r][1][c] = _mm512_setzero_si512();
    }
    for (int64_t k = piece.begin; k < piece.end; k += 16) {
      const uint8_t* codes = tile_at(w, tile, k / 32);
      const int64_t odd = k / 16 & 1, at = k / kInt8Step * job.block * kInt8Step + k % kInt8Step;
      fetch<How>(codes + odd * bytes / 2, bytes / 2);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        // many rows of x: both halves of the tile by the same numbers, which stay in registers
        const int h = R > 4 ? i % 2 : i / 4, line = R > 4 ? i / 2 : i % 4;
        const __m512i quads = read_quads<Bits>(codes, h * 8 + odd * 4 + line);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          __m512i& to = part[r][h][line % C];
          to = _mm512_dpbusd_epi32(to, quads, four_of(x[r] + at + line * 4));
        }
      }
    }
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const PieceScale s = piece_scale(w, scales + piece.group * 32 + h * 16);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        if (r >= rows) break;
        __m512i whole = part[r][h][0];
#pragma GCC unroll 4
        for (int c = 1; c < C; ++c) whole = _mm512_add_epi32(whole, part[r][h][c]);
        add_piece(s, shifts, sums[r], whole, sum + r * 32 + h * 16);
      }
    }
  }
}

template <int Bits, Fetch How>
void fused_as(const Int8Job& job, int64_t tile, float* sum) {
  for (int64_t row = 0; row < job.m; row += 8, sum += 8 * 32) {
    const int64_t left = job.m - row;
    if (left > 4) fused_rows<Bits, 8, How>(job, tile, row, sum);
    else if (left > 2) fused_rows<Bits, 4, How>(job, tile, row, sum);
    else if (left > 1) fused_rows<Bits, 2, How>(job, tile, row, sum);
    else fused_rows<Bits, 1, How>(job, tile, row, sum);
  }
}

// panel [K / 4][32 rows][4]
template <int Bits>
AVX512 void unpack_as(const BitportTiles& w, const Panel& panel) {
  uint8_t* to = static_cast<uint8_t*>(panel.data);
  for (int64_t step = panel.k / 32; step < ceil_div(panel.k + panel.count, 32); ++step) {
    const uint8_t* codes = tile_at(w, panel.tile, step);
#pragma GCC unroll 8
    for (int64_t line = 0; line < 8; ++line, to += 128) {
      _mm512_store_si512(to, read_quads<Bits>(codes, line));
      _mm512_store_si512(to + 64, read_quads<Bits>(codes, 8 + line));
    }
  }
}

void unpack(const BitportTiles& w, const Panel& panel) {
  BITPORT_WITH_BITS(w.bits, unpack_as<Bits>(w, panel))
}

// R rows times a panel. Every loop over rows is unrolled: g++ keeps only arrays with constant indices in registers.
template <int R>
AVX512_VNNI void multiply_rows(const Int8Job& job, const Panel& stretch, int64_t row, float* sum) {
  const uint8_t* panel = static_cast<const uint8_t*>(stretch.data);
  const BitportTiles& w = *job.weight;
  const bool shifts = has_shift(w);
  const int8_t* x = codes_at(job, row, 0);
  const int8_t* next = row + R < job.m ? codes_at(job, row + R, 0) : nullptr;   // the rows that pass by after these
  const int64_t scales = stretch.tile * groups_of(w) * 32, last = stretch.k + stretch.count;
  for (Pieces piece(w, job.stretch, stretch.k); piece.begin < last; piece.next()) {
    const float* sums = sums_at(job, row, piece.index);
    __m512i part[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) part[r][0] = part[r][1] = start_of(center(w), sums[r]);
    for (int64_t k = piece.begin; k < piece.end;) {
      const int64_t step = k / kInt8Step * job.block * kInt8Step;
      const int8_t* from = x + step + k % kInt8Step;
      const int64_t end = smaller((k / kInt8Step + 1) * kInt8Step, piece.end);
      if (next)
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) __builtin_prefetch(next + step + r * kInt8Step, 0, kToL1);
#pragma GCC unroll 4
      for (; k < end; k += 4, from += 4, panel += 128) {
        const __m512i low = _mm512_load_si512(panel), high = _mm512_load_si512(panel + 64);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const __m512i four = four_of(from + r * kInt8Step);
          part[r][0] = _mm512_dpbusd_epi32(part[r][0], low, four);
          part[r][1] = _mm512_dpbusd_epi32(part[r][1], high, four);
        }
      }
    }
    const int64_t at = scales + piece.group * 32;
    const PieceScale s0 = piece_scale(w, at), s1 = piece_scale(w, at + 16);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      add_piece(s0, shifts, sums[r], part[r][0], sum + r * 32);
      add_piece(s1, shifts, sums[r], part[r][1], sum + r * 32 + 16);
    }
  }
}

constexpr void (*kMultiply[kPassing])(const Int8Job&, const Panel&, int64_t, float*) = {
    multiply_rows<1>, multiply_rows<2>, multiply_rows<3>, multiply_rows<4>,  multiply_rows<5>,  multiply_rows<6>,
    multiply_rows<7>, multiply_rows<8>, multiply_rows<9>, multiply_rows<10>, multiply_rows<11>, multiply_rows<12>};

void multiply(const Int8Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum) {
  if (panel.k == 0) std::memset(sum, 0, size_t(rows) * 128);
  kMultiply[rows - 1](job, panel, row, sum);
}

bool fuses(const BitportTiles&, int64_t m) { return m <= 8; }

}  // namespace

void avx512_int8_fused(const Int8Job& job, int64_t tile, void*, float* sum) {
  with_fetch([&](auto how) { BITPORT_WITH_BITS(job.weight->bits, (fused_as<Bits, how>(job, tile, sum))) });
}

const Int8Engine avx512_int8_engine = {6144, 1, kPassing, {}, avx512_int8_range, avx512_int8_round, fuses, avx512_int8_fused, unpack,
                                       multiply, nullptr, nullptr, nullptr, avx512_int8_finish, false, nullptr, nullptr};

}  // namespace bitport
#endif
