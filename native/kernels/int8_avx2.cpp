// The product with int8 inputs, by vpmaddubsw: bytes without a sign, the codes, times bytes with one, in pairs of
// columns. It saturates sums of two products at 16 bits, which 4-bit digits never reach: wider codes are split into a
// low digit plus 16 times a high one. 15 * 128 * 16 fits, so 16 products of digits are summed before they are widened.
// Few rows take the codes from the tile as they are, pairs of columns of 16 rows; more rows from a panel of four
// columns of 8 rows, whose sums are quicker to widen.
#include "int8.h"
#if BITPORT_X86
#include "int8_avx2.h"

namespace bitport {
namespace {

// Adds 16-bit numbers. g++ would regroup a chain of sums as a tree, for which it runs out of registers.
AVX2_INLINE void add_in_turn(__m256i& sum, __m256i words) {
  sum = _mm256_add_epi16(sum, words);
  asm("" : "+x"(sum));
}

// Sums of integers to begin with: codes are numbers from 0 on, whose center is subtracted.
AVX2_INLINE __m256i less_center(const BitportTiles& w, float x_sum) {
  return _mm256_set1_epi32(-center(w) * int32_t(x_sum));
}

// Converts sums of R rows of x and 8 Parts rows of the weight to float32.
template <int R, int Parts>
AVX2_INLINE void add_piece(const BitportTiles& w, int64_t at, const float* x_sums, const __m256i (*whole)[Parts],
                           float* sum) {
#pragma GCC unroll 2
  for (int part = 0; part < Parts; ++part) {
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

// panel [K / 4][digits][32 rows][4 columns], bytes: the lowest 4 bits of codes, and the others if they have more
AVX2 void unpack(const BitportTiles& w, const Panel& panel) {
  const int64_t next = w.bits > 4 ? 256 : 128;   // bytes of 4 columns
  const __m256i digit = _mm256_set1_epi8(15);
  uint8_t* to = static_cast<uint8_t*>(panel.data);
  for (int64_t step = panel.k / 32; step < ceil_div(panel.k + panel.count, 32); ++step)
    for (int64_t line = 0; line < 8; ++line, to += next)
      for (int64_t half = 0; half < 2; ++half) {
        const Line codes = read_line(tile_at(w, panel.tile, step), w.bits, half * 8 + line);
        const __m256i first = _mm256_unpacklo_epi16(codes.pair[0], codes.pair[1]);
        const __m256i second = _mm256_unpackhi_epi16(codes.pair[0], codes.pair[1]);
        const __m256i rows[] = {_mm256_permute2x128_si256(first, second, 0x20),
                                _mm256_permute2x128_si256(first, second, 0x31)};
        for (int64_t part = 0; part < 2; ++part) {
          __m256i* const at = reinterpret_cast<__m256i*>(to + half * 64 + part * 32);
          _mm256_store_si256(at, _mm256_and_si256(rows[part], digit));
          if (w.bits > 4) _mm256_store_si256(at + 4, _mm256_and_si256(_mm256_srli_epi16(rows[part], 4), digit));
        }
      }
}

// Multiplies R rows of x by two vectors of the panel at a time: 16 rows of the weight, or both digits of 8.
template <int R, bool Two>
AVX2 void multiply_rows(const Int8Job& job, const Panel& panel, int64_t row, float* sum) {
  constexpr int Parts = Two ? 1 : 2, Other = Two ? 128 : 32, Next = Two ? 256 : 128;   // the last two in bytes
  const BitportTiles& w = *job.weight;
  const int8_t* const x = codes_at(job, row, panel.k);
  const uint64_t step = uint64_t(job.block) * kInt8Step;
  const int64_t scales = panel.tile * groups_of(w) * 32, last = panel.k + panel.count;
  const __m256i ones = _mm256_set1_epi16(1), sixteens = _mm256_set1_epi16(16);
  for (Pieces piece(w, job.stretch, panel.k); piece.begin < last; piece.next()) {
    const float* const sums = sums_at(job, row, piece.index);
    const uint64_t first = uint64_t(piece.begin - panel.k), end = uint64_t(piece.end - panel.k);
#pragma GCC unroll 1
    for (int64_t n = 0; n < 32; n += 8 * Parts) {
      __m256i whole[R][Parts];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int part = 0; part < Parts; ++part) whole[r][part] = less_center(w, sums[r]);
      const uint8_t* codes = static_cast<const uint8_t*>(panel.data) + first / 4 * Next + n * 4;
#pragma GCC unroll 1
      for (uint64_t k = first; k < end;) {
        __m256i words[R][2];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) words[r][0] = words[r][1] = _mm256_setzero_si256();
        const uint64_t full = k / 32 * 32 + 32, stop = full < end ? full : end;   // 8 pairs per sum
#pragma GCC unroll 1
        for (; k < stop; k += 16) {
          const int8_t* const from = x + k / kInt8Step * step + k % kInt8Step;
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i, codes += Next) {
            const __m256i one = _mm256_load_si256(reinterpret_cast<const __m256i*>(codes));
            const __m256i other = _mm256_load_si256(reinterpret_cast<const __m256i*>(codes + Other));
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
              const float* const at = reinterpret_cast<const float*>(from + r * kInt8Step + i * 4);
              const __m256i four = _mm256_castps_si256(_mm256_broadcast_ss(at));
              add_in_turn(words[r][0], _mm256_maddubs_epi16(one, four));
              add_in_turn(words[r][1], _mm256_maddubs_epi16(other, four));
            }
          }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const __m256i low = _mm256_madd_epi16(words[r][0], ones);
          const __m256i high = _mm256_madd_epi16(words[r][1], Two ? sixteens : ones);
          whole[r][0] = _mm256_add_epi32(whole[r][0], low);
          whole[r][Parts - 1] = _mm256_add_epi32(whole[r][Parts - 1], high);
        }
      }
      add_piece<R, Parts>(w, scales + piece.group * 32 + n, sums, whole, sum + n);
    }
  }
}

void multiply(const Int8Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum) {
  static constexpr decltype(&multiply_rows<1, false>) ways[2][4] = {
      {multiply_rows<1, false>, multiply_rows<2, false>, multiply_rows<3, false>, multiply_rows<4, false>},
      {multiply_rows<1, true>, multiply_rows<2, true>, multiply_rows<3, true>, multiply_rows<4, true>}};
  if (panel.k == 0) std::memset(sum, 0, size_t(rows) * 128);
  const auto& by_rows = ways[job.weight->bits > 4];
  by_few(rows, job.block, 4, [&](int64_t r, int64_t count) {
    by_rows[count - 1](job, panel, row + r, sum + r * 32);
  });
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

// Adds the products of R rows of x with 16 columns of H halves of a tile, whose lines are 8 apart. Both take what is
// loaded of x. Bits: 4 or 8, whose lines are whole vectors; 1 and 5 stand for any other up to 4 and 7.
template <int R, int H, int Bits>
AVX2_INLINE void multiply_unit(const int8_t* x, const uint8_t* tile, int32_t bits, int64_t line,
                               __m256i (*whole)[R][2]) {
  constexpr bool Two = Bits > 4;
  const __m256i digit = _mm256_set1_epi8(15);
  __m256i low[H][R], high[H][R];
#pragma GCC unroll 2
  for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) low[h][r] = high[h][r] = _mm256_setzero_si256();
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    Line of[H];
#pragma GCC unroll 2
    for (int h = 0; h < H; ++h) of[h] = read_line(tile, bits, line + h * 8 + i);
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair)
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m256i two = two_of(x + r * kInt8Step + i * 4 + pair * 2);
#pragma GCC unroll 2
        for (int h = 0; h < H; ++h) {
          const __m256i codes = of[h].pair[pair];
          const __m256i first = Two ? _mm256_and_si256(codes, digit) : codes;
          const __m256i second = _mm256_and_si256(_mm256_srli_epi16(codes, 4), digit);
          add_in_turn(low[h][r], _mm256_maddubs_epi16(first, two));
          if (Two) add_in_turn(high[h][r], _mm256_maddubs_epi16(second, two));
        }
      }
  }
#pragma GCC unroll 2
  for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      widen_to(whole[h][r], low[h][r], 0);
      if (Two) widen_to(whole[h][r], high[h][r], 4);
    }
}

// Up to two rows multiply both halves of a tile at once; for more there are too few registers, and each piece of one
// half is followed by that of the other, while its lines are in L1.
template <int R, int Bits, Fetch How>
AVX2 void fused_rows(const Int8Job& job, int64_t tile, int64_t row, float* sum) {
  constexpr int H = R <= 2 ? 2 : 1;
  const BitportTiles& w = *job.weight;
  const int32_t bits = Bits == 4 || Bits == 8 ? Bits : w.bits;
  const int8_t* const x = codes_at(job, row, 0);
  const uint8_t* const codes = tile_at(w, tile, 0);
  const uint64_t step = uint64_t(job.block) * kInt8Step;
  const int64_t scales = tile * groups_of(w) * 32;
  for (int64_t i = 0; i < R * 32; ++i) sum[i] = 0;
  for (Pieces piece(w, job.stretch, 0); piece.begin < w.k; piece.next()) {
    const float* const sums = sums_at(job, row, piece.index);
#pragma GCC unroll 1
    for (int64_t half = 0; half < 2; half += H) {
      __m256i whole[H][R][2];
#pragma GCC unroll 2
      for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) whole[h][r][0] = whole[h][r][1] = less_center(w, sums[r]);
#pragma GCC unroll 1
      for (uint64_t k = uint64_t(piece.begin); k < uint64_t(piece.end); k += 16) {
        const uint8_t* const at = codes + k / 32 * uint64_t(128 * bits);
        const int64_t line = half * 8 + int64_t(k / 16 % 2) * 4;
#pragma GCC unroll 2
        for (int h = 0; h < H; ++h) fetch<How>(at + (line + h * 8) * 8 * bits, 32 * bits);
        multiply_unit<R, H, Bits>(x + k / kInt8Step * step + k % kInt8Step, at, bits, line, whole);
      }
#pragma GCC unroll 2
      for (int h = 0; h < H; ++h)
        add_piece<R, 2>(w, scales + piece.group * 32 + (half + h) * 16, sums, whole[h], sum + (half + h) * 16);
    }
  }
}

template <int Bits, Fetch How>
void fused_as(const Int8Job& job, int64_t tile, float* sum) {
  static constexpr decltype(&fused_rows<1, Bits, How>) by_rows[] = {
      fused_rows<1, Bits, How>, fused_rows<2, Bits, How>, fused_rows<3, Bits, How>, fused_rows<4, Bits, How>};
  by_few(job.m, job.block, 4, [&](int64_t r, int64_t count) { by_rows[count - 1](job, tile, r, sum + r * 32); });
}

bool fuses(const BitportTiles&, int64_t m) { return m <= 32; }

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

const Int8Engine avx2_int8_engine = {kInt8Stretch, 2, 0, kUsualOfBytes, avx2_int8_range, avx2_int8_round, fuses,
                                     avx2_int8_fused, unpack, multiply, nullptr, nullptr, nullptr, avx2_int8_finish,
                                     false, nullptr, nullptr};

}  // namespace bitport
#endif
