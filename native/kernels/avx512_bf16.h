// The parts of the bfloat16 product that do not need tile registers.
#pragma once
#include <type_traits>
#include "avx512.h"
#include "engine.h"

namespace bitport {

// The number of rows up to which vdpbf16ps beats float32 on every processor: with half the rate of float32, it pays off
// only while reading the codes is the bottleneck.
constexpr int64_t kVectorRows = 4;

// How values of a line become weights, for 16 rows whose scales are at a position. Unscaled: not at all, scales apply
// to sums.
struct Unscaled {
  AVX512_BF16_MEMBER Unscaled() {}
  AVX512_BF16_MEMBER Unscaled(const BitportTiles&, int64_t) {}
};

// Scales in the order of the line: 8 rows, two columns each.
struct Twice {
  __m512 scale[2], offset[2];

  AVX512_BF16_MEMBER Twice() {}
  AVX512_BF16_MEMBER Twice(const BitportTiles& w, int64_t at) {
    const Affine a = affine(w, at);
    const __m512 minus = _mm512_fnmadd_ps(a.shift, a.scale, _mm512_setzero_ps());
    const __m512i twice = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    const __m512i later = _mm512_add_epi32(twice, _mm512_set1_epi32(8));
    scale[0] = _mm512_permutexvar_ps(twice, a.scale);
    scale[1] = _mm512_permutexvar_ps(later, a.scale);
    offset[0] = _mm512_permutexvar_ps(twice, minus);
    offset[1] = _mm512_permutexvar_ps(later, minus);
  }
};

// Scales that are powers of two and satisfy avx512_raises(): increments of the bfloat16 exponent field.
struct Raised {
  __m512i by;   // for 16 rows, two columns each

  AVX512_BF16_MEMBER Raised() {}
  AVX512_BF16_MEMBER Raised(const BitportTiles& w, int64_t at) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint8_t*>(w.scale) + at));
    const __m512i powers = _mm512_sub_epi32(_mm512_cvtepu8_epi32(codes), _mm512_set1_epi32(127));
    const __m512i lower = _mm512_and_si512(_mm512_slli_epi32(powers, 7), _mm512_set1_epi32(0xff80));
    by = _mm512_or_si512(_mm512_slli_epi32(powers, 23), lower);
  }
};

// Writes one line of a tile to 4 columns of 16 rows of a panel, scaled or not:
//   panel [count / 32][2 halves of 16 rows][16 pairs of columns][16 rows][2]: the second operand of AMX
template <class Format>
AVX512_BF16_INLINE void write_line(const Format& format, const uint8_t* codes, int64_t line, const Twice& by, uint16_t* to) {
  Values v = format.in_order(codes, line);
  for (int c = 0; c < 4; ++c) v.c[c] = _mm512_fmadd_ps(v.c[c], by.scale[c % 2], by.offset[c % 2]);
  _mm512_store_si512(to, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(v.c[1], v.c[0])));
  _mm512_store_si512(to + 32, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(v.c[3], v.c[2])));
}
template <class Format>
AVX512_BF16_INLINE void write_line(const Format& format, const uint8_t* codes, int64_t line, const Raised& raised, uint16_t* to) {
  const Pairs p = format.pairs(codes, line);
  for (int c = 0; c < 2; ++c) {   // zeros and non-finite numbers are not changed
    const __m512i size = _mm512_and_si512(p.c[c], _mm512_set1_epi16(0x7fff));
    const __mmask32 rises =
        Format::kSigned ? _mm512_cmplt_epu16_mask(_mm512_sub_epi16(size, _mm512_set1_epi16(1)), _mm512_set1_epi16(0x7f7f))
                        : _mm512_test_epi16_mask(size, size);
    _mm512_store_si512(to + c * 32, _mm512_mask_add_epi16(p.c[c], rises, p.c[c], raised.by));
  }
}
template <class Format>
AVX512_BF16_INLINE void write_line(const Format& format, const uint8_t* codes, int64_t line, const Unscaled&, uint16_t* to) {
  const Pairs p = format.pairs(codes, line);
  _mm512_store_si512(to, p.c[0]);
  _mm512_store_si512(to + 32, p.c[1]);
}

// Decodes a panel in quarters of a tile, interleaved with other work: 16 rows by 16 columns, 4 lines of 64 codes.
template <class Format, class By, Fetch How>
struct Quarters {
  struct Quarter {
    const uint8_t* codes;
    int64_t line;
    uint16_t* to;
    By by;
  };

  const BitportTiles& w;
  const Format format;
  const uint8_t* codes;
  uint16_t* to;
  int64_t at = 0, end, columns_left, groups_left, scales;   // scales: position of those of the group

  AVX512_BF16_MEMBER Quarters(const BitportTiles& weight, const Panel& panel)
      : w(weight), format(weight), codes(tile_at(weight, panel.tile, panel.k / 32)),
        to(static_cast<uint16_t*>(panel.data)), end(panel.count / 8) {
    const int64_t groups = groups_of(w), group = groups == 1 ? 0 : group_of(w, panel.k);
    groups_left = groups - 1 - group;
    columns_left = groups_left ? (group + 1) * w.group - panel.k : INT64_MAX;
    scales = (panel.tile * groups + group) * 32;
  }

  AVX512_BF16_MEMBER Quarter next() {
    const int64_t half = at & 1, column = at >> 1;   // column: in units of 16
    Quarter q = {codes + (column >> 1) * 128 * w.bits, half * 8 + (column & 1) * 4,
                 to + (column >> 1) * 1024 + half * 512 + (column & 1) * 256, {}};
    fetch<How>(q.codes + (at & 3) * 32 * Format::kBits, 32 * Format::kBits);
    ++at;
    if (std::is_same_v<By, Unscaled>) return q;
    if (columns_left == 0) {
      scales += 32;
      columns_left = --groups_left ? w.group : INT64_MAX;
    }
    columns_left -= half * 16;
    q.by = By(w, scales + half * 16);
    return q;
  }

  AVX512_BF16_MEMBER void decode(const Quarter& q, int64_t line) const {
    write_line(format, q.codes, q.line + line, q.by, q.to + line * 64);
  }

  AVX512_BF16_MEMBER void decode() {
    const Quarter q = next();
#pragma GCC unroll 4
    for (int64_t line = 0; line < 4; ++line) decode(q, line);
  }
};

// Whether the scales of a panel are powers of two that keep the exponents of all its values within the range of
// bfloat16.
bool avx512_raises(const BitportTiles& weight, const Panel& panel);

// Whether groups are long enough that scaling the sums of each pays off beside its products, and short enough for two
// panels (`most`).
static inline bool has_long_groups(const BitportTiles& w, int64_t most) {
  return w.group >= 64 && w.group <= most && w.group % 32 == 0;
}

AVX512_BF16_INLINE __m512bh pair_of(const uint16_t* x) {   // neighbours in K, for all 16 rows
  int32_t bits;
  __builtin_memcpy(&bits, x, 4);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(bits));
}

// If x has a scale per 128 columns, its rows hold codes, which are exact in bfloat16; multiplied by a scale that is not
// a power of two they would be rounded once more. So the scales of x apply to the sums over these columns, and with
// them those of the weight if they are constant there. Rounding errors of a weight with few values under one scale are
// not random: with 128 x 128 blocks a rounded weight exceeds the error budget of a product.
//
// Values, and the factors of the sums over each 128 columns, [count / 128][32]; and these factors alone.
void avx512_decode_blocks(const BitportTiles& weight, const Panel& panel, float* factors);
void avx512_scales_of_blocks(const BitportTiles& weight, const Panel& panel, float* factors);

void avx512_decode_bf16(const BitportTiles& weight, const Panel& panel);
void avx512_look_up_bf16(const BitportTiles& weight, const Panel& panel);   // the same, unscaled
// Few rows. If x has scales, groups of the weight must cover the same columns as these.
void avx512_fused_bf16(const Job& job, int64_t tile, void* panel, float* sum);
void avx512_finish(const Job& job, int64_t tile, int64_t row, int64_t rows, float* sum);   // one scale per row of the weight

}  // namespace bitport
