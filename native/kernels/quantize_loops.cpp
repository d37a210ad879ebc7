// The loops over the elements of a weight, auto-vectorized for each register width.
#include <cstring>
#include <type_traits>
#include "bits.h"
#include "engine.h"
#include "number.h"
#include "quantize.h"
#if BITPORT_X86
#include <immintrin.h>
#endif

namespace bitport {
namespace {

// As signed integers, positive numbers are the largest; as unsigned ones, negative numbers: two comparisons per number.
template <class T>
struct Extremes {
  using Signed = std::make_signed_t<T>;
  static constexpr T kSign = T(T(1) << (8 * sizeof(T) - 1));
  Signed positive = 0;
  T negative = 0;
  BITPORT_INLINE void add(T bits) {
    positive = Signed(bits) > positive ? Signed(bits) : positive;
    negative = bits > negative ? bits : negative;
  }
  BITPORT_INLINE Range range() const { return {uint32_t(positive), negative & kSign ? negative & T(~kSign) : 0u}; }
};

template <class T>
BITPORT_INLINE void measure(const void* numbers, int64_t k, int64_t block, Range* ranges) {
  const T* x = static_cast<const T*>(numbers);
  for (int64_t from = 0; from < k; from += block, ++ranges) {
    Extremes<T> found;
    for (int64_t i = from; i < (k - from < block ? k : from + block); ++i) found.add(x[i]);
    ranges->add(found.range());
  }
}

#if BITPORT_X86
// The same for 16 bits. minpos finds the smallest of eight unsigned numbers, so the maxima are complemented.
__attribute__((target("avx2"))) void measure_words(const void* numbers, int64_t k, int64_t block, Range* ranges) {
  const uint16_t* x = static_cast<const uint16_t*>(numbers);
  for (int64_t from = 0; from < k; from += block, ++ranges) {
    const int64_t end = k - from < block ? k : from + block;
    __m256i positive = _mm256_setzero_si256(), negative = positive;
    int64_t i = from;
    for (; i + 16 <= end; i += 16) {
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
      positive = _mm256_max_epi16(positive, bits);
      negative = _mm256_max_epu16(negative, bits);
    }
    const __m128i most = _mm_max_epi16(_mm256_castsi256_si128(positive), _mm256_extracti128_si256(positive, 1));
    const __m128i least = _mm_max_epu16(_mm256_castsi256_si128(negative), _mm256_extracti128_si256(negative, 1));
    Extremes<uint16_t> found;
    found.add(uint16_t(~_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(most, _mm_set1_epi16(-1))))));
    found.add(uint16_t(~_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(least, _mm_set1_epi16(-1))))));
    for (; i < end; ++i) found.add(x[i]);
    ranges->add(found.range());
  }
}
#endif

// Rounds an element divided by its scale, of magnitude at most 2^21, to an integer, ties to even, and adds `more`: the
// result is in the lowest bits of the sum.
BITPORT_INLINE int32_t whole(float q, int32_t more = 0) {
  return int32_t(bits_of_float(q + 12582912.0f) + (uint32_t(more) - 0x4b400000u));
}
constexpr float kFar = 0x1p20f;   // larger quotients are clamped to it: it exceeds every code

// Codes of q, an element divided by its scale; x is the element itself, with the same sign. constant: for blocks
// without scale.

struct Integer {   // an integer offset is added after rounding, which keeps the sum exact
  int32_t offset, most;
  Integer(const BitportFormat& f, const Step& step) : offset(int32_t(step.offset)), most((1 << f.bits) - 1) {}
  BITPORT_INLINE int32_t operator()(float q, float) const {
    const int32_t code = whole(q, offset);
    return code < 0 ? 0 : code > most ? most : code;
  }
  BITPORT_INLINE int32_t constant() const { return offset; }
};

struct Shifted {   // any other offset is added before rounding
  float offset;
  int32_t most;
  Shifted(const BitportFormat& f, const Step& step) : offset(step.offset), most((1 << f.bits) - 1) {}
  BITPORT_INLINE int32_t operator()(float q, float) const {
    const int32_t code = whole(q + offset);
    return code < 0 ? 0 : code > most ? most : code;
  }
  BITPORT_INLINE int32_t constant() const { return int32_t(offset); }
};

// [sign | exponent | mantissa]. A magnitude is added to the power of two whose ulp is the distance between the adjacent
// codes: the low bits of the sum are the number of these steps, rounded to even. Subnormal steps equal those of the
// lowest binade.
template <int Exponent, int Mantissa>
struct Float {
  static constexpr int kCut = 23 - Mantissa, kSign = Exponent + Mantissa;
  static constexpr int32_t kNormal = (129 - (1 << (Exponent - 1))) << 23;   // bits of the smallest normal number
  int32_t largest, nan_code;   // largest: as bits
  Float(const BitportFormat& f, const Step&) : largest(int32_t(bits_of_float(f.largest))), nan_code(f.nan_code) {}
  BITPORT_INLINE int32_t operator()(float q, float x) const {
    const int32_t whole_size = int32_t(bits_of_float(q) & 0x7fffffffu);
    const int32_t bits = whole_size < largest ? whole_size : largest;   // ordered like the numbers
    const int32_t power = bits & 0x7f800000, from = power > kNormal ? power : kNormal, counter = from + (kCut << 23);
    const int32_t steps = int32_t(bits_of_float(float_of_bits(uint32_t(bits)) + float_of_bits(uint32_t(counter)))) - counter;
    return (steps + ((from - kNormal) >> kCut)) | int32_t(bits_of_float(x) >> 31 << kSign);
  }
  BITPORT_INLINE int32_t constant() const { return nan_code; }
};

struct Codebook {   // 4 bits: the number of thresholds below, by binary search
  float thresholds[15];
  int32_t nan_code;
  Codebook(const BitportFormat& f, const Step&) : nan_code(f.nan_code) {
    std::memcpy(thresholds, f.thresholds, sizeof thresholds);
  }
  BITPORT_INLINE int32_t operator()(float q, float) const {
    const float* const t = thresholds;
    const bool a = q > t[7];
    const float t1 = a ? t[9] : t[1], t3 = a ? t[11] : t[3], t5 = a ? t[13] : t[5];
    const float t0 = a ? t[8] : t[0], t2 = a ? t[10] : t[2], t4 = a ? t[12] : t[4], t6 = a ? t[14] : t[6];
    const bool b = q > t3;
    const float u1 = b ? t5 : t1, u0 = b ? t4 : t0, u2 = b ? t6 : t2;
    const bool c = q > u1;
    const bool d = q > (c ? u2 : u0);
    return (a ? 8 : 0) + (b ? 4 : 0) + (c ? 2 : 0) + (d ? 1 : 0);
  }
  BITPORT_INLINE int32_t constant() const { return nan_code; }
};

// x / scale. With the inverse rounded to nearest, x * inverse is off by less than two ulps; each of the following steps
// adds the remainder, computed exactly, and the second one rounds like a division (Markstein). It takes a quarter of
// the time.
template <int Steps>
BITPORT_INLINE float quotient(float x, float scale, float inverse) {
  float q = x * inverse;
  for (int i = 0; i < Steps; ++i) q = __builtin_fmaf(__builtin_fmaf(-q, scale, x), inverse, q);
  return q;
}

template <int Count, int Steps, class Code, class Number>
BITPORT_INLINE void encode_piece(const Code& code, float scale, float inverse, const Number* x, uint8_t* y) {
  int32_t codes[Count];   // narrowed at the end: else the compiler narrows each term of a code separately
  for (int i = 0; i < Count; ++i) {
    const float number = x[i];
    codes[i] = code(quotient<Steps>(number, scale, inverse), number);
  }
  for (int i = 0; i < Count; ++i) y[i] = uint8_t(codes[i]);
}

template <int Steps, class Code, class Number>
BITPORT_INLINE void encode_products(const Code& code, const Step& step, const Number* x, int64_t count, uint8_t* y) {
  const float scale = step.scale, inverse = step.inverse;
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) encode_piece<32, Steps>(code, scale, inverse, x + i, y + i);
  for (; i + 16 <= count; i += 16) encode_piece<16, Steps>(code, scale, inverse, x + i, y + i);
  for (; i < count; ++i) encode_piece<1, Steps>(code, scale, inverse, x + i, y + i);
}

template <class Code, class Number>
BITPORT_INLINE void encode_quotients(const Code& code, const Step& step, const Number* x, int64_t count, uint8_t* y) {
  for (int64_t i = 0; i < count; ++i) {
    const float number = x[i], q = number / step.scale;
    y[i] = uint8_t(code(q > kFar ? kFar : q < -kFar ? -kFar : q, number));
  }
}

template <bool Fma, class Code, class Number>
BITPORT_INLINE void encode(const BitportFormat& f, const Number* x, int64_t from, int64_t to, const Step* steps,
                           uint8_t* codes) {
  for (int64_t at = from, block = from / f.block_k; at < to; ++block) {
    const int64_t end = (block + 1) * f.block_k < to ? (block + 1) * f.block_k : to, count = end - at;
    const Code code(f, steps[block]);
    const Number* numbers = x + (at - from);
    uint8_t* y = codes + (at - from);
    const Step& step = steps[block];
    if (step.way == Way::constant) std::memset(y, code.constant(), size_t(count));
    else if (!Fma || step.way == Way::division) encode_quotients(code, step, numbers, count, y);
    else if (step.way == Way::product) encode_products<2>(code, step, numbers, count, y);
    else if (step.way == Way::near) encode_products<1>(code, step, numbers, count, y);
    else encode_products<0>(code, step, numbers, count, y);
    at = end;
  }
}

// Codes of 2 or 4 bits: the codes of an output byte are in one word.
template <int Bits, class Word>
BITPORT_INLINE void pack_words(const uint8_t* codes, int64_t count, uint8_t* dense) {
  for (int64_t i = 0; i < count; ++i) {
    Word word;
    std::memcpy(&word, codes + i * int64_t(sizeof word), sizeof word);
    if constexpr (Bits == 2) word |= word >> 12;
    dense[i] = uint8_t(word | word >> (8 - Bits));
  }
}

template <int Bits>
BITPORT_INLINE void pack_as(const uint8_t* codes, int64_t count, uint8_t* dense) {
  const int64_t eights = count / 8, rest = count % 8;
  if constexpr (Bits == 4) pack_words<4, uint16_t>(codes, eights * 4, dense);
  else if constexpr (Bits == 2) pack_words<2, uint32_t>(codes, eights * 2, dense);
  else
    for (int64_t i = 0; i < eights; ++i) {
      uint64_t eight;
      std::memcpy(&eight, codes + i * 8, 8);
      eight = gather<Bits>(eight);
      std::memcpy(dense + i * Bits, &eight, Bits);
    }
  if (rest) {
    uint64_t last = 0;
    std::memcpy(&last, codes + eights * 8, size_t(rest));
    last = gather<Bits>(last);
    std::memcpy(dense + eights * Bits, &last, size_t((rest * Bits + 7) / 8));
  }
}

BITPORT_INLINE void pack_dense(const uint8_t* codes, int64_t count, int32_t bits, uint8_t* dense) {
  switch (bits) {
    case 1: pack_as<1>(codes, count, dense); break;
    case 2: pack_as<2>(codes, count, dense); break;
    case 3: pack_as<3>(codes, count, dense); break;
    case 4: pack_as<4>(codes, count, dense); break;
    case 5: pack_as<5>(codes, count, dense); break;
    case 6: pack_as<6>(codes, count, dense); break;
    case 7: pack_as<7>(codes, count, dense); break;
    default: std::memcpy(dense, codes, size_t(count));
  }
}

template <bool Fma, class Code>
BITPORT_INLINE void encode_any(const BitportFormat& f, const void* x, int32_t type, int64_t from, int64_t to,
                               const Step* steps, uint8_t* codes) {
  if (type == BITPORT_BF16) encode<Fma, Code>(f, static_cast<const BFloat16*>(x), from, to, steps, codes);
  else encode<Fma, Code>(f, static_cast<const float*>(x), from, to, steps, codes);
}

#define BITPORT_ENCODE(name, attribute, fma, ...)                                                                     \
  attribute void name(const BitportFormat& f, const void* x, int32_t type, int64_t from, int64_t to,                 \
                      const Step* steps, uint8_t* codes) {                                                           \
    encode_any<fma, __VA_ARGS__>(f, x, type, from, to, steps, codes);                                                \
  }
#define BITPORT_LOOPS(variant, attribute, fma, words)                                                                        \
  namespace variant {                                                                                                 \
  attribute void measure32(const void* x, int64_t k, int64_t b, Range* r) { measure<uint32_t>(x, k, b, r); }          \
  attribute void pack(const uint8_t* c, int64_t n, int32_t bits, uint8_t* d) { pack_dense(c, n, bits, d); }           \
  BITPORT_ENCODE(integer, attribute, fma, Integer)                                                                   \
  BITPORT_ENCODE(shifted, attribute, fma, Shifted)                                                                   \
  BITPORT_ENCODE(e4m3, attribute, fma, Float<4, 3>)                                                                  \
  BITPORT_ENCODE(e5m2, attribute, fma, Float<5, 2>)                                                                  \
  BITPORT_ENCODE(e2m3, attribute, fma, Float<2, 3>)                                                                  \
  BITPORT_ENCODE(e3m2, attribute, fma, Float<3, 2>)                                                                  \
  BITPORT_ENCODE(e2m1, attribute, fma, Float<2, 1>)                                                                  \
  BITPORT_ENCODE(codebook, attribute, fma, Codebook)                                                                 \
  Loops::Encode encode_of(const BitportFormat& f) {                                                                   \
    if (f.kind == BITPORT_CODEBOOK) return f.bits == 4 ? codebook : nullptr;                                         \
    if (f.kind == BITPORT_INTEGER) return has_whole_offset(f) ? integer : shifted;                                    \
    switch (f.bits * 10 + f.mantissa) {                                                                               \
      case 83: return e4m3;                                                                                          \
      case 82: return e5m2;                                                                                          \
      case 63: return e2m3;                                                                                          \
      case 62: return e3m2;                                                                                          \
      case 41: return e2m1;                                                                                          \
      default: return nullptr;                                                                                       \
    }                                                                                                                 \
  }                                                                                                                   \
  constexpr Loops loops = {words, measure32, encode_of, pack};                                                    \
  }
void measure_plainly(const void* x, int64_t k, int64_t b, Range* r) { measure<uint16_t>(x, k, b, r); }
BITPORT_LOOPS(plain, , false, measure_plainly)
#if BITPORT_X86
BITPORT_LOOPS(avx2, __attribute__((target("avx2,fma"))), true, measure_words)
BITPORT_LOOPS(avx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma" BITPORT_LONG_VECTORS))), true,
              measure_words)
#elif BITPORT_ARM
BITPORT_LOOPS(neon, , true, measure_plainly)
#endif

}  // namespace

const Loops& loops_of(int32_t isa) {
#if BITPORT_X86
  if (isa >= BITPORT_AVX512_VNNI) return avx512::loops;
  if (isa == BITPORT_AVX2) return avx2::loops;
#elif BITPORT_ARM
  if (isa >= BITPORT_NEON) return neon::loops;
#endif
  (void)isa;
  return plain::loops;
}

}  // namespace bitport
