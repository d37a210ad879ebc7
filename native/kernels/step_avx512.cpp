// Whole blocks of a step, 64 numbers at a time, with AVX-512 and byte table lookups (VBMI): a table of 256 4-byte
// entries is four tables of bytes, each looked up for 64 codes, then merged. Blocks that are not multiples of 64
// numbers are left to step_loops.cpp, which computes the same bits.
#include "uncontracted.h"
#include "cpu.h"
#include "engine.h"
#include "step.h"
#if BITPORT_X86
#include <cfloat>
#include <cstring>
#include <immintrin.h>
#include "step_codes.h"

namespace bitport {
namespace {

#define FAST __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi")))
#define FAST_INLINE FAST __attribute__((always_inline)) static inline

struct Four { __m512 at[4]; };
struct FourWhole { __m512i at[4]; };

// Reorders 64 codes so that lane l holds codes 16 j + 4 l .. of each j in turn, the order of pack and unpack
// instructions, which work within lanes; also the inverse.
FAST_INLINE __m512i turn(__m512i codes) {
  return _mm512_permutexvar_epi32(_mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0), codes);
}

// Packs integers to bytes, in turned order; negative ones become 0.
FAST_INLINE __m512i packed(const FourWhole& x) {
  return _mm512_packus_epi16(_mm512_packus_epi32(x.at[0], x.at[1]), _mm512_packus_epi32(x.at[2], x.at[3]));
}

// Looks up 4-byte entries for 64 turned codes; entry i of vector j belongs to code 16 j + i.
FAST_INLINE FourWhole look_up(const uint8_t* bytes, __m512i turned) {
  const __mmask64 upper = _mm512_movepi8_mask(turned);
  __m512i part[4];
  for (int b = 0; b < 4; ++b) {
    const uint8_t* table = bytes + 256 * b;
    const __m512i low = _mm512_permutex2var_epi8(_mm512_loadu_si512(table), turned, _mm512_loadu_si512(table + 64));
    const __m512i high = _mm512_permutex2var_epi8(_mm512_loadu_si512(table + 128), turned, _mm512_loadu_si512(table + 192));
    part[b] = _mm512_mask_blend_epi8(upper, low, high);
  }
  const __m512i words[4] = {
      _mm512_unpacklo_epi8(part[0], part[1]), _mm512_unpackhi_epi8(part[0], part[1]),
      _mm512_unpacklo_epi8(part[2], part[3]), _mm512_unpackhi_epi8(part[2], part[3])};
  return {{_mm512_unpacklo_epi16(words[0], words[2]), _mm512_unpackhi_epi16(words[0], words[2]),
           _mm512_unpacklo_epi16(words[1], words[3]), _mm512_unpackhi_epi16(words[1], words[3])}};
}

template <int32_t Bits>
FAST_INLINE __m512i codes_at(const uint8_t* codes) {
  if (Bits == 8) return _mm512_loadu_si512(codes);
  const __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
  return _mm512_and_si512(_mm512_or_si512(words, _mm512_slli_epi16(words, 4)), _mm512_set1_epi8(15));
}

template <int32_t Bits>
FAST_INLINE void store_codes(__m512i codes, uint8_t* to) {
  if (Bits == 8) {
    _mm512_storeu_si512(to, codes);
    return;
  }
  const __m512i words = _mm512_maddubs_epi16(codes, _mm512_set1_epi16(0x1001));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi16_epi8(words));
}

FAST_INLINE __m512 of_bf16(__m256i h) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

FAST_INLINE Four load(const void* from, int32_t type, int64_t at) {
  Four x;
  for (int j = 0; j < 4; ++j) {
    if (type == BITPORT_F32) {
      x.at[j] = _mm512_loadu_ps(static_cast<const float*>(from) + at + 16 * j);
      continue;
    }
    const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(from) + at + 16 * j));
    x.at[j] = type == BITPORT_BF16 ? of_bf16(h) : _mm512_cvtph_ps(h);
  }
  return x;
}

FAST_INLINE __m512i mix(__m512i x) {
  x = _mm512_mullo_epi32(_mm512_xor_si512(_mm512_srli_epi32(x, 16), x), _mm512_set1_epi32(0x21f0aaad));
  x = _mm512_mullo_epi32(_mm512_xor_si512(_mm512_srli_epi32(x, 15), x), _mm512_set1_epi32(0x735a2d97));
  return _mm512_xor_si512(_mm512_srli_epi32(x, 15), x);
}

// Rounding to nearest adds half a step, less one unit if the kept bits are even; a NaN stays one.
FAST_INLINE __m256i to_bf16(__m512 x, bool by_chance, __m512i random) {
  const __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i half = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), odd);
  const __m512i some = by_chance ? _mm512_and_si512(random, _mm512_set1_epi32(0xffff)) : half;
  const __m512i sum = _mm512_srli_epi32(_mm512_add_epi32(bits, some), 16);
  const __m512i exponent = _mm512_set1_epi32(0x7f800000), kept = _mm512_srli_epi32(bits, 16);
  const __mmask16 endless = _mm512_cmpeq_epi32_mask(_mm512_and_si512(bits, exponent), exponent);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_mask_or_epi32(kept, nan, kept, _mm512_set1_epi32(0x40));
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(sum, endless, quiet));
}

constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

FAST_INLINE __m256i to_f16(__m512 x, bool by_chance, __m512i random) {
  const __m256i nearest = _mm512_cvtps_ph(x, kNearest);
  if (!by_chance) return nearest;
  const __m512i bits = _mm512_castps_si512(x), cut = _mm512_set1_epi32(0x1fff);
  const __m512i carried = _mm512_andnot_si512(cut, _mm512_add_epi32(bits, _mm512_and_si512(random, cut)));
  const __m512 size = _mm512_abs_ps(x), steps = _mm512_mul_ps(size, _mm512_set1_ps(0x1p24f));
  const __mmask16 small = _mm512_cmp_ps_mask(size, _mm512_set1_ps(0x1p-14f), _CMP_LT_OQ);
  const __m512 whole = _mm512_roundscale_ps(steps, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
  const __m512 chance = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srli_epi32(random, 8)), _mm512_set1_ps(0x1p-24f));
  const __mmask16 up = _mm512_cmp_ps_mask(chance, _mm512_sub_ps(steps, whole), _CMP_LT_OQ);
  const __m512i count = _mm512_mask_add_epi32(_mm512_cvttps_epi32(whole), up, _mm512_cvttps_epi32(whole), _mm512_set1_epi32(1));
  const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x8000));
  const __m512i exponent = _mm512_set1_epi32(0x7f800000);
  const __mmask16 endless = _mm512_cmpeq_epi32_mask(_mm512_and_si512(bits, exponent), exponent);
  const __m512i large = _mm512_cvtepu16_epi32(_mm512_cvtps_ph(_mm512_castsi512_ps(carried), kNearest));
  __m512i result = _mm512_mask_mov_epi32(large, small, _mm512_or_si512(count, sign));
  result = _mm512_mask_mov_epi32(result, endless, _mm512_cvtepu16_epi32(nearest));
  return _mm512_cvtepi32_epi16(result);
}

FAST_INLINE void store(const Four& x, void* to, int32_t type, int64_t at, bool by_chance, uint32_t key) {
  const __m512i places = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  for (int j = 0; j < 4; ++j) {
    if (type == BITPORT_F32) {
      _mm512_storeu_ps(static_cast<float*>(to) + at + 16 * j, x.at[j]);
      continue;
    }
    const __m512i place = _mm512_add_epi32(places, _mm512_set1_epi32(int32_t(uint32_t(at) + 16u * uint32_t(j))));
    const __m512i random = by_chance ? mix(_mm512_xor_si512(place, _mm512_set1_epi32(int32_t(key)))) : place;
    const __m256i h = type == BITPORT_BF16 ? to_bf16(x.at[j], by_chance, random) : to_f16(x.at[j], by_chance, random);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<uint16_t*>(to) + at + 16 * j), h);
  }
}

// A block of a moment.
struct Kept {
  const BitportMoment& moment;
  int64_t at;
  Place place;
};

template <bool Coded>
FAST_INLINE Kept kept_of(const BitportMoment& m, int64_t k, int64_t row, int64_t begin) {
  return {m, row * k + begin, Coded ? place_of(m, k, row, begin) : Place{}};
}

int32_t bits_of(const BitportMoment& m) { return m.map ? m.map->bits : 0; }

template <int32_t Bits>
FAST_INLINE Four read(const Kept& kept, int64_t i) {
  if (Bits == 0) return load(kept.moment.data, kept.moment.type, kept.at + i);
  const FourWhole found = look_up(kept.moment.map->value_bytes, turn(codes_at<Bits>(kept.place.codes + i * Bits / 8)));
  Four x;
  for (int j = 0; j < 4; ++j) x.at[j] = _mm512_mul_ps(_mm512_castsi512_ps(found.at[j]), _mm512_set1_ps(*kept.place.scale));
  return x;
}

// The codes of 64 numbers q, already divided by the scale of their block (see BitportMap).
FAST_INLINE __m512i codes_of(const Four& q, const BitportMap& map) {
  const __m512 low = _mm512_loadu_ps(map.borders), high = _mm512_loadu_ps(map.borders + 16);
  const __m512i zone_low = _mm512_loadu_si512(map.zones), zone_high = _mm512_loadu_si512(map.zones + 16);
  const __m512 slopes = _mm512_loadu_ps(map.slopes), offsets = _mm512_loadu_ps(map.offsets);
  FourWhole rank;
  for (int j = 0; j < 4; ++j) {
    const __m512 size = _mm512_max_ps(_mm512_abs_ps(q.at[j]), _mm512_set1_ps(map.lowest));
    const __m512i exponent = _mm512_srli_epi32(_mm512_castps_si512(size), 23);
    const __mmask16 beyond = _mm512_cmp_ps_mask(size, _mm512_permutex2var_ps(low, exponent, high), _CMP_GT_OQ);
    __m512i zone = _mm512_permutex2var_epi32(zone_low, exponent, zone_high);
    zone = _mm512_mask_add_epi32(zone, beyond, zone, _mm512_set1_epi32(1));
    const __m512 line = _mm512_fmadd_ps(size, _mm512_permutexvar_ps(zone, slopes), _mm512_permutexvar_ps(zone, offsets));
    rank.at[j] = _mm512_cvttps_epi32(line);
  }
  const FourWhole ranked = look_up(map.ranked_bytes, packed(rank));
  for (int j = 0; j < 4; ++j) {
    const __m512i bits = _mm512_castps_si512(q.at[j]), negative = _mm512_srai_epi32(bits, 31);
    const __mmask16 more = _mm512_cmpgt_epu32_mask(_mm512_rol_epi32(bits, 1), ranked.at[j]);
    __m512i code = _mm512_mask_add_epi32(rank.at[j], more, rank.at[j], _mm512_set1_epi32(1));
    if (map.way == BITPORT_CENTRED) {   // packing clamps negative codes to 0
      code = _mm512_sub_epi32(_mm512_xor_si512(code, negative), negative);
      code = _mm512_add_epi32(code, _mm512_set1_epi32(map.zero));
    } else if (map.way == BITPORT_SIGN) {
      code = _mm512_or_si512(code, _mm512_and_si512(negative, _mm512_set1_epi32(128)));
    }
    rank.at[j] = code;
  }
  return turn(packed(rank));
}

struct Numbers { alignas(64) float at[kMostInBlock]; };

template <int32_t Bits>
FAST_INLINE void write(const Kept& kept, int64_t count, const Numbers& x, __m512i sizes) {
  const BitportMap& map = *kept.moment.map;
  const float scale = *kept.place.scale = scale_of(uint32_t(_mm512_reduce_max_epu32(sizes)), map), inverse = 1 / scale;
  const bool simple = inverse - inverse == 0;   // neither NaN nor infinite
  for (int64_t i = 0; i < count; i += 64) {
    Four q;
    for (int j = 0; j < 4; ++j) {
      const __m512 v = _mm512_load_ps(x.at + i + 16 * j);
      q.at[j] = _mm512_mul_ps(v, _mm512_set1_ps(inverse));
      if (map.positive) q.at[j] = _mm512_max_ps(_mm512_min_ps(v, _mm512_set1_ps(FLT_MIN)), q.at[j]);
    }
    if (!simple) {
      float steps[64];
      for (int j = 0; j < 4; ++j) _mm512_storeu_ps(steps + 16 * j, q.at[j]);
      code_one_by_one(map, steps, 64, kept.place.codes + i * Bits / 8);
      continue;
    }
    store_codes<Bits>(codes_of(q, map), kept.place.codes + i * Bits / 8);
  }
}

// Stores an updated moment in memory, or, if it will be coded, in `numbers`; returns the largest magnitudes so far.
template <int32_t Bits>
FAST_INLINE __m512i put(const Kept& kept, const Four& x, int64_t i, bool by_chance, __m512i largest, Numbers* numbers) {
  if (Bits == 0) {
    store(x, kept.moment.data, kept.moment.type, kept.at + i, by_chance, kept.moment.key);
    return largest;
  }
  for (int j = 0; j < 4; ++j) {
    const __m512i size = _mm512_and_si512(_mm512_castps_si512(x.at[j]), _mm512_set1_epi32(0x7fffffff));
    largest = _mm512_max_epu32(largest, size);
    _mm512_store_ps(numbers->at + i + 16 * j, x.at[j]);
  }
  return largest;
}

template <int32_t Rule, bool L2>
FAST_INLINE void move(const BitportStep& s, __m512 g, __m512* p, __m512* m, __m512* v) {
  const __m512 beta1 = _mm512_set1_ps(s.beta1), rest1 = _mm512_set1_ps(s.rest1), rate = _mm512_set1_ps(s.rate);
  const __m512 beta2 = _mm512_set1_ps(s.beta2), rest2 = _mm512_set1_ps(s.rest2);
  g = g * _mm512_set1_ps(s.sign);   // products with 1 change nothing
  if (L2) g = g + *p * _mm512_set1_ps(s.l2);
  *p = *p * _mm512_set1_ps(s.decay);
  const __m512 mean = *m * beta1 + g * rest1;
  if (Rule == BITPORT_ADAM) {
    *m = mean;
    *v = *v * beta2 + g * g * rest2;
    const __m512 root = _mm512_sqrt_ps(*v) * _mm512_set1_ps(s.correction) + _mm512_set1_ps(s.eps);
    *p = *p - mean / root * rate;
  } else if (Rule == BITPORT_LION) {
    const __m512 zero = _mm512_setzero_ps(), one = _mm512_set1_ps(1.0f);
    const __m512 above = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(mean, zero, _CMP_GT_OQ), one);
    const __m512 below = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(mean, zero, _CMP_LT_OQ), one);
    *p = *p - (above - below + zero * mean) * rate;   // NaN if the mean is not finite
    *m = *m * beta2 + g * rest2;
  } else if (s.count == 0) {
    *p = *p - g * rate;
  } else {
    *m = mean;
    *p = *p - (s.nesterov != 0 ? g + mean * beta1 : mean) * rate;
  }
}

// Bits: of the codes of all moments, 0 for floats; Count: number of moments.
template <int32_t Rule, int32_t Count, int32_t Bits>
FAST void step_block(const BitportStep& s, int64_t row, int64_t begin, int64_t count) {
  const int64_t at = row * s.k + begin;
  const Kept first = kept_of<(Bits > 0 && Count > 0)>(s.moments[0], s.k, row, begin);
  const Kept second = kept_of<(Bits > 0 && Count > 1)>(s.moments[1], s.k, row, begin);
  Numbers means, squares;
  __m512i largest_mean = _mm512_setzero_si512(), largest_square = largest_mean;
  for (int64_t i = 0; i < count; i += 64) {
    Four p = load(s.param, s.type, at + i), m = {}, v = {};
    const Four g = load(s.grad, s.grad_type, at + i);
    if (Count > 0) m = read<Bits>(first, i);
    if (Count > 1) v = read<Bits>(second, i);
    if (s.l2 != 0) {
      for (int j = 0; j < 4; ++j) move<Rule, true>(s, g.at[j], &p.at[j], &m.at[j], &v.at[j]);
    } else {
      for (int j = 0; j < 4; ++j) move<Rule, false>(s, g.at[j], &p.at[j], &m.at[j], &v.at[j]);
    }
    store(p, s.param, s.type, at + i, s.by_chance, s.key);
    if (Count > 0) largest_mean = put<Bits>(first, m, i, s.by_chance, largest_mean, &means);
    if (Count > 1) largest_square = put<Bits>(second, v, i, s.by_chance, largest_square, &squares);
  }
  if (Bits == 0) return;
  if (Count > 0) write<Bits>(first, count, means, largest_mean);
  if (Count > 1) write<Bits>(second, count, squares, largest_square);
}

template <int32_t Rule, int32_t Count>
StepBlock of_bits(int32_t bits) {
  return bits == 8 ? step_block<Rule, Count, 8> : bits == 4 ? step_block<Rule, Count, 4> : step_block<Rule, Count, 0>;
}

}  // namespace

StepBlock step_whole_vectors(int32_t rule, const BitportStep& step) {
  if (step.count == 0) return step_block<BITPORT_SGD, 0, 0>;   // moments beyond the count may hold anything
  const int32_t bits = bits_of(step.moments[0]);
  if (step.count > 1 && bits_of(step.moments[1]) != bits) return nullptr;
  if (rule == BITPORT_ADAM) return of_bits<BITPORT_ADAM, 2>(bits);
  if (rule == BITPORT_LION) return of_bits<BITPORT_LION, 1>(bits);
  return of_bits<BITPORT_SGD, 1>(bits);
}

bool has_byte_lookups() { return cpu().vbmi; }

}  // namespace bitport
#endif
