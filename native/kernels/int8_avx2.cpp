// The product with int8 inputs. Few rows: by vpmaddubsw, directly from the codes. It saturates sums of two products at
// 16 bits, which 4-bit digits never reach: wider codes are split into a low digit plus 16 times a high one.
// 15 * 128 * 8 fits, so 8 products of digits are summed before they are widened. More rows: by vpmaddwd, from a panel
// of words. Both sum the pairs of columns that are adjacent in the layout.
#include "int8.h"
#if BITPORT_X86
#include "avx2.h"

namespace bitport {
namespace {

AVX2 void range(const void* x, int32_t type, int64_t count, float* low, float* high) {
  __m256 least = _mm256_setzero_ps(), most = least, odd = least;
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 v = load8(x, type, i);
    least = _mm256_min_ps(least, v);
    most = _mm256_max_ps(most, v);
    odd = _mm256_or_ps(odd, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  }
  alignas(32) float lows[8], highs[8];
  _mm256_store_ps(lows, least);
  _mm256_store_ps(highs, most);
  bool nan = _mm256_movemask_ps(odd);
  float lowest = 0, highest = 0;
  const auto take = [&](float small, float large) {
    if (small < lowest) lowest = small;
    if (large > highest) highest = large;
  };
  for (int j = 0; j < 8; ++j) take(lows[j], highs[j]);
  for (; i < count; ++i) {
    const float value = load_number(x, type, i);
    nan |= value != value;
    take(value, value);
  }
  *low = nan ? float_of_bits(0x7fc00000u) : lowest;
  *high = nan ? float_of_bits(0x7fc00000u) : highest;
}

AVX2 int32_t round(const void* x, int32_t type, int64_t count, Rounding rounding, int8_t* to, int64_t from,
                   int64_t next) {
  const __m256 scale = _mm256_set1_ps(rounding.scale), zero = _mm256_set1_ps(rounding.zero);
  const __m256 most = _mm256_set1_ps(127), least = _mm256_set1_ps(-128);
  __m256i sum = _mm256_setzero_si256();
  for (int64_t i = 0, at = from; i < ceil_div(count, 16) * 16; i += 8, at += 8) {
    __m256 v;
    __m256i inside = _mm256_set1_epi32(-1);
    if (count - i >= 8) {
      v = load8(x, type, i);
    } else {
      alignas(32) float some[8] = {};
      alignas(32) int32_t which[8] = {};
      for (int64_t j = 0; i + j < count; ++j) { some[j] = load_number(x, type, i + j); which[j] = -1; }
      v = _mm256_load_ps(some);
      inside = _mm256_load_si256(reinterpret_cast<const __m256i*>(which));
    }
    __m256 steps = _mm256_div_ps(v, scale);
    steps = _mm256_and_ps(steps, _mm256_cmp_ps(steps, steps, _CMP_ORD_Q));   // NaN: 0
    steps = _mm256_add_ps(_mm256_round_ps(steps, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), zero);
    steps = _mm256_max_ps(least, _mm256_min_ps(most, steps));
    const __m256i codes = _mm256_and_si256(_mm256_cvtps_epi32(steps), inside);
    sum = _mm256_add_epi32(sum, codes);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to + at / kInt8Step * next + at % kInt8Step),
                     _mm_packs_epi16(words, words));
  }
  alignas(32) int32_t sums[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(sums), sum);
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// panel [K / 2][32 rows][2 columns], words: codes minus their center
AVX2 void unpack(const BitportTiles& w, const Panel& panel) {
  int16_t* to = static_cast<int16_t*>(panel.data);
  const __m256i minus = _mm256_set1_epi16(int16_t(center(w)));
  for (int64_t step = panel.k / 32; step < ceil_div(panel.k + panel.count, 32); ++step)
    for (int64_t line = 0; line < 8; ++line, to += 128)
      for (int64_t half = 0; half < 2; ++half) {
        const Line codes = read_line(tile_at(w, panel.tile, step), w.bits, half * 8 + line);
        for (int64_t part = 0; part < 4; ++part) {   // 8 rows of a pair of columns
          const __m256i pair = codes.pair[part / 2];
          const __m256i words =
              _mm256_cvtepu8_epi16(part % 2 ? _mm256_extracti128_si256(pair, 1) : _mm256_castsi256_si128(pair));
          _mm256_store_si256(reinterpret_cast<__m256i*>(to + part / 2 * 64 + half * 32 + part % 2 * 16),
                             _mm256_sub_epi16(words, minus));
        }
      }
}

// Converts sums of R rows of x and 16 rows of the weight to float32.
template <int R>
AVX2_INLINE void add_piece(const BitportTiles& w, int64_t at, const float* x_sums, const __m256i (*whole)[2],
                           float* sum) {
#pragma GCC unroll 2
  for (int part = 0; part < 2; ++part) {
    const __m256 own = load8(w.scale, w.scale_type, at + part * 8);
    const __m256 scale = w.scale2 ? _mm256_mul_ps(own, _mm256_set1_ps(*w.scale2)) : own;
    const __m256 zero = w.zero ? load8(w.zero, w.zero_type, at + part * 8) : _mm256_set1_ps(middle(w));
    const __m256 shift = _mm256_sub_ps(zero, _mm256_set1_ps(float(center(w))));
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      float* to = sum + r * 32 + part * 8;
      const __m256 values = _mm256_fnmadd_ps(shift, _mm256_set1_ps(x_sums[r]), _mm256_cvtepi32_ps(whole[r][part]));
      _mm256_store_ps(to, _mm256_fmadd_ps(values, scale, _mm256_load_ps(to)));
    }
  }
}

// Multiplies R rows of x, as words, by the panel.
template <int R>
AVX2 void multiply_rows(const Int8Job& job, const Panel& panel, int64_t row, float* sum) {
  const BitportTiles& w = *job.weight;
  alignas(32) int16_t x[R][kInt8Stretch];
  const int64_t step = job.block * kInt8Step, last = panel.k + panel.count;
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const int8_t* from = codes_at(job, row + r, panel.k);
    for (int64_t k = 0; k < panel.count; k += 16)
      _mm256_store_si256(reinterpret_cast<__m256i*>(x[r] + k),
                         _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(
                             from + k / kInt8Step * step + k % kInt8Step))));
  }
  const int64_t scales = panel.tile * groups_of(w) * 32;
  for (int64_t half = 0; half < 2; ++half)
    for (Pieces piece(w, job.stretch, panel.k); piece.begin < last; piece.next()) {
      __m256i whole[R][2];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) whole[r][0] = whole[r][1] = _mm256_setzero_si256();
      const int64_t first = piece.begin - panel.k, end = ceil_div(piece.end - panel.k, 2) * 2;
      const int16_t* words = static_cast<const int16_t*>(panel.data) + first * 32 + half * 32;
      for (int64_t k = first; k < end; k += 2, words += 64) {
        const __m256i low = _mm256_load_si256(reinterpret_cast<const __m256i*>(words));
        const __m256i high = _mm256_load_si256(reinterpret_cast<const __m256i*>(words + 16));
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const __m256i two = _mm256_castps_si256(_mm256_broadcast_ss(reinterpret_cast<const float*>(x[r] + k)));
          whole[r][0] = _mm256_add_epi32(whole[r][0], _mm256_madd_epi16(low, two));
          whole[r][1] = _mm256_add_epi32(whole[r][1], _mm256_madd_epi16(high, two));
        }
      }
      add_piece<R>(w, scales + piece.group * 32 + half * 16, sums_at(job, row, piece.index), whole, sum + half * 16);
    }
}

void multiply(const Int8Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum) {
  if (panel.k == 0) std::memset(sum, 0, size_t(rows) * 128);
  for (int64_t r = 0; r < rows;) {
    const int64_t left = rows - r;
    if (left >= 4) { multiply_rows<4>(job, panel, row + r, sum + r * 32); r += 4; }
    else if (left >= 2) { multiply_rows<2>(job, panel, row + r, sum + r * 32); r += 2; }
    else { multiply_rows<1>(job, panel, row + r, sum + r * 32); r += 1; }
  }
}

AVX2_INLINE __m256i two_of(const int8_t* x) {   // neighbours in K, for 16 rows of the weight
  int16_t bits;
  __builtin_memcpy(&bits, x, 2);
  return _mm256_set1_epi16(bits);
}

// Adds 16-bit sums of 16 rows to 32-bit ones.
AVX2_INLINE void widen_to(__m256i* sum, __m256i words, int left) {
  const __m256i low = _mm256_cvtepi16_epi32(_mm256_castsi256_si128(words));
  const __m256i high = _mm256_cvtepi16_epi32(_mm256_extracti128_si256(words, 1));
  sum[0] = _mm256_add_epi32(sum[0], _mm256_slli_epi32(low, left));
  sum[1] = _mm256_add_epi32(sum[1], _mm256_slli_epi32(high, left));
}

// The codes of half a tile, in place. Bits: 4 or 8, whose lines are whole vectors; 1 and 5 stand for any other up to 4
// and 7.
template <int Bits, Fetch How>
struct FromTile {
  const BitportTiles& weight;
  int64_t tile, half;
  struct Unit { const uint8_t* tile; int64_t line; };   // 16 columns, 4 lines
  AVX2_MEMBER Unit unit(int64_t k) const {
    const Unit at = {tile_at(weight, tile, k / 32), half * 8 + (k / 16 & 1) * 4};
    fetch<How>(at.tile + at.line * 8 * weight.bits, 32 * weight.bits);
    return at;
  }
  AVX2_MEMBER Line line(const Unit& unit, int64_t i) const {
    return read_line(unit.tile, Bits == 4 || Bits == 8 ? Bits : weight.bits, unit.line + i);
  }
};

// R rows of x times 16 columns and 16 rows of the weight.
template <int R, int Bits, Fetch How>
AVX2_INLINE void multiply_unit(const int8_t* x, const FromTile<Bits, How>& source, int64_t k, __m256i (*whole)[2]) {
  constexpr bool Two = Bits > 4;
  const auto unit = source.unit(k);
  const __m256i digit = _mm256_set1_epi8(15);
  __m256i low[R], high[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) low[r] = high[r] = _mm256_setzero_si256();
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Line line = source.line(unit, i);
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
      const __m256i codes = line.pair[pair];
      const __m256i first = Two ? _mm256_and_si256(codes, digit) : codes;
      const __m256i second = _mm256_and_si256(_mm256_srli_epi16(codes, 4), digit);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m256i two = two_of(x + r * kInt8Step + i * 4 + pair * 2);
        low[r] = _mm256_add_epi16(low[r], _mm256_maddubs_epi16(first, two));
        if (Two) high[r] = _mm256_add_epi16(high[r], _mm256_maddubs_epi16(second, two));
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    widen_to(whole[r], low[r], 0);
    if (Two) widen_to(whole[r], high[r], 4);
  }
}

// Up to two rows alternate between both halves of a tile, whose lines are in this order in memory; more rows process
// one half and then the other, while its lines are in L1.
template <int R, int Bits, Fetch How>
AVX2 void fused_rows(const Int8Job& job, int64_t tile, int64_t row, float* sum) {
  constexpr int kHalves = R <= 2 ? 2 : 1;
  const BitportTiles& w = *job.weight;
  const int8_t* x = codes_at(job, row, 0);
  const int64_t scales = tile * groups_of(w) * 32;
  for (int64_t i = 0; i < R * 32; ++i) sum[i] = 0;
  for (int64_t k = 0; k < w.k; k += kInt8Stretch)
    for (int64_t half = 0; half < 2; half += kHalves)
      for (Pieces piece(w, job.stretch, k); piece.begin < smaller(k + kInt8Stretch, w.k); piece.next()) {
        const float* sums = sums_at(job, row, piece.index);
        __m256i whole[kHalves][R][2];
#pragma GCC unroll 2
        for (int h = 0; h < kHalves; ++h)
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r)
            whole[h][r][0] = whole[h][r][1] = _mm256_set1_epi32(-center(w) * int32_t(sums[r]));
        for (int64_t at = piece.begin; at < piece.end; at += 16)
#pragma GCC unroll 2
          for (int h = 0; h < kHalves; ++h) {
            const FromTile<Bits, How> source{w, tile, half + h};
            multiply_unit<R, Bits, How>(x + at / kInt8Step * job.block * kInt8Step + at % kInt8Step, source, at, whole[h]);
          }
#pragma GCC unroll 2
        for (int h = 0; h < kHalves; ++h)
          add_piece<R>(w, scales + piece.group * 32 + (half + h) * 16, sums, whole[h], sum + (half + h) * 16);
      }
}

template <int Bits, Fetch How>
void fused_as(const Int8Job& job, int64_t tile, float* sum) {
  for (int64_t r = 0; r < job.m;) {
    const int64_t left = job.m - r;
    if (left >= 4) { fused_rows<4, Bits, How>(job, tile, r, sum + r * 32); r += 4; }
    else if (left >= 2) { fused_rows<2, Bits, How>(job, tile, r, sum + r * 32); r += 2; }
    else { fused_rows<1, Bits, How>(job, tile, r, sum + r * 32); r += 1; }
  }
}

bool fuses(const BitportTiles&, int64_t m) { return m <= 32; }

AVX2 void finish(float* sum, const float* ones, Rounding rounding, int64_t count, const float* bias, void* y,
                 int32_t type, bool) {
  const __m256 scale = _mm256_set1_ps(rounding.scale), zero = _mm256_set1_ps(rounding.zero);
  for (int64_t j = 0; j < 32; j += 8) {
    __m256 v = _mm256_load_ps(sum + j);
    if (ones) v = _mm256_fnmadd_ps(zero, _mm256_load_ps(ones + j), v);
    _mm256_store_ps(sum + j, _mm256_mul_ps(v, scale));
  }
  avx2_engine.store(sum, count, bias, y, type);
}

}  // namespace

void avx2_int8_fused(const Int8Job& job, int64_t tile, void* panel, float* sum) {
  const BitportTiles& w = *job.weight;
  if (job.m <= (w.bits > 4 ? 4 : 8)) {   // measured: a panel does not pay off
    return with_fetch([&](auto how) {
      if (w.bits == 8) fused_as<8, how>(job, tile, sum);
      else if (w.bits > 4) fused_as<5, how>(job, tile, sum);
      else if (w.bits == 4) fused_as<4, how>(job, tile, sum);
      else fused_as<1, how>(job, tile, sum);
    });
  }
  for (int64_t k = 0; k < w.k; k += kInt8Stretch) {
    const Panel stretch{tile, k, smaller(w.k - k, kInt8Stretch), panel};
    unpack(w, stretch);
    multiply(job, stretch, 0, job.m, sum);
  }
}

const Int8Engine avx2_int8_engine = {kInt8Stretch, 2, kUsualOfBytes, range, round, fuses, avx2_int8_fused, unpack, multiply, nullptr, nullptr, nullptr, finish, false,
                                     nullptr, nullptr};

}  // namespace bitport
#endif
