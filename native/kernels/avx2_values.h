// Values of codes in 256-bit registers: one description of a format serves panels and few rows of x. All are exact.
#pragma once
#include "avx2.h"

namespace bitport {

// Two columns of 16 rows in float32. rows[0] are 0-3 and 8-11, rows[1] are 4-7 and 12-15: the order in which bytes end
// up when they are interleaved.
struct Columns { __m256 of[2][2]; };

// The same as rows 0-7 and 8-15.
AVX2_INLINE void in_order(__m256 first, __m256 second, __m256* to) {
  to[0] = _mm256_permute2f128_ps(first, second, 0x20);
  to[1] = _mm256_permute2f128_ps(first, second, 0x31);
}

// Columns from the upper halves of floats; the lower halves are 0.
AVX2_INLINE Columns apart(__m256i first, __m256i second) {
  const __m256i upper = _mm256_set1_epi32(int(0xffff0000));
  return {{{_mm256_castsi256_ps(_mm256_slli_epi32(first, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(second, 16))},
           {_mm256_castsi256_ps(_mm256_and_si256(first, upper)), _mm256_castsi256_ps(_mm256_and_si256(second, upper))}}};
}

// One byte of each of 16 floats, in both halves.
AVX2_INLINE __m256i bytes_of(const float* numbers, int which) {
  __m128i bytes[4];
  for (int i = 0; i < 4; ++i) {
    const __m128i four = _mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers + i * 4));
    bytes[i] = _mm_and_si128(_mm_srli_epi32(four, 8 * which), _mm_set1_epi32(255));
  }
  return _mm256_broadcastsi128_si256(
      _mm_packus_epi16(_mm_packus_epi32(bytes[0], bytes[1]), _mm_packus_epi32(bytes[2], bytes[3])));
}

// Up to 16 values that are exact in bfloat16: two bytes of each are looked up.
struct Short {
  __m256i low, high;
  AVX2_MEMBER explicit Short(const BitportTiles& w) {
    float numbers[16];
    for (int i = 0; i < 16; ++i) numbers[i] = w.table[i & ((1 << w.bits) - 1)];
    low = bytes_of(numbers, 2);
    high = bytes_of(numbers, 3);
  }
  AVX2_MEMBER Columns operator()(__m256i codes) const {
    const __m256i first = _mm256_shuffle_epi8(low, codes), second = _mm256_shuffle_epi8(high, codes);
    return apart(_mm256_unpacklo_epi8(first, second), _mm256_unpackhi_epi8(first, second));
  }
};

// Up to 16 values of float32: all four bytes are looked up.
struct Few {
  __m256i bytes[4];
  AVX2_MEMBER explicit Few(const BitportTiles& w) {
    float numbers[16];
    for (int i = 0; i < 16; ++i) numbers[i] = w.table[i & ((1 << w.bits) - 1)];
    for (int i = 0; i < 4; ++i) bytes[i] = bytes_of(numbers, i);
  }
  AVX2_MEMBER Columns operator()(__m256i codes) const {
    __m256i at[4];
    for (int i = 0; i < 4; ++i) at[i] = _mm256_shuffle_epi8(bytes[i], codes);
    const __m256i lower[] = {_mm256_unpacklo_epi8(at[0], at[1]), _mm256_unpackhi_epi8(at[0], at[1])};
    const __m256i upper[] = {_mm256_unpacklo_epi8(at[2], at[3]), _mm256_unpackhi_epi8(at[2], at[3])};
    Columns found;
    for (int i = 0; i < 2; ++i) {
      found.of[0][i] = _mm256_castsi256_ps(_mm256_blend_epi16(lower[i], _mm256_slli_epi32(upper[i], 16), 0xaa));
      found.of[1][i] = _mm256_castsi256_ps(_mm256_blend_epi16(_mm256_srli_epi32(lower[i], 16), upper[i], 0xaa));
    }
    return found;
  }
};

// 64 values that are exact in bfloat16: like Short, with four parts of 16 selected by bits 4 and 5 of a code.
struct Quarters {
  __m256i low[4], high[4];
  AVX2_MEMBER explicit Quarters(const BitportTiles& w) {
    for (int part = 0; part < 4; ++part) {
      low[part] = bytes_of(w.table + part * 16, 2);
      high[part] = bytes_of(w.table + part * 16, 3);
    }
  }
  AVX2_MEMBER Columns operator()(__m256i codes) const {
    const __m256i first = look_up(low, codes), second = look_up(high, codes);
    return apart(_mm256_unpacklo_epi8(first, second), _mm256_unpackhi_epi8(first, second));
  }

 private:
  AVX2_MEMBER static __m256i look_up(const __m256i (&bytes)[4], __m256i codes) {   // a blend tests bit 7
    const __m256i fourth = _mm256_slli_epi16(codes, 3), fifth = _mm256_slli_epi16(codes, 2);
    const __m256i index = _mm256_and_si256(codes, _mm256_set1_epi8(15));
    const auto of = [&](int part) AVX2 { return _mm256_shuffle_epi8(bytes[part], index); };
    return _mm256_blendv_epi8(_mm256_blendv_epi8(of(0), of(1), fourth), _mm256_blendv_epi8(of(2), of(3), fourth), fifth);
  }
};

// Integers: a code becomes the lowest bits of a float of 2^23 and more, from which 2^23 and the center are subtracted.
struct Whole {
  __m256 less;
  AVX2_MEMBER explicit Whole(const BitportTiles& w) : less(_mm256_set1_ps(8388608.0f + float(1 << (w.bits - 1)))) {}
  AVX2_MEMBER Columns operator()(__m256i codes) const {
    const __m256i zero = _mm256_setzero_si256(), large = _mm256_set1_epi32(0x4b000000);
    const __m256i words[] = {_mm256_unpacklo_epi8(codes, zero), _mm256_unpackhi_epi8(codes, zero)};
    Columns found;
    for (int i = 0; i < 2; ++i) {
      const __m256i even = _mm256_blend_epi16(words[i], large, 0xaa);
      const __m256i odd = _mm256_or_si256(_mm256_srli_epi32(words[i], 16), large);
      found.of[0][i] = _mm256_sub_ps(_mm256_castsi256_ps(even), less);
      found.of[1][i] = _mm256_sub_ps(_mm256_castsi256_ps(odd), less);
    }
    return found;
  }
};

// Float8: the fields of normal numbers are shifted to their positions in bfloat16, and the exponent bias is corrected.
// Subnormal numbers and the ends of the table are rare, and are gathered.
struct Float8 {
  const float* table;
  __m128i shift;     // right shift of the fields from the upper byte
  __m256i offset;    // correction of the exponent
  __m256i above;     // distance from the first normal code, or the next few, to the last finite one
  AVX2_MEMBER explicit Float8(const BitportTiles& w) : table(w.table) {
    const bool e5m2 = w.table[0x3c] == 1.0f;   // 1.0 is 0x38 in e4m3
    shift = _mm_cvtsi32_si128(e5m2 ? 3 : 4);
    offset = _mm256_set1_epi16(short((bits_of_float(w.table[0x40]) >> 16) - (0x40u << (e5m2 ? 5 : 4))));
    above = _mm256_set1_epi8(char((e5m2 ? 0x7b : 0x7e) - 8));
  }
  AVX2_MEMBER Columns operator()(__m256i codes) const {
    const __m256i size = _mm256_and_si256(codes, _mm256_set1_epi8(0x7f)), zero = _mm256_setzero_si256();
    const __m256i from_normal = _mm256_sub_epi8(size, _mm256_set1_epi8(8));
    const __m256i common = _mm256_cmpeq_epi8(_mm256_max_epu8(from_normal, above), above);
    if (__builtin_expect(_mm256_movemask_epi8(common) != -1, 0)) return gathered(codes);
    const auto word = [&](__m256i upper_bytes) AVX2 {
      const __m256i sign = _mm256_and_si256(upper_bytes, _mm256_set1_epi16(short(0x8000)));
      const __m256i fields = _mm256_srl_epi16(_mm256_andnot_si256(_mm256_set1_epi16(short(0x8000)), upper_bytes), shift);
      return _mm256_or_si256(_mm256_add_epi16(fields, offset), sign);
    };
    return apart(word(_mm256_unpacklo_epi8(zero, codes)), word(_mm256_unpackhi_epi8(zero, codes)));
  }

 private:
  AVX2_MEMBER Columns gathered(__m256i codes) const {
    const __m256i zero = _mm256_setzero_si256(), byte = _mm256_set1_epi32(255);
    const __m256i words[] = {_mm256_unpacklo_epi8(codes, zero), _mm256_unpackhi_epi8(codes, zero)};
    Columns found;
    for (int i = 0; i < 2; ++i) {
      found.of[0][i] = _mm256_i32gather_ps(table, _mm256_and_si256(words[i], byte), 4);
      found.of[1][i] = _mm256_i32gather_ps(table, _mm256_srli_epi32(words[i], 16), 4);
    }
    return found;
  }
};

}  // namespace bitport
