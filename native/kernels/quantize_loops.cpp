// The loops over the numbers of a weight, made into vectors of each width by the compiler.
#include <cstring>
#include "bits.h"
#include "engine.h"
#include "number.h"
#include "quantize.h"

namespace bitport {
namespace {

#if defined(__GNUC__)
#define BITPORT_INLINE __attribute__((always_inline)) inline
#else
#define BITPORT_INLINE inline
#endif

template <class T>
BITPORT_INLINE void measure(const void* numbers, int64_t k, int64_t block, Range* ranges) {
  constexpr int kSign = 8 * sizeof(T) - 1;
  constexpr T kSize = T(low(kSign));
  const T* x = static_cast<const T*>(numbers);
  for (int64_t from = 0; from < k; from += block, ++ranges) {
    const int64_t count = k - from < block ? k - from : block;
    T least = kSize, most = T(~kSize);
    for (int64_t i = 0; i < count; ++i) {
      const T bits = x[from + i], key = T(bits ^ (T(bits >> kSign) & kSize));
      least = key < least ? key : least;
      most = key > most ? key : most;
    }
    ranges->low = least < ranges->low ? least : ranges->low;
    ranges->high = most > ranges->high ? most : ranges->high;
  }
}

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
  BITPORT_INLINE int32_t constant(float) const { return offset; }
};

struct Shifted {   // any other before
  float offset;
  int32_t most;
  Shifted(const BitportFormat& f, const Step& step) : offset(step.offset), most((1 << f.bits) - 1) {}
  BITPORT_INLINE int32_t operator()(float q, float) const {
    const int32_t code = whole(q + offset);
    return code < 0 ? 0 : code > most ? most : code;
  }
  BITPORT_INLINE int32_t constant(float) const { return int32_t(offset); }
};

// [sign | exponent | mantissa]. Subnormal codes count steps: added to a power of two whose last bit is one step, a number
// is rounded to them.
template <int Exponent, int Mantissa>
struct Float {
  static constexpr int kBias = (1 << (Exponent - 1)) - 1, kCut = 23 - Mantissa, kSign = Exponent + Mantissa;
  static constexpr uint32_t kNormal = uint32_t(128 - kBias) << 23, kSteps = uint32_t(128 - kBias + kCut) << 23;
  float largest;
  int32_t nan_code;
  Float(const BitportFormat& f, const Step&) : largest(f.largest), nan_code(f.nan_code) {}
  BITPORT_INLINE int32_t operator()(float q, float x) const {
    const float whole_size = float_of_bits(bits_of_float(q) & 0x7fffffffu);
    const float size = whole_size > largest ? largest : whole_size;
    const uint32_t bits = bits_of_float(size);
    const uint32_t normal = ((bits + ((1u << (kCut - 1)) - 1) + (bits >> kCut & 1)) >> kCut) -
                            (uint32_t(127 - kBias) << Mantissa);
    const uint32_t subnormal = bits_of_float(size + float_of_bits(kSteps)) - kSteps;
    return int32_t((bits < kNormal ? subnormal : normal) | bits_of_float(x) >> 31 << kSign);
  }
  BITPORT_INLINE int32_t constant(float x) const {   // the quotient is a NaN, with the sign of x where x is one
    return nan_code | (nan_code && x != x ? int32_t(bits_of_float(x) >> 31 << kSign) : 0);
  }
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
  BITPORT_INLINE int32_t constant(float) const { return nan_code; }
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
    for (int64_t i = 0; i < count; ++i) y[i] = uint8_t(code.constant(x[i]));
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

template <int Bits>
BITPORT_INLINE void pack_as(const uint8_t* codes, int64_t count, uint8_t* dense) {
  const int64_t whole = count / 8;
  for (int64_t i = 0; i < whole; ++i) {
    uint64_t eight;
    std::memcpy(&eight, codes + i * 8, 8);
    eight = gather<Bits>(eight);
    std::memcpy(dense + i * Bits, &eight, Bits);
  }
  if (count % 8) {
    uint64_t rest = 0;
    std::memcpy(&rest, codes + whole * 8, size_t(count % 8));
    rest = gather<Bits>(rest);
    std::memcpy(dense + whole * Bits, &rest, size_t((count % 8 * Bits + 7) / 8));
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
#define BITPORT_LOOPS(variant, attribute, fma)                                                                        \
  namespace variant {                                                                                                 \
  attribute void measure16(const void* x, int64_t k, int64_t b, Range* r) { measure<int16_t>(x, k, b, r); }           \
  attribute void measure32(const void* x, int64_t k, int64_t b, Range* r) { measure<int32_t>(x, k, b, r); }           \
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
      return f.zero_type == BITPORT_U8 || (f.zero_type < 0 && f.bits > 1) ? (f.bits > 1 ? integer : shifted) : shifted; \
    switch (f.bits * 10 + f.mantissa) {                                                                               \
      case 83: return e4m3;                                                                                          \
      case 82: return e5m2;                                                                                          \
      case 63: return e2m3;                                                                                          \
      case 62: return e3m2;                                                                                          \
      case 41: return e2m1;                                                                                          \
      default: return nullptr;                                                                                       \
    }                                                                                                                 \
  }                                                                                                                   \
  constexpr Loops loops = {measure16, measure32, encode_of, pack};                                                    \
  }
BITPORT_LOOPS(plain, , false)
#if BITPORT_X86
BITPORT_LOOPS(avx2, __attribute__((target("avx2,fma"))), true)
BITPORT_LOOPS(avx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,prefer-vector-width=512"))), true)
#endif

}  // namespace

const Loops& loops_of(int32_t isa) {
#if BITPORT_X86
  if (isa >= BITPORT_AVX512_VNNI) return avx512::loops;
  if (isa == BITPORT_AVX2) return avx2::loops;
#endif
  (void)isa;
  return plain::loops;
}

}  // namespace bitport
