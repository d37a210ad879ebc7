// Dequantizes rows with 512-bit vectors. With up to 4 bits the 16 values of a group are computed once and fill a
// register, in which words (for float32, double words) are looked up; wider integers are converted one by one.
#include "rows.h"
#if BITPORT_X86
#include <cfloat>
#include <cmath>
#include <cstring>
#include "avx512.h"

namespace bitport {
namespace {

constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

// 16 values as look_up() takes them: 16-bit ones are in both words of a double word.
template <int32_t Type>
AVX512_INLINE __m512i rounded_to(__m512 v) {
  if constexpr (Type == BITPORT_F32) return _mm512_castps_si512(v);
  if constexpr (Type == BITPORT_BF16) {
    const __m512i above = bf16_above(v);
    return _mm512_mask_mov_epi16(above, 0x55555555, _mm512_srli_epi32(above, 16));
  }
  const __m512i below = _mm512_cvtepu16_epi32(_mm512_cvtps_ph(v, kNearest));
  return _mm512_or_si512(below, _mm512_slli_epi32(below, 16));
}

// Looks up a register of values for nibble codes, the first one low.
template <int32_t Type>
AVX512_INLINE __m512i look_up(const uint8_t* codes, __m512i numbers) {
  if constexpr (Type == BITPORT_F32) {   // the lowest 4 bits of an index select a double word
    const __m512i pairs = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    return _mm512_permutexvar_epi32(_mm512_or_si512(pairs, _mm512_slli_epi64(pairs, 28)), numbers);
  } else {   // the lowest 5 bits select a word: the code, and below it an arbitrary bit
    const __m512i lanes = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    const __m512i twice = _mm512_set_epi8(   // a byte above another, in both words
        15, 0, 15, 0, 14, 0, 14, 0, 13, 0, 13, 0, 12, 0, 12, 0, 11, 0, 11, 0, 10, 0, 10, 0, 9, 0, 9, 0, 8, 0, 8, 0,
        7, 0, 7, 0, 6, 0, 6, 0, 5, 0, 5, 0, 4, 0, 4, 0, 3, 0, 3, 0, 2, 0, 2, 0, 1, 0, 1, 0, 0, 0, 0, 0);
    const __m512i index = _mm512_srlv_epi16(_mm512_shuffle_epi8(lanes, twice), _mm512_set1_epi32(11 << 16 | 7));
    return _mm512_permutexvar_epi16(index, numbers);
  }
}

template <int32_t Type>
constexpr int64_t kStep = Type == BITPORT_F32 ? 16 : 32;   // values per register

// The value of each nibble of a group.
template <int32_t Type>
struct Nibbles {
  static constexpr int64_t kBytes = kStep<Type> / 2;   // code bytes per step
  __m512i numbers;
};

template <int32_t Type>
AVX512_INLINE void start(__m512 table, __m512 shift, __m512 scale, Nibbles<Type>* group) {
  group->numbers = rounded_to<Type>(_mm512_mul_ps(_mm512_sub_ps(table, shift), scale));
}

template <int32_t Type>
AVX512_INLINE __m512i step_of(const uint8_t* codes, const Nibbles<Type>& group) {
  return look_up<Type>(codes, group.numbers);
}

// Integers of one byte each.
template <int32_t Type>
struct Bytes {
  static constexpr int64_t kBytes = kStep<Type>;
  __m512 least, shift, scale;
};

template <int32_t Type>
AVX512_INLINE void start(__m512 table, __m512 shift, __m512 scale, Bytes<Type>* group) {
  *group = {_mm512_broadcastss_ps(_mm512_castps512_ps128(table)), shift, scale};
}

template <int32_t Type>
AVX512_INLINE __m512 meant(const uint8_t* codes, const Bytes<Type>& group) {
  const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  const __m512 v = _mm512_add_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(some)), group.least);
  return _mm512_mul_ps(_mm512_sub_ps(v, group.shift), group.scale);
}

template <int32_t Type>
AVX512_INLINE __m512i step_of(const uint8_t* codes, const Bytes<Type>& group) {
  const __m512 first = meant(codes, group);
  if constexpr (Type == BITPORT_F32) return _mm512_castps_si512(first);
  const __m512 second = meant(codes + 16, group);
  if constexpr (Type == BITPORT_BF16) {
    const __m512i upper = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                           23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);   // upper words of both
    return _mm512_permutex2var_epi16(bf16_above(first), upper, bf16_above(second));
  }
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(first, kNearest)), _mm512_cvtps_ph(second, kNearest), 1);
}

// Whether 8-bit integers times the scale can be rounded to bfloat16 by hardware. It flushes subnormal results to zero,
// but with a normal scale no product is subnormal.
bool is_simple(const float* table, float shift, float scale) {
  return table[0] == -128 && shift == 0 && std::fabs(scale) >= FLT_MIN;
}

AVX512_BF16 void write_products(const uint8_t* codes, int64_t steps, float scale, char* y) {
  const __m512 by = _mm512_set1_ps(scale);
  for (int64_t step = 0; step < steps; ++step, codes += 32, y += 64) {
    const __m256i some = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    const __m256i centred = _mm256_xor_si256(some, _mm256_set1_epi8(-128));
    const __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(centred)));
    const __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(centred, 1)));
    const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_mul_ps(second, by), _mm512_mul_ps(first, by));
    std::memcpy(y, &both, 64);
  }
}

// Rounds: whether the processor may round to bfloat16.
template <int32_t Type, template <int32_t> class Kind, bool Rounds = false>
AVX512 void write(const Stretch& s, char* y) {
  constexpr int64_t kCodes = Kind<Type>::kBytes;
  const __m512 table = entries(s.table, int64_t(1) << s.bits, 0);
  const uint8_t* codes = s.codes;
  const float *shift = s.shift, *scale = s.scale;
  int64_t left = s.count / kStep<Type>, steps = s.first / kStep<Type>;
  for (const int64_t of_group = s.group / kStep<Type>; left; steps = smaller(of_group, left), ++shift, ++scale) {
    if (Rounds && is_simple(s.table, *shift, *scale)) {
      write_products(codes, steps, *scale, y);
    } else {
      Kind<Type> group;
      start(table, _mm512_set1_ps(*shift), _mm512_set1_ps(*scale), &group);
      for (int64_t step = 0; step < steps; ++step)
        _mm512_storeu_si512(y + step * 64, step_of(codes + step * kCodes, group));
    }
    y += steps * 64, codes += steps * kCodes, left -= steps;
  }
}

template <template <int32_t> class Kind>
WriteStretch write_as(int32_t type) {
  if (type == BITPORT_F32) return write<BITPORT_F32, Kind>;
  return type == BITPORT_F16 ? write<BITPORT_F16, Kind> : write<BITPORT_BF16, Kind>;
}

}  // namespace

WriteStretch avx512_write(int32_t isa, int32_t bits, int32_t type) {
  if (are_nibbles(bits)) return write_as<Nibbles>(type);
  if (type == BITPORT_BF16 && isa >= BITPORT_AVX512_BF16) return write<BITPORT_BF16, Bytes, true>;
  return write_as<Bytes>(type);
}

}  // namespace bitport
#endif
