// The product with 512-bit vectors: in float32, and with vdpbf16ps for a few rows of bfloat16.
#include "engine.h"
#if BITPORT_X86
#include "avx512.h"

namespace bitport {
namespace {

// The four columns of a line for 16 rows. Two bytes of a row, as one lane, are its columns 0, 2, 1, 3 from the low
// nibble up; vpermps looks at the low four bits of an index alone, so that a shift is all it takes.
struct Line { __m512 c0, c1, c2, c3; };

AVX512_INLINE Line read_line(const uint8_t* codes, __m512 table, const Affine& a) {
  const __m512i pairs = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
  const __m512 c0 = _mm512_permutexvar_ps(pairs, table);
  const __m512 c2 = _mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), table);
  const __m512 c1 = _mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 8), table);
  const __m512 c3 = _mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 12), table);
  return {_mm512_mul_ps(_mm512_sub_ps(c0, a.zero), a.scale), _mm512_mul_ps(_mm512_sub_ps(c1, a.zero), a.scale),
          _mm512_mul_ps(_mm512_sub_ps(c2, a.zero), a.scale), _mm512_mul_ps(_mm512_sub_ps(c3, a.zero), a.scale)};
}

// Two columns to bfloat16, the even one in the low half. What lies in the middle goes away from zero in even columns and
// towards it in odd ones: half the work of a rounding to even, and without a bias too.
AVX512_INLINE __m512i round_pairs(__m512 even, __m512 odd) {
  const __m512i e = _mm512_add_epi32(_mm512_castps_si512(even), _mm512_set1_epi32(0x8000));
  const __m512i o = _mm512_add_epi32(_mm512_castps_si512(odd), _mm512_set1_epi32(0x7fff));
  constexpr int kSelect = 0xca;   // first ? second : third
  return _mm512_ternarylogic_epi32(_mm512_set1_epi32(int(0xffff0000)), o, _mm512_srli_epi32(e, 16), kSelect);
}

AVX512_INLINE void prefetch_ahead(const uint8_t* codes) {
  for (int i = 0; i < 256; i += 64) _mm_prefetch(reinterpret_cast<const char*>(codes) + 4096 + i, _MM_HINT_T0);
}

// panel [count][32]
AVX512 void decode(const BitportTiles4& w, int64_t tile, int64_t k, int64_t count, void* panel) {
  const __m512 table = _mm512_loadu_ps(w.table);
  for (int64_t step = k / 32; step < (k + count) / 32; ++step)
    for (int64_t half = 0; half < 2; ++half) {
      const uint8_t* codes = w.codes + (tile * (w.k / 32) + step) * 512 + half * 256;
      const Affine a = affine(w, (tile * (w.k / w.group) + step * 32 / w.group) * 32 + half * 16);
      float* to = static_cast<float*>(panel) + (step * 32 - k) * 32 + half * 16;
      prefetch_ahead(codes);
      for (int64_t line = 0; line < 8; ++line, to += 128) {
        const Line v = read_line(codes + line * 32, table, a);
        _mm512_store_ps(to, v.c0);
        _mm512_store_ps(to + 32, v.c1);
        _mm512_store_ps(to + 64, v.c2);
        _mm512_store_ps(to + 96, v.c3);
      }
    }
}

template <int R>
AVX512_INLINE void multiply_rows(const float* x, int64_t stride, int64_t steps, const float* panel, float* sum) {
  __m512 a[R][2];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < 2; ++j) a[r][j] = _mm512_load_ps(sum + r * 32 + j * 16);
  for (int64_t step = 0; step < steps; ++step, x += stride)
    for (int64_t i = 0; i < 32; ++i, panel += 32) {
      const __m512 b0 = _mm512_load_ps(panel), b1 = _mm512_load_ps(panel + 16);
      for (int r = 0; r < R; ++r) {
        const __m512 value = _mm512_set1_ps(x[r * 32 + i]);
        a[r][0] = _mm512_fmadd_ps(value, b0, a[r][0]);
        a[r][1] = _mm512_fmadd_ps(value, b1, a[r][1]);
      }
    }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < 2; ++j) _mm512_store_ps(sum + r * 32 + j * 16, a[r][j]);
}

AVX512_INLINE __m512bh pair_of(const uint16_t* x) {   // two neighbours in K, for all 16 rows
  int32_t bits;
  __builtin_memcpy(&bits, x, 4);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(bits));
}

AVX512 void multiply(const Job& job, int64_t row, int64_t rows, int64_t k, int64_t count, const void* panel, float* sum) {
  const int64_t stride = job.block * 32, steps = count / 32;
  const float* weights = static_cast<const float*>(panel);
  for (int64_t r = 0; r < rows;) {
    const int64_t block = (row + r) / job.block, line = (row + r) % job.block;
    const float* x =
        static_cast<const float*>(job.rows) + (block * (job.weight->k / 32) + k / 32) * stride + line * 32;
    const int64_t left = rows - r < job.block - line ? rows - r : job.block - line;
    float* to = sum + r * 32;
    if (left >= 8) { multiply_rows<8>(x, stride, steps, weights, to); r += 8; }
    else if (left >= 4) { multiply_rows<4>(x, stride, steps, weights, to); r += 4; }
    else if (left >= 2) { multiply_rows<2>(x, stride, steps, weights, to); r += 2; }
    else { multiply_rows<1>(x, stride, steps, weights, to); r += 1; }
  }
}

// R rows of x against a tile as it is read: no panel, unscaled sums of a group in registers. Few rows get several
// sums each (C), for one alone would wait for its own latency.
template <int R>
AVX512 void fused_rows(const Job& job, int64_t tile, float* sum) {
  constexpr int C = R <= 2 ? 4 : R <= 4 ? 2 : 1;
  const BitportTiles4& w = *job.weight;
  const int64_t groups = w.k / w.group, steps = w.group / 32;
  const uint16_t* x = static_cast<const uint16_t*>(job.rows);
  const uint8_t* codes = w.codes + tile * w.k * 16;
  alignas(64) uint16_t entries[32];   // twice the table, since vpermw looks at five bits of an index
  for (int i = 0; i < 32; ++i) entries[i] = bf16_of_float(w.table[i & 15]);
  const __m512i table = _mm512_load_si512(entries);
  __m512 total[R][2];
  for (int r = 0; r < R; ++r) total[r][0] = total[r][1] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g) {
    __m512 part[2][R][C];
    for (int h = 0; h < 2; ++h)
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) part[h][r][c] = _mm512_setzero_ps();
    for (int64_t step = 0; step < steps; ++step, codes += 512, x += job.block * 32) {
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        prefetch_ahead(codes + h * 256);
#pragma GCC unroll 8
        for (int line = 0; line < 8; ++line) {
          const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + h * 256 + line * 32));
          const __m512i index = _mm512_cvtepu8_epi16(bytes);
          const __m512bh low = reinterpret_cast<__m512bh>(_mm512_permutexvar_epi16(index, table));
          const __m512bh high =
              reinterpret_cast<__m512bh>(_mm512_permutexvar_epi16(_mm512_srli_epi16(index, 4), table));
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            __m512 &a = part[h][r][line * 2 % C], &b = part[h][r][(line * 2 + 1) % C];
            a = _mm512_dpbf16_ps(a, low, pair_of(x + r * 32 + line * 4));
            b = _mm512_dpbf16_ps(b, high, pair_of(x + r * 32 + line * 4 + 2));
          }
        }
      }
    }
    for (int h = 0; h < 2; ++h) {
      const Affine a = affine(w, (tile * groups + g) * 32 + h * 16);
      for (int r = 0; r < R; ++r) {
        __m512 s = part[h][r][0];
        for (int c = 1; c < C; ++c) s = _mm512_add_ps(s, part[h][r][c]);
        if (w.zero) s = _mm512_fnmadd_ps(a.zero, _mm512_set1_ps(job.sums[r * groups + g]), s);
        total[r][h] = _mm512_fmadd_ps(s, a.scale, total[r][h]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int h = 0; h < 2; ++h) _mm512_store_ps(sum + r * 32 + h * 16, total[r][h]);
}

}  // namespace

AVX512 void avx512_widen(const void* from, int32_t type, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) _mm512_storeu_ps(to + i, load16(from, type, i));
  for (; i < count; ++i) to[i] = load_number(from, type, i);
}

// panel [count / 32][2 halves of 16 rows][16 pairs of columns][16 rows][2]: what AMX takes as its second operand
AVX512 void avx512_decode_bf16(const BitportTiles4& w, int64_t tile, int64_t k, int64_t count, void* panel) {
  const __m512 table = _mm512_loadu_ps(w.table);
  for (int64_t step = k / 32; step < (k + count) / 32; ++step)
    for (int64_t half = 0; half < 2; ++half) {
      const uint8_t* codes = w.codes + (tile * (w.k / 32) + step) * 512 + half * 256;
      const Affine a = affine(w, (tile * (w.k / w.group) + step * 32 / w.group) * 32 + half * 16);
      uint16_t* to = static_cast<uint16_t*>(panel) + (step * 32 - k) * 32 + half * 512;
      prefetch_ahead(codes);
      for (int64_t line = 0; line < 8; ++line, to += 64) {
        const Line v = read_line(codes + line * 32, table, a);
        _mm512_store_si512(to, round_pairs(v.c0, v.c1));
        _mm512_store_si512(to + 32, round_pairs(v.c2, v.c3));
      }
    }
}

AVX512 void avx512_fused_bf16(const Job& job, int64_t tile, void*, float* sum) {
  switch (job.m) {
    case 1: return fused_rows<1>(job, tile, sum);
    case 2: return fused_rows<2>(job, tile, sum);
    case 3: return fused_rows<3>(job, tile, sum);
    default: return fused_rows<4>(job, tile, sum);
  }
}

AVX512 void avx512_store(const float* sum, int64_t count, const float* bias, void* y, int32_t type) {
  for (int64_t j = 0; j < count; j += 16) {
    const __mmask16 mask = count - j < 16 ? __mmask16((1u << (count - j)) - 1) : __mmask16(0xffff);
    __m512 v = _mm512_load_ps(sum + j);
    if (bias) v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, bias + j));
    if (type == BITPORT_F32) {
      _mm512_mask_storeu_ps(static_cast<float*>(y) + j, mask, v);
    } else {
      const __m256i half = type == BITPORT_BF16 ? reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v))
                                                : _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      _mm256_mask_storeu_epi16(static_cast<uint16_t*>(y) + j, mask, half);
    }
  }
}

const Engine avx512_engine = {
    false, 256, 0, avx512_widen, decode, multiply, nullptr, avx512_store, nullptr, nullptr};
const Engine avx512_bf16_engine = {
    true, 256, kVectorRows, avx512_widen, nullptr, nullptr, avx512_fused_bf16, avx512_store, nullptr, nullptr};

}  // namespace bitport
#endif
