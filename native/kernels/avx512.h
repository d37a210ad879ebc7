// Shared by the files with 512-bit vectors: conversions, and reading the codes of a line (layout in bitport_kernels.h).
#pragma once
#include <immintrin.h>
#include "fetch.h"
#include "number.h"
#include "tiles.h"

#define AVX512_TARGET "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"
#define AVX512 __attribute__((target(AVX512_TARGET)))
#define AVX512_INLINE AVX512 __attribute__((always_inline)) static inline
#define AVX512_MEMBER AVX512 __attribute__((always_inline)) inline
#define AVX512_BF16 __attribute__((target(AVX512_TARGET ",avx512bf16")))
#define AVX512_BF16_MEMBER AVX512_BF16 __attribute__((always_inline)) inline
#define AVX512_BF16_INLINE AVX512_BF16 __attribute__((always_inline)) static inline

namespace bitport {

// Rows of x whose sums, 32 each, stay in registers, besides two of the weight and one of x.
constexpr int64_t kPassing = 12;

AVX512_INLINE __m512 load16(const void* p, int32_t type, int64_t i) {
  switch (type) {
    case BITPORT_F32: return _mm512_loadu_ps(static_cast<const float*>(p) + i);
    case BITPORT_BF16: {
      const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(p) + i));
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }
    case BITPORT_F16:
      return _mm512_cvtph_ps(
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(p) + i)));
    default: break;
  }
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint8_t*>(p) + i));
  if (type == BITPORT_E8M0) {
    const __m512i codes = _mm512_cvtepu8_epi32(bytes);
    __m512i bits = _mm512_slli_epi32(codes, 23);   // float32 with this exponent; 0 and 255 are special
    bits = _mm512_mask_mov_epi32(bits, _mm512_testn_epi32_mask(codes, codes), _mm512_set1_epi32(0x00400000));
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(
        bits, _mm512_cmpeq_epi32_mask(codes, _mm512_set1_epi32(255)), _mm512_set1_epi32(0x7fc00000)));
  }
  if (type == BITPORT_E4M3) {   // float16 has the same fields, but an exponent bias of 15, not 7
    const __m256i codes = _mm256_cvtepu8_epi16(bytes), size = _mm256_and_si256(codes, _mm256_set1_epi16(0x7f));
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(0x80)), 8);
    const __m256i half = _mm256_mask_mov_epi16(_mm256_slli_epi16(size, 7),
                                               _mm256_cmpeq_epi16_mask(size, _mm256_set1_epi16(0x7f)),
                                               _mm256_set1_epi16(0x7e00));
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(half, sign)), _mm512_set1_ps(256.0f));
  }
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
}

// Up to 16 numbers, padded with 0.
AVX512_INLINE __m512 load_some(const void* x, int32_t type, int64_t i, int64_t count) {
  if (count - i >= 16) return load16(x, type, i);
  const __mmask16 mask = __mmask16((1u << (count - i)) - 1);
  if (type == BITPORT_F32) return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(x) + i);
  const __m256i half = _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(x) + i);
  return type == BITPORT_F16 ? _mm512_cvtph_ps(half)
                             : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// Converts table values to weights, for 16 rows: (value - shift) * scale.
struct Affine { __m512 scale, shift; };

// at: position of the 16 rows in the arrays of scales and zeros
AVX512_INLINE Affine affine(const BitportTiles& w, int64_t at) {
  return {load16(w.scale, w.scale_type, at), w.zero ? _mm512_sub_ps(load16(w.zero, w.zero_type, at),
                                                                    _mm512_set1_ps(middle(w)))
                                                    : _mm512_setzero_ps()};
}

// The 64 codes of a line as bytes, in the order of the layout.
template <int Bits>
AVX512_INLINE __m512i read_codes(const uint8_t* tile, int64_t line) {
  __m512i codes = _mm512_setzero_si512();
  if constexpr ((Bits & 8) != 0) codes = _mm512_loadu_si512(tile + line * 64);
  if constexpr ((Bits & 4) != 0) {
    const __m512i twice = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + line * 32)));
    const __m512i shifts = _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0);
    codes = _mm512_and_si512(_mm512_srlv_epi64(twice, shifts), _mm512_set1_epi8(15));
    tile += 16 * 32;
  }
  if constexpr ((Bits & 2) != 0) {
    const __m512i times = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(tile + line * 16)));
    const __m512i shifts = _mm512_set_epi64(6, 6, 4, 4, 2, 2, 0, 0);
    const __m512i two = _mm512_and_si512(_mm512_srlv_epi64(times, shifts), _mm512_set1_epi8(3));
    codes = _mm512_or_si512(codes, _mm512_slli_epi64(two, Bits & 4));
    tile += 16 * 16;
  }
  if constexpr ((Bits & 1) != 0) {
    uint64_t ones;
    __builtin_memcpy(&ones, tile + line * 8, 8);
    const __m512i set = _mm512_or_si512(codes, _mm512_set1_epi8(char(1 << (Bits & 6))));
    codes = _mm512_mask_mov_epi8(codes, ones, set);
  }
  return codes;
}

// The unscaled values of the codes of a line. values[c]: column 4p + c of 16 rows in float32; pairs[0]: columns 4p and
// 4p + 1 of 16 rows in bfloat16, interleaved; pairs[1]: the next two. Exact for every table of bfloat16 values; pairs
// of another table (nf4) are rounded. in_order(): the same pairs in float32, for rows 0-7 and rows 8-15.
struct Values { __m512 c[4]; };
struct Pairs { __m512i c[2]; };

// 16 entries of a table of `count`, from entry `at` on; a shorter table is repeated.
AVX512_INLINE __m512 entries(const float* table, int64_t count, int64_t at) {
  if (count >= 16) return _mm512_loadu_ps(table + at % count);
  const __m512i index = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return _mm512_i32gather_ps(_mm512_and_si512(index, _mm512_set1_epi32(int(count) - 1)), table, 4);
}

// Rounds to bfloat16, to nearest even, in the upper half of each lane; the caller handles NaN.
AVX512_INLINE __m512i rounded(__m512 v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
}

// The same, keeping NaN.
AVX512_INLINE __m512i bf16_above(__m512 v) {
  const __m512i quiet = _mm512_or_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x400000));
  return _mm512_mask_mov_epi32(rounded(v), _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), quiet);
}

// As 16 words.
AVX512_INLINE __m256i bf16_of(__m512 v) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bf16_above(v), 16)); }

// 32 entries as words
AVX512_INLINE __m512i words_of(const float* table, int64_t count, int64_t at) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(bf16_of(entries(table, count, at))),
                            bf16_of(entries(table, count, at + 16)), 1);
}

template <int Bits, bool Integer>
struct Codes {
  static constexpr int kBits = Bits;
  static constexpr bool kInteger = Integer;
  static constexpr bool kSigned = !Integer && Bits > 6;   // float8: a sign, 7 bits of magnitude
  static constexpr int kVectors = kSigned || Bits == 6 ? 2 : Bits < 6 ? 1 : 0;
  __m512 table;
  // For float8: left shift of its fields, mask of their bits, correction of the exponent, last finite code minus kRare.
  __m512i shift, kept, offset, most;
  static constexpr char kRare = 8;   // lower codes may be subnormal
  __m512i words[kVectors ? kVectors : 1];

  AVX512_MEMBER explicit Codes(const BitportTiles& w) {
    constexpr int64_t kCount = int64_t(1) << Bits;
    table = entries(w.table, kCount, 0);
    for (int v = 0; v < kVectors; ++v) words[v] = words_of(w.table, kCount, kSigned ? v * 96 : v * 32);
    shift = kept = offset = most = _mm512_setzero_si512();
    if constexpr (kSigned) {   // 1.0 is 0x3c in e5m2 and 0x38 in e4m3
      const int move = w.table[0x3c] == 1.0f ? 5 : 4;
      shift = _mm512_set1_epi16(short(move));
      kept = _mm512_set1_epi16(short(0x8000 | 0x7f << move));
      most = _mm512_set1_epi8(char((move == 5 ? 0x7b : 0x7e) - kRare));
      offset = _mm512_set1_epi16(short((bits_of_float(w.table[0x40]) >> 16) - (0x40u << move)));
    }
    if (!kVectors) words[0] = _mm512_setzero_si512();
  }

  AVX512_MEMBER __m512i look_up(__m256i bytes) const {
    const __m512i codes = _mm512_cvtepu8_epi16(bytes);
    if constexpr (Bits < 6) return _mm512_permutexvar_epi16(codes, words[0]);
    if constexpr (Bits == 6) return _mm512_permutex2var_epi16(words[0], codes, words[1]);
    return codes;
  }

  AVX512_MEMBER Pairs pairs(const uint8_t* tile, int64_t line) const {
    if constexpr (Bits == 4) {   // vpermw uses five bits of an index, so the table is there twice
      const __m512i bytes =
          _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + line * 32)));
      return {{_mm512_permutexvar_epi16(bytes, words[0]),
               _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 4), words[0])}};
    } else if constexpr (kSigned) {
      const uint8_t* at = tile + line * 64;
      const __m512i size = _mm512_and_si512(_mm512_loadu_si512(at), _mm512_set1_epi8(0x7f));
      // the magnitude minus kRare, unsigned: magnitudes below kRare wrap around to the top
      const __mmask64 rare = _mm512_cmpgt_epu8_mask(_mm512_sub_epi8(size, _mm512_set1_epi8(kRare)), most);
      Pairs p = {{moved(at), moved(at + 32)}};
      if (__builtin_expect(rare != 0, 0)) {
        p.c[0] = looked_up(p.c[0], __mmask32(rare), at);
        p.c[1] = looked_up(p.c[1], __mmask32(rare >> 32), at + 32);
      }
      return p;
    } else if constexpr (Integer && Bits > 6) {
      const Values v = values(tile, line);   // 8-bit integers are exact in the upper half of a float
      return {{join(v.c[0], v.c[1]), join(v.c[2], v.c[3])}};
    } else {
      const __m512i codes = read_codes<Bits>(tile, line);
      return {{look_up(_mm512_castsi512_si256(codes)), look_up(_mm512_extracti64x4_epi64(codes, 1))}};
    }
  }

  AVX512_MEMBER Values in_order(const uint8_t* tile, int64_t line) const {
    if constexpr (Bits == 4) {
      const __m128i* at = reinterpret_cast<const __m128i*>(tile + line * 32);
      const __m512i a = _mm512_cvtepu8_epi32(_mm_loadu_si128(at)), b = _mm512_cvtepu8_epi32(_mm_loadu_si128(at + 1));
      return {{meaning(a), meaning(b), meaning(_mm512_srli_epi32(a, 4)), meaning(_mm512_srli_epi32(b, 4))}};
    } else if constexpr (Bits < 4 || Integer) {
      const __m512i codes = read_codes<Bits>(tile, line);
      return {{meaning(_mm512_cvtepu8_epi32(_mm512_castsi512_si128(codes))),
               meaning(_mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(codes, 1))),
               meaning(_mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(codes, 2))),
               meaning(_mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(codes, 3)))}};
    } else {
      const Pairs p = pairs(tile, line);
      return {{widened(_mm512_castsi512_si256(p.c[0])), widened(_mm512_extracti64x4_epi64(p.c[0], 1)),
               widened(_mm512_castsi512_si256(p.c[1])), widened(_mm512_extracti64x4_epi64(p.c[1], 1))}};
    }
  }

  AVX512_MEMBER Values values(const uint8_t* tile, int64_t line) const {
    if constexpr (Bits == 4) {   // the two bytes of a row, as a lane, are columns 0, 2, 1, 3 from the low nibble up
      const __m512i lanes =
          _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + line * 32)));
      return {{_mm512_permutexvar_ps(lanes, table), _mm512_permutexvar_ps(_mm512_srli_epi32(lanes, 8), table),
               _mm512_permutexvar_ps(_mm512_srli_epi32(lanes, 4), table),
               _mm512_permutexvar_ps(_mm512_srli_epi32(lanes, 12), table)}};
    } else if constexpr (Bits < 4 || Integer) {
      const __m512i codes = read_codes<Bits>(tile, line);
      const __m512i a = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(codes));
      const __m512i b = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(codes, 1));
      return {{meaning(a), meaning(_mm512_srli_epi32(a, 8)), meaning(b), meaning(_mm512_srli_epi32(b, 8))}};
    } else {
      const Pairs p = pairs(tile, line);
      return {{even(p.c[0]), odd(p.c[0]), even(p.c[1]), odd(p.c[1])}};
    }
  }

 private:
  // 32 codes of float8: shifts the fields of normal numbers and corrects the exponent bias
  AVX512_MEMBER __m512i moved(const uint8_t* codes) const {
    const __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    return _mm512_add_epi16(_mm512_and_si512(_mm512_sllv_epi16(words, shift), kept), offset);
  }
  // replaces the selected ones by table entries with their sign
  AVX512_MEMBER __m512i looked_up(__m512i moved, __mmask32 which, const uint8_t* codes) const {
    const __m512i at = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    const __m512i small = _mm512_permutexvar_epi16(at, words[0]), large = _mm512_permutexvar_epi16(at, words[1]);
    const __m512i size = _mm512_mask_mov_epi16(small, _mm512_test_epi16_mask(at, _mm512_set1_epi16(0x40)), large);
    constexpr int kFirstOrBothOthers = 0xf8;
    return _mm512_mask_mov_epi16(moved, which,
                                 _mm512_ternarylogic_epi32(size, _mm512_slli_epi16(at, 8), _mm512_set1_epi16(short(0x8000)),
                                                           kFirstOrBothOthers));
  }
  // value of the code in the lowest byte of a lane
  AVX512_MEMBER __m512 meaning(__m512i lanes) const {
    if constexpr (Bits <= 4) return _mm512_permutexvar_ps(lanes, table);
    constexpr int kFirstOrBothOthers = 0xf8;   // 2^23 + code, as the bits of a float
    const __m512i bits = _mm512_ternarylogic_epi32(_mm512_set1_epi32(0x4b000000), lanes, _mm512_set1_epi32(255),
                                                   kFirstOrBothOthers);
    return _mm512_sub_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(8388608.0f + (1 << (Bits - 1))));
  }
  AVX512_MEMBER static __m512 widened(__m256i bf16) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16));
  }
  AVX512_MEMBER static __m512 even(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
  AVX512_MEMBER static __m512 odd(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000))));
  }
  AVX512_MEMBER static __m512i join(__m512 even, __m512 odd) {
    constexpr int kSelect = 0xca;   // first ? second : third
    return _mm512_ternarylogic_epi32(_mm512_set1_epi32(int(0xffff0000)), _mm512_castps_si512(odd),
                                     _mm512_srli_epi32(_mm512_castps_si512(even), 16), kSelect);
  }
};

void avx512_widen(const void* from, int32_t type, int64_t count, float* to);
void avx512_store(const float* sum, int64_t count, const float* bias, void* y, int32_t type);
void avx512_stream(const float* sum, const float* bias, void* y, int32_t type);

// Makes the call with Format = Codes<bits, integer> of w. Floats have 4, 6 or 8 bits.
#define BITPORT_WITH_CODES(w, call)                                      \
  switch ((w).bits) {                                                    \
    case 1: { using Format = Codes<1, true>; call; } break;              \
    case 2: { using Format = Codes<2, true>; call; } break;              \
    case 3: { using Format = Codes<3, true>; call; } break;              \
    case 4: { using Format = Codes<4, true>; call; } break;              \
    case 5: { using Format = Codes<5, true>; call; } break;              \
    case 6:                                                              \
      if ((w).integer) { using Format = Codes<6, true>; call; }          \
      else { using Format = Codes<6, false>; call; }                     \
      break;                                                             \
    case 7: { using Format = Codes<7, true>; call; } break;              \
    default:                                                             \
      if ((w).integer) { using Format = Codes<8, true>; call; }          \
      else { using Format = Codes<8, false>; call; }                     \
  }

// The same for types other than integers, which have 4, 6 or 8 bits.
#define BITPORT_WITH_FLOATS(w, call)                          \
  switch ((w).bits) {                                         \
    case 4: { using Format = Codes<4, true>; call; } break;   \
    case 6: { using Format = Codes<6, false>; call; } break;  \
    default: { using Format = Codes<8, false>; call; }        \
  }

}  // namespace bitport
