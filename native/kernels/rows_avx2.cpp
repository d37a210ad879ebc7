// A piece of a row as numbers, with 256-bit vectors. Of up to 4 bits a group has 16 different numbers at most: those of
// two bytes are computed once and looked up by the bytes of a register.
#include "rows.h"
#if defined(__x86_64__) && defined(__linux__)
#include "avx2.h"

namespace bitport {
namespace {

AVX2_INLINE __m128i halves(__m256 v, int32_t type) {
  return type == BITPORT_BF16 ? bf16_of(v) : _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
}

// The 16-bit numbers of codes below 16: a byte of each in `low`, the other in `high`.
struct Bytes { __m256i low, high; };

AVX2_INLINE Bytes bytes_of(const Piece& p, int32_t type) {
  const __m256 shift = _mm256_set1_ps(p.shift), scale = _mm256_set1_ps(p.scale);
  float repeated[16];
  const float* table = p.table;
  if (p.bits < 4) {
    for (int i = 0; i < 16; ++i) repeated[i] = p.table[i & ((1 << p.bits) - 1)];
    table = repeated;
  }
  const __m128i a = halves(_mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(table), shift), scale), type);
  const __m128i b = halves(_mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(table + 8), shift), scale), type);
  const __m128i byte = _mm_set1_epi16(255);
  const __m128i low = _mm_packus_epi16(_mm_and_si128(a, byte), _mm_and_si128(b, byte));
  const __m128i high = _mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8));
  return {_mm256_broadcastsi128_si256(low), _mm256_broadcastsi128_si256(high)};
}

// 32 numbers; of the codes, the second and third quarter have changed places.
AVX2_INLINE void write_32(__m256i codes, const Bytes& bytes, uint16_t* y) {
  const __m256i low = _mm256_shuffle_epi8(bytes.low, codes), high = _mm256_shuffle_epi8(bytes.high, codes);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), _mm256_unpacklo_epi8(low, high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(y + 16), _mm256_unpackhi_epi8(low, high));
}

AVX2_INLINE int64_t look_up(const Piece& p, uint16_t* y, int32_t type) {
  const Bytes bytes = bytes_of(p, type);
  int64_t i = 0;
  for (; i + 32 <= p.count; i += 32) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p.codes + i));
    write_32(_mm256_permute4x64_epi64(codes, _MM_SHUFFLE(3, 1, 2, 0)), bytes, y + i);
  }
  return i;
}

}  // namespace

AVX2 void avx2_write_nibbles(const Piece& p, void* y, int32_t type, int64_t at) {
  const Bytes bytes = bytes_of(p, type);
  for (int64_t i = 0; i < p.count; i += 32) {
    const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p.codes + i / 2));
    const __m256i words = _mm256_cvtepu8_epi16(_mm_shuffle_epi32(pairs, _MM_SHUFFLE(3, 1, 2, 0)));
    const __m256i codes = _mm256_and_si256(_mm256_or_si256(words, _mm256_slli_epi16(words, 4)), _mm256_set1_epi8(15));
    write_32(codes, bytes, static_cast<uint16_t*>(y) + at + i);
  }
}

AVX2 void avx2_write_piece(const Piece& p, void* y, int32_t type, int64_t at) {
  uint16_t* const words = static_cast<uint16_t*>(y) + at;
  int64_t i = p.bits <= 4 && type != BITPORT_F32 ? look_up(p, words, type) : 0;
  const __m256 shift = _mm256_set1_ps(p.shift), scale = _mm256_set1_ps(p.scale), least = _mm256_set1_ps(p.table[0]);
  for (; i + 8 <= p.count; i += 8) {
    const __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p.codes + i)));
    const __m256 meant = p.integer ? _mm256_add_ps(_mm256_cvtepi32_ps(codes), least) : _mm256_i32gather_ps(p.table, codes, 4);
    const __m256 v = _mm256_mul_ps(_mm256_sub_ps(meant, shift), scale);
    if (type == BITPORT_F32) _mm256_storeu_ps(static_cast<float*>(y) + at + i, v);
    else _mm_storeu_si128(reinterpret_cast<__m128i*>(words + i), halves(v, type));
  }
  for (; i < p.count; ++i) store_number((p.table[p.codes[i]] - p.shift) * p.scale, y, type, at + i);
}

}  // namespace bitport
#endif
