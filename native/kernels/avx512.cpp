// The product with 512-bit vectors in float32: for x of every type on machines with AVX-512.
#include "engine.h"
#if BITPORT_X86
#include "avx512.h"

namespace bitport {
namespace {

constexpr int64_t kDepth = 1536;

template <class Format, Fetch How>
AVX512 void decode_as(const BitportTiles& w, const Panel& panel) {
  const auto [tile, k, count, data] = panel;
  const Format format(w);
  const int64_t groups = groups_of(w), bytes = 128 * Format::kBits;
  for (int64_t step = k / 32; step < (k + count) / 32; ++step) {
    const uint8_t* codes = tile_at(w, tile, step);
    fetch<How>(codes, bytes);
    for (int64_t quarter = 0; quarter < 4; ++quarter) {   // 16 rows by 16 columns
      const int64_t half = quarter / 2, column = quarter % 2 * 16;
      const Affine a = affine(w, (tile * groups + group_of(w, step * 32 + column)) * 32 + half * 16);
      float* to = static_cast<float*>(data) + (step * 32 + column - k) * 32 + half * 16;
      for (int64_t line = half * 8 + column / 4, end = line + 4; line < end; ++line, to += 128) {
        const Values v = format.values(codes, line);
        for (int c = 0; c < 4; ++c) _mm512_store_ps(to + c * 32, _mm512_mul_ps(_mm512_sub_ps(v.c[c], a.shift), a.scale));
      }
    }
  }
}

// panel [count][32]
void decode(const BitportTiles& w, const Panel& panel) {
  with_fetch([&](auto how) { BITPORT_WITH_CODES(w, (decode_as<Format, how>(w, panel))) });
}

// R rows of x times a panel; while they are multiplied, as many after them are fetched, unless `next` is null. Every loop
// over rows is unrolled: g++ keeps only arrays with constant indices in registers.
template <int R>
AVX512 void multiply_rows(const float* x, const float* next, int64_t steps, const float* panel, float* sum) {
  __m512 a[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < 2; ++j) a[r][j] = _mm512_load_ps(sum + r * 32 + j * 16);
  for (int64_t step = 0; step < steps; ++step, x += kPassing * 32) {
    if (next) {
#pragma GCC unroll 32
      for (int line = 0; line < R * 2; ++line) __builtin_prefetch(next + line * 16, 0, kToL1);
      next += kPassing * 32;
    }
#pragma GCC unroll 2
    for (int64_t i = 0; i < 32; ++i, panel += 32) {
      const __m512 b0 = _mm512_load_ps(panel), b1 = _mm512_load_ps(panel + 16);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const __m512 value = _mm512_set1_ps(x[r * 32 + i]);
        a[r][0] = _mm512_fmadd_ps(value, b0, a[r][0]);
        a[r][1] = _mm512_fmadd_ps(value, b1, a[r][1]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < 2; ++j) _mm512_store_ps(sum + r * 32 + j * 16, a[r][j]);
}

constexpr void (*kByRows[kPassing])(const float*, const float*, int64_t, const float*, float*) = {
    multiply_rows<1>, multiply_rows<2>, multiply_rows<3>, multiply_rows<4>,  multiply_rows<5>,  multiply_rows<6>,
    multiply_rows<7>, multiply_rows<8>, multiply_rows<9>, multiply_rows<10>, multiply_rows<11>, multiply_rows<12>};

void multiply(const Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum) {
  const float* x = static_cast<const float*>(job.rows) + job.at(row, panel.k);
  if (panel.k == 0) std::memset(sum, 0, size_t(rows) * 128);
  kByRows[rows - 1](x, after<float>(job, row, panel.k), panel.count / 32, static_cast<const float*>(panel.data), sum);
}

constexpr int64_t kRows = 4;   // rows of x multiplied at once without a panel

// R rows of x times a tile as it is read: unscaled sums of a piece in registers, several (C) for few rows, since a single
// one would be bound by latency. A zero point acts on the sums or, Shifts, on the codes. Every loop over sums is
// unrolled: g++ keeps only arrays with constant indices in registers.
template <class Format, int R, Fetch How, bool Shifts>
AVX512 void fused_rows(const Job& job, int64_t tile, int64_t row, float* sum) {
  constexpr int C = kRows / R;
  const BitportTiles& w = *job.weight;
  const Format format(w);
  const int64_t summed = summed_columns(w, false), pieces = pieces_of(w, summed), bytes = 128 * Format::kBits;
  const float* const rows = static_cast<const float*>(job.rows) + job.at(row, 0);
  std::memset(sum, 0, R * 128);
  for (Pieces piece(w, summed, 0); piece.begin < w.k; piece.next()) {
    const int64_t scales = (tile * groups_of(w) + piece.group) * 32;
    __m512 shift[2];
    if (Shifts) shift[0] = affine(w, scales).shift, shift[1] = affine(w, scales + 16).shift;
    __m512 part[R][2][C];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) part[r][0][c] = part[r][1][c] = _mm512_setzero_ps();
    for (int64_t k = piece.begin, end = piece.end < w.k ? piece.end : steps_of(w) * 32; k < end; k += 16) {
      const uint8_t* codes = tile_at(w, tile, k / 32);
      const int64_t odd = k / 16 & 1;
      const float* x = rows + k / 32 * job.block * 32 + odd * 16;
      fetch<How>(codes + odd * bytes / 2, bytes / 2);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        const int h = i / 4, line = i % 4;
        Values v = format.values(codes, h * 8 + odd * 4 + line);
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c)
          if (Shifts) v.c[c] = _mm512_sub_ps(v.c[c], shift[h]);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
          for (int c = 0; c < 4; ++c) {
            __m512& to = part[r][h][c % C];
            to = _mm512_fmadd_ps(_mm512_set1_ps(x[r * 32 + line * 4 + c]), v.c[c], to);
          }
      }
    }
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const Affine a = affine(w, scales + h * 16);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        __m512 s = part[r][h][0];
#pragma GCC unroll 4
        for (int c = 1; c < C; ++c) s = _mm512_add_ps(s, part[r][h][c]);
        if (!Shifts && w.zero)
          s = _mm512_fnmadd_ps(a.shift, _mm512_set1_ps(job.sums[(row + r) * pieces + piece.index]), s);
        float* to = sum + r * 32 + h * 16;
        _mm512_store_ps(to, _mm512_fmadd_ps(s, a.scale, _mm512_load_ps(to)));
      }
    }
  }
}

template <class Format, Fetch How, bool Shifts>
void fused_by(const Job& job, int64_t tile, float* sum) {
  constexpr void (*kMultiply[kRows])(const Job&, int64_t, int64_t, float*) = {
      fused_rows<Format, 1, How, Shifts>, fused_rows<Format, 2, How, Shifts>, fused_rows<Format, 3, How, Shifts>,
      fused_rows<Format, 4, How, Shifts>};
  by_few(job.m, job.block, kRows, [&](int64_t row, int64_t count) { kMultiply[count - 1](job, tile, row, sum + row * 32); });
}

// The zero point of many bits may be far from the middle, so that sums of codes and of zero points cancel.
template <class Format, Fetch How>
void fused_as(const Job& job, int64_t tile, float* sum) {
  constexpr bool kCancels = Format::kInteger && Format::kBits > 4;
  if (kCancels && job.weight->zero) return fused_by<Format, How, kCancels>(job, tile, sum);
  fused_by<Format, How, false>(job, tile, sum);
}

void fused(const Job& job, int64_t tile, void*, float* sum) {
  with_fetch([&](auto how) { BITPORT_WITH_CODES(*job.weight, (fused_as<Format, how>(job, tile, sum))) });
}

// Measured: a panel costs more for codes of 8 bits.
bool fuses(const BitportTiles& w, int64_t m) { return m <= (w.bits == 8 ? 2 * kRows : kRows); }

}  // namespace

AVX512 void avx512_widen(const void* from, int32_t type, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) _mm512_storeu_ps(to + i, load16(from, type, i));
  for (; i < count; ++i) to[i] = load_number(from, type, i);
}

// 32 two-byte numbers: a cache line.
AVX512_INLINE __m512i line_of(const float* sum, const float* bias, int32_t type) {
  __m512 low = _mm512_load_ps(sum), high = _mm512_load_ps(sum + 16);
  if (bias) {
    low = _mm512_add_ps(low, _mm512_loadu_ps(bias));
    high = _mm512_add_ps(high, _mm512_loadu_ps(bias + 16));
  }
  const auto half = [&](__m512 v) AVX512 {
    return type == BITPORT_BF16 ? bf16_of(v) : _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  };
  return _mm512_inserti64x4(_mm512_castsi256_si512(half(low)), half(high), 1);
}

AVX512 void avx512_store(const float* sum, int64_t count, const float* bias, void* y, int32_t type) {
  if (count == 32 && type != BITPORT_F32) return _mm512_storeu_si512(y, line_of(sum, bias, type));
  for (int64_t j = 0; j < count; j += 16) {
    const __mmask16 mask = count - j < 16 ? __mmask16((1u << (count - j)) - 1) : __mmask16(0xffff);
    __m512 v = _mm512_load_ps(sum + j);
    if (bias) v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, bias + j));
    if (type == BITPORT_F32) {
      _mm512_mask_storeu_ps(static_cast<float*>(y) + j, mask, v);
    } else {
      const __m256i half =
          type == BITPORT_BF16 ? bf16_of(v) : _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      _mm256_mask_storeu_epi16(static_cast<uint16_t*>(y) + j, mask, half);
    }
  }
}

AVX512 void avx512_stream(const float* sum, const float* bias, void* y, int32_t type) {
  _mm512_stream_si512(static_cast<__m512i*>(y), line_of(sum, bias, type));
}

const Engine avx512_engine = {
    false, kDepth, kPassing, {}, avx512_widen, decode, nullptr, nullptr, multiply, nullptr, fuses, fused, avx512_store,
    nullptr, nullptr, nullptr};

}  // namespace bitport
#endif
