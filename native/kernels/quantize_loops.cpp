// The loops over the numbers of a weight, made into vectors of each width by the compiler.
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

#if defined(__GNUC__)
#define BITPORT_INLINE __attribute__((always_inline)) inline
#else
#define BITPORT_INLINE inline
#endif

// As signed integers the positive numbers are the largest, as unsigned ones the negative: two comparisons per number.
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
// The same for 16 bits. One instruction finds the smallest of eight unsigned numbers: of what is left of a block the
// largest are brought there.
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

// A number in steps of its block, of at most 2^21, to a whole number, ties to even: it ends up in the lowest bits of the
// sum.
BITPORT_INLINE int32_t whole(float q) { return int32_t(bits_of_float(q + 12582912.0f) - 0x4b400000u); }
constexpr float kFar = 0x1p20f;   // larger quotients are brought to it: no code is as large

// Codes of q, a number in steps of its block; x is what it was, whose sign it has. constant: where a block has no scale.

struct Integer {   // a whole offset is added after rounding, which keeps the sum exact
  int32_t offset, most;
  Integer(const BitportFormat& f, const Step& step) : offset(int32_t(step.offset)), most((1 << f.bits) - 1) {}
  BITPORT_INLINE int32_t operator()(float q, float) const {
    const int32_t code = whole(q) + offset;
    return code < 0 ? 0 : code > most ? most : code;
  }
  BITPORT_INLINE int32_t constant() const { return offset; }
};

struct Shifted {   // any other before
  float offset;
  int32_t most;
  Shifted(const BitportFormat& f, const Step& step) : offset(step.offset), most((1 << f.bits) - 1) {}
  BITPORT_INLINE int32_t operator()(float q, float) const {
    const int32_t code = whole(q + offset);
    return code < 0 ? 0 : code > most ? most : code;
  }
  BITPORT_INLINE int32_t constant() const { return int32_t(offset); }
};

// [sign | exponent | mantissa]. Subnormal codes count steps: added to a power of two whose last bit is one step, a number
// is rounded to them.
template <int Exponent, int Mantissa>
struct Float {
  static constexpr int kBias = (1 << (Exponent - 1)) - 1, kCut = 23 - Mantissa, kSign = Exponent + Mantissa;
  static constexpr uint32_t kNormal = uint32_t(128 - kBias) << 23, kSteps = uint32_t(128 - kBias + kCut) << 23;
  int32_t largest, nan_code;   // largest: its bits
  Float(const BitportFormat& f, const Step&) : largest(int32_t(bits_of_float(f.largest))), nan_code(f.nan_code) {}
  BITPORT_INLINE int32_t operator()(float q, float x) const {
    const int32_t whole_size = int32_t(bits_of_float(q) & 0x7fffffffu);
    const int32_t bits = whole_size < largest ? whole_size : largest;   // ordered like the numbers
    const int32_t normal = ((bits + ((1 << (kCut - 1)) - 1) + (bits >> kCut & 1)) >> kCut) - ((127 - kBias) << Mantissa);
    const int32_t subnormal = int32_t(bits_of_float(float_of_bits(uint32_t(bits)) + float_of_bits(kSteps)) - kSteps);
    const int32_t below = -int32_t(bits < int32_t(kNormal));   // a mask: a choice would stay a branch
    const int32_t code = (subnormal & below) | (normal & ~below);
    return code | int32_t(bits_of_float(x) >> 31 << kSign);
  }
  BITPORT_INLINE int32_t constant() const { return nan_code; }
};

template <int Bits>
struct Codebook {
  const float* thresholds;
  int32_t nan_code;
  Codebook(const BitportFormat& f, const Step&) : thresholds(f.thresholds), nan_code(f.nan_code) {}
  BITPORT_INLINE int32_t operator()(float q, float) const {
    int32_t code = 0;
    for (int i = 0; i < (1 << Bits) - 1; ++i) code += q > thresholds[i];
    return code;
  }
  BITPORT_INLINE int32_t constant() const { return nan_code; }
};

// x / scale, rounded once. With the inverse rounded to nearest, x * inverse is off by less than two units in the last
// place; each of the steps that follow takes what is missing, exactly, and the last one rounds as a division does
// (Markstein). It takes a quarter of the time.
BITPORT_INLINE float quotient(float x, float scale, float inverse) {
  float q = x * inverse;
  q = __builtin_fmaf(__builtin_fmaf(-q, scale, x), inverse, q);
  return __builtin_fmaf(__builtin_fmaf(-q, scale, x), inverse, q);
}

template <bool Fma, class Code>
BITPORT_INLINE void encode_some(const Code& code, const Step& step, const float* x, int64_t count, uint8_t* y) {
  const float scale = step.scale, inverse = step.inverse;
  if (step.way == Way::constant) {
    for (int64_t i = 0; i < count; ++i) y[i] = uint8_t(code.constant());
  } else if (Fma && step.way == Way::product) {
    for (int64_t i = 0; i < count; ++i) y[i] = uint8_t(code(quotient(x[i], scale, inverse), x[i]));
  } else {
    for (int64_t i = 0; i < count; ++i) {
      const float q = x[i] / scale;
      y[i] = uint8_t(code(q > kFar ? kFar : q < -kFar ? -kFar : q, x[i]));
    }
  }
}

template <bool Fma, class Code>
BITPORT_INLINE void encode(const BitportFormat& f, const float* x, int64_t from, int64_t to, const Step* steps,
                           uint8_t* codes) {
  for (int64_t at = from, block = from / f.block_k; at < to; ++block) {
    const int64_t end = (block + 1) * f.block_k < to ? (block + 1) * f.block_k : to, count = end - at;
    const Code code(f, steps[block]);
    const float* numbers = x + (at - from);
    uint8_t* y = codes + (at - from);
    switch (count) {   // vectors without a rest
      case 16: encode_some<Fma>(code, steps[block], numbers, 16, y); break;
      case 32: encode_some<Fma>(code, steps[block], numbers, 32, y); break;
      case 64: encode_some<Fma>(code, steps[block], numbers, 64, y); break;
      case 128: encode_some<Fma>(code, steps[block], numbers, 128, y); break;
      default: encode_some<Fma>(code, steps[block], numbers, count, y);
    }
    at = end;
  }
}

// Codes of 2 or 4 bits: those of a byte of the result lie in one word.
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

#define BITPORT_ENCODE(name, attribute, fma, ...)                                                                     \
  attribute void name(const BitportFormat& f, const float* x, int64_t from, int64_t to, const Step* steps,           \
                      uint8_t* codes) {                                                                              \
    encode<fma, __VA_ARGS__>(f, x, from, to, steps, codes);                                                          \
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
  BITPORT_ENCODE(codebook, attribute, fma, Codebook<4>)                                                              \
  Loops::Encode encode_of(const BitportFormat& f) {                                                                   \
    if (f.kind == BITPORT_CODEBOOK) return f.bits == 4 ? codebook : nullptr;                                         \
    if (f.kind == BITPORT_INTEGER)                                                                                   \
      return f.bits > 1 && (f.zero_type < 0 || f.zero_type == BITPORT_U8) ? integer : shifted;                       \
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
