// Shared by the bfloat16 products: panels, sums with a scale for the whole row, and few rows by vdpbf16ps.
#include "engine.h"
#if BITPORT_X86
#include "avx512_bf16.h"

namespace bitport {
namespace {

// One half of 16 rows after the other: scales are prepared once for all columns they apply to.
template <class Format, class By>
AVX512_BF16 void decode_as(const BitportTiles& w, const Panel& panel) {
  const Format format(w);
  const int64_t groups = groups_of(w), end = panel.k + panel.count;
  for (int64_t half = 0; half < 2; ++half)
    for (int64_t k = panel.k; k < end;) {
      const int64_t group = group_of(w, k), group_end = group + 1 < groups ? smaller((group + 1) * w.group, end) : end;
      const By by(w, (panel.tile * groups + group) * 32 + half * 16);
      for (; k < group_end; k += 16) {
        const uint8_t* codes = tile_at(w, panel.tile, k / 32);
        const int64_t odd = k >> 4 & 1, step = (k - panel.k) / 32, first = half * 8 + odd * 4;
        uint16_t* to = static_cast<uint16_t*>(panel.data) + step * 1024 + half * 512 + odd * 256;
        fetch<Fetch::stream>(codes + (half * 2 + odd) * 32 * Format::kBits, 32 * Format::kBits);
#pragma GCC unroll 4
        for (int64_t line = 0; line < 4; ++line) write_line(format, codes, first + line, by, to + line * 64);
      }
    }
}

// By whole tiles, for a few rows that wait for them.
template <class Format, Fetch How>
AVX512_BF16 void look_up_as(const BitportTiles& w, const Panel& panel) {
  const Format format(w);
  uint16_t* to = static_cast<uint16_t*>(panel.data);
  for (int64_t step = panel.k / 32; step < (panel.k + panel.count) / 32; ++step) {
    const uint8_t* codes = tile_at(w, panel.tile, step);
    fetch<How>(codes, 128 * Format::kBits);
#pragma GCC unroll 16
    for (int64_t line = 0; line < 16; ++line, to += 64) write_line(format, codes, line, Unscaled(), to);
  }
}

// R rows of x times a tile as it is read: no panel, unscaled group sums in registers. Few rows have several sums each
// (C), since a single one would be bound by latency. Rows past the last repeat it and are not stored. Every loop over
// sums is unrolled: g++ keeps only arrays with constant indices in registers.
template <class Format, int R, Fetch How>
AVX512_BF16 void fused_rows(const Job& job, int64_t tile, int64_t row, float* sum) {
  constexpr int C = R <= 4 ? 4 / R : 1;
  const BitportTiles& w = *job.weight;
  const Format format(w);
  const int64_t rows = smaller(job.m - row, R), groups = groups_of(w), units = steps_of(w) * 2;   // a unit: 16 columns
  const int64_t bytes = 128 * Format::kBits;
  const uint16_t* x[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) x[r] = static_cast<const uint16_t*>(job.rows) + job.at(row + (r < rows ? r : rows - 1), 0);
  for (int64_t i = 0; i < rows * 32; i += 16) _mm512_store_ps(sum + i, _mm512_setzero_ps());
  for (int64_t g = 0, unit = 0; g < groups; ++g) {
    __m512 part[R][2][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) part[r][0][c] = part[r][1][c] = _mm512_setzero_ps();
    for (const int64_t end = g + 1 < groups ? (g + 1) * w.group / 16 : units; unit < end; ++unit) {
      const uint8_t* codes = tile_at(w, tile, unit / 2);
      const int64_t odd = unit & 1, at = unit / 2 * job.block * 32 + odd * 16;
      fetch<How>(codes + odd * bytes / 2, bytes / 2);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        // several rows of x: both halves of the tile by the same pairs, which stay in registers
        const int h = R > 1 ? i % 2 : i / 4, line = R > 1 ? i / 2 : i % 4;
        const Pairs p = format.pairs(codes, h * 8 + odd * 4 + line);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          __m512 &a = part[r][h][line * 2 % C], &b = part[r][h][(line * 2 + 1) % C];
          a = _mm512_dpbf16_ps(a, reinterpret_cast<__m512bh>(p.c[0]), pair_of(x[r] + at + line * 4));
          b = _mm512_dpbf16_ps(b, reinterpret_cast<__m512bh>(p.c[1]), pair_of(x[r] + at + line * 4 + 2));
        }
      }
    }
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const Affine a = affine(w, (tile * groups + g) * 32 + h * 16);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        if (r >= rows) break;
        __m512 s = part[r][h][0];
#pragma GCC unroll 4
        for (int c = 1; c < C; ++c) s = _mm512_add_ps(s, part[r][h][c]);
        if (w.zero) s = _mm512_fnmadd_ps(a.shift, _mm512_set1_ps(job.sums[(row + r) * groups + g]), s);
        if (job.scales) s = _mm512_mul_ps(s, _mm512_set1_ps(job.scales[g * job.m + row + r]));
        float* to = sum + r * 32 + h * 16;
        _mm512_store_ps(to, _mm512_fmadd_ps(s, a.scale, _mm512_load_ps(to)));
      }
    }
  }
}

template <class Format, Fetch How>
void fused_as(const Job& job, int64_t tile, float* sum) {
  for (int64_t row = 0; row < job.m; row += 8, sum += 8 * 32) switch (job.m - row) {
    case 1: fused_rows<Format, 1, How>(job, tile, row, sum); break;
    case 2: fused_rows<Format, 2, How>(job, tile, row, sum); break;
    case 3: fused_rows<Format, 3, How>(job, tile, row, sum); break;
    case 4: fused_rows<Format, 4, How>(job, tile, row, sum); break;
    case 5: case 6: fused_rows<Format, 6, How>(job, tile, row, sum); break;
    default: fused_rows<Format, 8, How>(job, tile, row, sum);
  }
}

}  // namespace

void avx512_decode_bf16(const BitportTiles& w, const Panel& panel) {
  if (avx512_raises(w, panel)) { BITPORT_WITH_FLOATS(w, (decode_as<Format, Raised>(w, panel))) }
  else { BITPORT_WITH_CODES(w, (decode_as<Format, Twice>(w, panel))) }
}

AVX512 bool avx512_raises(const BitportTiles& w, const Panel& panel) {
  if (w.integer || w.zero || w.scale_type != BITPORT_E8M0) return false;
  const __m512 least = _mm512_set1_ps(0x1p-16f), most = _mm512_set1_ps(0x1p16f);   // float8 is within these limits
  for (int64_t i = 0; w.bits < 8 && i < int64_t(1) << w.bits; i += 16) {
    const __m512 size = _mm512_abs_ps(_mm512_loadu_ps(w.table + i));
    const __mmask16 zeros = _mm512_cmp_ps_mask(size, _mm512_setzero_ps(), _CMP_EQ_OQ);
    const __mmask16 usual = _mm512_cmp_ps_mask(size, least, _CMP_GE_OQ) & _mm512_cmp_ps_mask(size, most, _CMP_LE_OQ);
    if ((zeros | usual) != 0xffff) return false;
  }
  constexpr uint8_t kLowest = 127 - 100, kSpan = 200;   // of the scales
  const int64_t groups = groups_of(w), first = group_of(w, panel.k), last = group_of(w, panel.k + panel.count - 1);
  const uint8_t* scale = static_cast<const uint8_t*>(w.scale) + (panel.tile * groups + first) * 32;
  __mmask32 within = ~__mmask32(0);
  for (int64_t group = first; group <= last; ++group, scale += 32)
    within &= _mm256_cmple_epu8_mask(
        _mm256_sub_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scale)), _mm256_set1_epi8(char(kLowest))),
        _mm256_set1_epi8(char(kSpan)));
  return within == ~__mmask32(0);
}

void avx512_look_up_bf16(const BitportTiles& w, const Panel& panel) {
  with_fetch([&](auto how) { BITPORT_WITH_CODES(w, (look_up_as<Format, how>(w, panel))) });
}

void avx512_fused_bf16(const Job& job, int64_t tile, void*, float* sum) {
  with_fetch([&](auto how) { BITPORT_WITH_CODES(*job.weight, (fused_as<Format, how>(job, tile, sum))) });
}

void avx512_decode_blocks(const BitportTiles& w, const Panel& panel, float* factors) {
  (scales_act_on_blocks(w) ? avx512_look_up_bf16 : avx512_decode_bf16)(w, panel);
  avx512_scales_of_blocks(w, panel, factors);
}

AVX512 void avx512_scales_of_blocks(const BitportTiles& w, const Panel& panel, float* scale) {
  const bool apart = scales_act_on_blocks(w);
  for (int64_t i = 0; i < panel.count; i += kScaled)
    for (int64_t half = 0; half < 2; ++half, scale += 16) {
      const int64_t group = panel.tile * groups_of(w) + group_of(w, panel.k + i);
      _mm512_store_ps(scale, apart ? affine(w, group * 32 + half * 16).scale : _mm512_set1_ps(1.0f));
    }
}

AVX512 void avx512_finish(const Job& job, int64_t tile, int64_t row, int64_t rows, float* sum) {
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

}  // namespace bitport
#endif
