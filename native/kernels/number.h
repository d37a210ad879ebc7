// The number types of inputs, scales and zeros: their sizes and limits, and scalar conversions from and to float32.
#pragma once
#include <cstring>
#include "bitport_kernels.h"
#include "machine.h"

namespace bitport {

static inline bool is_float(int32_t type) { return type >= BITPORT_F32 && type <= BITPORT_F16; }   // a type of x and y
static inline int64_t width_of(int32_t type) { return type == BITPORT_F32 ? 4 : is_float(type) ? 2 : 1; }   // bytes

// Of F32, BF16 and F16: the largest finite number, the smallest positive one, and the distance from 1 to the next number.
struct Limits { double largest, smallest, eps; };
constexpr Limits kLimits[] = {{0x1.fffffep127, 0x1p-149, 0x1p-23}, {0x1.fep127, 0x1p-133, 0x1p-7}, {65504, 0x1p-24, 0x1p-10}};

// The largest scale of scale_type that x of x_type may have, so that the largest code times it is finite in x_type: as
// scale_range() in numerics/qparams.py.
static inline float highest_scale(int32_t scale_type, int32_t x_type, double largest_code) {
  const double highest = kLimits[x_type].largest / largest_code * (1 - kLimits[scale_type].eps);
  return float(highest < kLimits[scale_type].largest ? highest : kLimits[scale_type].largest);
}

// Position of a float32 from 0 up, given by its bits, on the scale of e8m0 codes, in units of 2^-23 code: as in
// numerics/floats.py.
static inline int32_t e8m0_position(int32_t bits) {
  return bits >= 0x800000 ? bits : bits > 0x400000 ? (bits - 0x400000) * 2 : 0;
}

static inline float float_of_bits(uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
static inline uint32_t bits_of_float(float f) { uint32_t bits; std::memcpy(&bits, &f, 4); return bits; }

static inline float float_of_bf16(uint16_t h) { return float_of_bits(uint32_t(h) << 16); }
struct BFloat16 {   // for loops over elements of any type
  uint16_t bits;
  BITPORT_INLINE operator float() const { return float_of_bf16(bits); }
};

static inline uint16_t bf16_of_float(float f) {
  const uint32_t bits = bits_of_float(f), nearest = bits + 0x7fff + (bits >> 16 & 1);
  return uint16_t(((bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000 : nearest) >> 16);   // a NaN stays one
}

// Subnormal numbers of short types are computed from integers and never interpreted as subnormal floats: the thread may
// flush those to zero.
static inline float float_of_f16(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = uint32_t(h & 0x7fff) << 13;
  if (rest >= 0x0f800000u) return float_of_bits(sign | rest | 0x7f800000u);     // infinity and NaN
  const uint32_t subnormal = bits_of_float(float(rest >> 13) * 0x1p-24f);
  return float_of_bits(sign | (rest < 0x00800000u ? subnormal : rest + (112u << 23)));
}

static inline uint16_t f16_of_float(float f) {
  const uint32_t bits = bits_of_float(f), size = bits & 0x7fffffffu;
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  if (size > 0x7f800000u) return sign | 0x7e00;
  if (size >= 0x477ff000u) return sign | 0x7c00;                                 // 65520 and more round to infinity
  if (size < 0x38800000u)                                                        // subnormal: 0.5 has an ulp of 2^-24
    return sign | uint16_t(bits_of_float(float_of_bits(size) + 0.5f) - 0x3f000000u);
  return sign | uint16_t((size - 0x38000000u + 0xfff + (size >> 13 & 1)) >> 13);
}

// A power of two, 2^(bits - 127); 255 is NaN. 2^-127 is a subnormal float32.
static inline float float_of_e8m0(uint8_t bits) {
  return float_of_bits(bits == 255 ? 0x7fc00000u : bits ? uint32_t(bits) << 23 : 0x00400000u);
}

// Sign, 4 exponent bits (bias 7), 3 mantissa bits; no infinity, NaN if all bits but the sign are set.
static inline float float_of_e4m3(uint8_t bits) {
  const uint32_t sign = uint32_t(bits & 0x80) << 24, rest = bits & 0x7f;
  const uint32_t steps = bits_of_float(float(int32_t(rest)) * 0x1p-9f), normal = (rest << 20) + (120u << 23);
  return float_of_bits(sign | (rest == 0x7f ? 0x7fc00000u : rest < 8 ? steps : normal));
}

static inline float load_number(const void* p, int32_t type, int64_t i) {
  switch (type) {
    case BITPORT_F32: return static_cast<const float*>(p)[i];
    case BITPORT_BF16: return float_of_bf16(static_cast<const uint16_t*>(p)[i]);
    case BITPORT_F16: return float_of_f16(static_cast<const uint16_t*>(p)[i]);
    case BITPORT_E8M0: return float_of_e8m0(static_cast<const uint8_t*>(p)[i]);
    case BITPORT_E4M3: return float_of_e4m3(static_cast<const uint8_t*>(p)[i]);
    default: return static_cast<const uint8_t*>(p)[i];
  }
}

static inline void store_number(float f, void* p, int32_t type, int64_t i) {
  switch (type) {
    case BITPORT_F32: static_cast<float*>(p)[i] = f; break;
    case BITPORT_BF16: static_cast<uint16_t*>(p)[i] = bf16_of_float(f); break;
    case BITPORT_U8: static_cast<uint8_t*>(p)[i] = uint8_t(f); break;   // an integer
    default: static_cast<uint16_t*>(p)[i] = f16_of_float(f);
  }
}

}  // namespace bitport
