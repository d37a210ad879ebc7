// The product in bfloat16: panels for the tile registers, and a few rows by vdpbf16ps.
#include "engine.h"
#if BITPORT_X86
#include "avx512.h"
#include "avx512_bf16.h"

namespace bitport {
namespace {

// Two columns to bfloat16, the even one in the low half. What lies in the middle goes away from zero in even columns and
// towards it in odd ones: half the work of a rounding to even, and without a bias too.
AVX512_INLINE __m512i round_pairs(__m512 even, __m512 odd) {
  const __m512i e = _mm512_add_epi32(_mm512_castps_si512(even), _mm512_set1_epi32(0x8000));
  const __m512i o = _mm512_add_epi32(_mm512_castps_si512(odd), _mm512_set1_epi32(0x7fff));
  constexpr int kSelect = 0xca;   // first ? second : third
  return _mm512_ternarylogic_epi32(_mm512_set1_epi32(int(0xffff0000)), o, _mm512_srli_epi32(e, 16), kSelect);
}

template <class Format>
AVX512 void decode_as(const BitportTiles& w, int64_t tile, int64_t k, int64_t count, uint16_t* panel) {
  const Format format(w);
  const int64_t groups = groups_of(w), bytes = 128 * w.bits;
  for (int64_t step = k / 32; step < (k + count) / 32; ++step) {
    const uint8_t* codes = tile_at(w, tile, step);
    prefetch_ahead(codes, bytes);
    for (int64_t quarter = 0; quarter < 4; ++quarter) {   // 16 rows by 16 columns
      const int64_t half = quarter / 2, column = quarter % 2 * 16;
      const Affine a = affine(w, (tile * groups + group_of(w, step * 32 + column)) * 32 + half * 16);
      uint16_t* to = panel + (step * 32 - k) * 32 + half * 512 + column * 16;
      for (int64_t line = half * 8 + column / 4, end = line + 4; line < end; ++line, to += 64) {
        Values v = format.values(codes, line);
        for (int c = 0; c < 4; ++c) v.c[c] = _mm512_mul_ps(_mm512_sub_ps(v.c[c], a.shift), a.scale);
        _mm512_store_si512(to, round_pairs(v.c[0], v.c[1]));
        _mm512_store_si512(to + 32, round_pairs(v.c[2], v.c[3]));
      }
    }
  }
}

template <class Format>
AVX512 void look_up_as(const BitportTiles& w, int64_t tile, int64_t k, int64_t count, uint16_t* to) {
  const Format format(w);
  for (int64_t step = k / 32; step < (k + count) / 32; ++step) {
    const uint8_t* codes = tile_at(w, tile, step);
    prefetch_ahead(codes, 128 * w.bits);
#pragma GCC unroll 16
    for (int64_t line = 0; line < 16; ++line, to += 64) {
      const Pairs p = format.pairs(codes, line);
      _mm512_store_si512(to, p.c[0]);
      _mm512_store_si512(to + 32, p.c[1]);
    }
  }
}

AVX512_BF16_INLINE __m512bh pair_of(const uint16_t* x) {   // two neighbours in K, for all 16 rows
  int32_t bits;
  __builtin_memcpy(&bits, x, 4);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(bits));
}

// R rows of x against a tile as it is read: no panel, unscaled sums of a group in registers. Few rows get several
// sums each (C), for one alone would wait for its own latency.
template <class Format, int R>
AVX512_BF16 void fused_rows(const Job& job, int64_t tile, float* sum) {
  constexpr int C = R <= 2 ? 4 : 2;
  const BitportTiles& w = *job.weight;
  const Format format(w);
  const int64_t groups = groups_of(w), units = steps_of(w) * 2, bytes = 128 * w.bits;   // a unit is 16 columns
  const uint16_t* rows = static_cast<const uint16_t*>(job.rows);
  __m512 total[R][2];
  for (int r = 0; r < R; ++r) total[r][0] = total[r][1] = _mm512_setzero_ps();
  for (int64_t g = 0, unit = 0; g < groups; ++g) {
    __m512 part[2][R][C];
    for (int h = 0; h < 2; ++h)
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) part[h][r][c] = _mm512_setzero_ps();
    for (const int64_t end = g + 1 < groups ? (g + 1) * w.group / 16 : units; unit < end; ++unit) {
      const uint8_t* codes = tile_at(w, tile, unit / 2);
      const int64_t odd = unit & 1;
      const uint16_t* x = rows + unit / 2 * job.block * 32 + odd * 16;
      prefetch_ahead(codes + odd * bytes / 2, bytes / 2);
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h)
#pragma GCC unroll 4
        for (int line = 0; line < 4; ++line) {
          const Pairs p = format.pairs(codes, h * 8 + odd * 4 + line);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) {
            __m512 &a = part[h][r][line * 2 % C], &b = part[h][r][(line * 2 + 1) % C];
            a = _mm512_dpbf16_ps(a, reinterpret_cast<__m512bh>(p.c[0]), pair_of(x + r * 32 + line * 4));
            b = _mm512_dpbf16_ps(b, reinterpret_cast<__m512bh>(p.c[1]), pair_of(x + r * 32 + line * 4 + 2));
          }
        }
    }
    for (int h = 0; h < 2; ++h) {
      const Affine a = affine(w, (tile * groups + g) * 32 + h * 16);
      for (int r = 0; r < R; ++r) {
        __m512 s = part[h][r][0];
        for (int c = 1; c < C; ++c) s = _mm512_add_ps(s, part[h][r][c]);
        if (w.zero) s = _mm512_fnmadd_ps(a.shift, _mm512_set1_ps(job.sums[r * groups + g]), s);
        total[r][h] = _mm512_fmadd_ps(s, a.scale, total[r][h]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int h = 0; h < 2; ++h) _mm512_store_ps(sum + r * 32 + h * 16, total[r][h]);
}

template <class Format>
void fused_as(const Job& job, int64_t tile, float* sum) {
  switch (job.m) {
    case 1: return fused_rows<Format, 1>(job, tile, sum);
    case 2: return fused_rows<Format, 2>(job, tile, sum);
    case 3: return fused_rows<Format, 3>(job, tile, sum);
    default: return fused_rows<Format, 4>(job, tile, sum);
  }
}

bool fuses(const BitportTiles&, int64_t m) { return m <= kVectorRows; }

}  // namespace

void avx512_decode_bf16(const BitportTiles& w, int64_t tile, int64_t k, int64_t count, void* panel) {
  BITPORT_WITH_CODES(w, decode_as<Format>(w, tile, k, count, static_cast<uint16_t*>(panel)))
}

void avx512_look_up_bf16(const BitportTiles& w, int64_t tile, int64_t k, int64_t count, void* panel) {
  BITPORT_WITH_CODES(w, look_up_as<Format>(w, tile, k, count, static_cast<uint16_t*>(panel)))
}

void avx512_fused_bf16(const Job& job, int64_t tile, void*, float* sum) {
  BITPORT_WITH_CODES(*job.weight, fused_as<Format>(job, tile, sum))
}

const Engine avx512_bf16_engine = {
    true,  256,  avx512_widen, nullptr, nullptr, nullptr, nullptr, fuses, avx512_fused_bf16, avx512_store, nullptr,
    nullptr};

}  // namespace bitport
#endif
