// Dequantizes rows with 256-bit vectors. With up to 4 bits a group has at most 16 different values: 16-bit ones are
// computed once and looked up bytewise in registers.
#include "rows.h"
#if BITPORT_X86
#include <cstring>
#include "avx2.h"

namespace bitport {
namespace {

AVX2_INLINE __m128i halves(__m256 v, int32_t type) {
  return type == BITPORT_BF16 ? bf16_of(v) : _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
}

struct Affine8 { __m256 scale, shift; };

AVX2_INLINE __m256 times(__m256 meant, const Affine8& group) {
  return _mm256_mul_ps(_mm256_sub_ps(meant, group.shift), group.scale);
}

// The 16-bit values of codes below 16, split into low and high bytes.
struct Bytes { __m256i low, high; };

AVX2_INLINE Bytes bytes_of(const float* table, const Affine8& group, int32_t type) {
  const __m128i a = halves(times(_mm256_loadu_ps(table), group), type);
  const __m128i b = halves(times(_mm256_loadu_ps(table + 8), group), type);
  const __m128i byte = _mm_set1_epi16(255);
  const __m128i low = _mm_packus_epi16(_mm_and_si128(a, byte), _mm_and_si128(b, byte));
  const __m128i high = _mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8));
  return {_mm256_broadcastsi128_si256(low), _mm256_broadcastsi128_si256(high)};
}

AVX2_INLINE void look_up_32(const uint8_t* nibbles, const Bytes& bytes, uint16_t* y) {
  const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(nibbles));
  const __m256i words = _mm256_cvtepu8_epi16(_mm_shuffle_epi32(pairs, _MM_SHUFFLE(3, 1, 2, 0)));
  const __m256i codes = _mm256_and_si256(_mm256_or_si256(words, _mm256_slli_epi16(words, 4)), _mm256_set1_epi8(15));
  const __m256i low = _mm256_shuffle_epi8(bytes.low, codes), high = _mm256_shuffle_epi8(bytes.high, codes);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), _mm256_unpacklo_epi8(low, high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(y + 16), _mm256_unpackhi_epi8(low, high));
}

AVX2_INLINE void look_up_16(const uint8_t* nibbles, const Bytes& bytes, uint16_t* y) {
  const __m128i words = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(nibbles)));
  const __m128i codes = _mm_and_si128(_mm_or_si128(words, _mm_slli_epi16(words, 4)), _mm_set1_epi8(15));
  const __m128i low = _mm_shuffle_epi8(_mm256_castsi256_si128(bytes.low), codes);
  const __m128i high = _mm_shuffle_epi8(_mm256_castsi256_si128(bytes.high), codes);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(y), _mm_unpacklo_epi8(low, high));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(y + 8), _mm_unpackhi_epi8(low, high));
}

template <bool Nibbles>
AVX2_INLINE __m256i eight_codes(const uint8_t* codes, int64_t i) {
  if constexpr (!Nibbles) return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
  int32_t eight;
  std::memcpy(&eight, codes + i / 2, 4);
  const __m256i places = _mm256_set_epi32(28, 24, 20, 16, 12, 8, 4, 0);
  return _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(eight), places), _mm256_set1_epi32(15));
}

template <bool Nibbles>
AVX2 void write(const Stretch& s, char* y) {
  float repeated[16];
  const float* table = s.table;
  if (s.bits < 4) {
    for (int i = 0; i < 16; ++i) repeated[i] = s.table[i & ((1 << s.bits) - 1)];
    table = repeated;
  }
  const __m256 least = _mm256_set1_ps(table[0]);
  uint16_t* const words = reinterpret_cast<uint16_t*>(y);
  int64_t i = 0, group = 0;
  for (int64_t end = s.first; i < s.count; end += smaller(s.group, s.count - end), ++group) {
    const Affine8 by{_mm256_set1_ps(s.scale[group]), _mm256_set1_ps(s.shift[group])};
    if (Nibbles && s.type != BITPORT_F32) {
      const Bytes bytes = bytes_of(table, by, s.type);
      for (; i + 32 <= end; i += 32) look_up_32(s.codes + i / 2, bytes, words + i);
      for (; i + 16 <= end; i += 16) look_up_16(s.codes + i / 2, bytes, words + i);
    }
    for (; i + 8 <= end; i += 8) {
      const __m256i codes = eight_codes<Nibbles>(s.codes, i);
      const __m256 meant = s.integer ? _mm256_add_ps(_mm256_cvtepi32_ps(codes), least)
                                     : _mm256_i32gather_ps(table, codes, 4);
      const __m256 v = times(meant, by);
      if (s.type == BITPORT_F32) _mm256_storeu_ps(reinterpret_cast<float*>(y) + i, v);
      else _mm_storeu_si128(reinterpret_cast<__m128i*>(words + i), halves(v, s.type));
    }
    for (; i < end; ++i) {
      const int code = Nibbles ? s.codes[i / 2] >> i % 2 * 4 & 15 : s.codes[i];
      store_number((table[code] - s.shift[group]) * s.scale[group], y, s.type, i);
    }
  }
}

}  // namespace

WriteStretch avx2_write(int32_t bits) { return are_nibbles(bits) ? write<true> : write<false>; }

}  // namespace bitport
#endif
