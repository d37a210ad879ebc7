// Scales and zero points from ranges, in float32 and number for number as bitport.numerics.qparams chooses them.
#include <cmath>
#include "number.h"
#include "quantize.h"

namespace bitport {
namespace {

constexpr float kNoScale = __builtin_nanf("");
constexpr double kFloat32Max = 0x1.fffffep127;
constexpr double kE4m3Max = 448, kE4m3Smallest = 0x1p-9;

struct Limits { double largest, smallest, eps; };   // smallest: above 0
constexpr Limits kLimits[] = {{kFloat32Max, 0x1p-149, 0x1p-23}, {0x1.fep127, 0x1p-133, 0x1p-7}, {65504, 0x1p-24, 0x1p-10}};

float number_of(int32_t key, int32_t type) {
  if (type == BITPORT_F32) return float_of_bits(uint32_t(key ^ (key >> 31 & 0x7fffffff)));
  const uint16_t bits = uint16_t(key ^ (key >> 15 & 0x7fff));
  return type == BITPORT_BF16 ? float_of_bf16(bits) : float_of_f16(bits);
}

float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

// amax and what it leads to; the ends of numerics/qparams.py.
float defined(float scale, float amax, const BitportFormat& f) {
  if (!std::isfinite(amax)) return kNoScale;
  return amax == 0 ? (f.kind == BITPORT_INTEGER && f.bits == 1 && f.zero_type < 0 ? 0.0f : 1.0f) : scale;
}

float stored(float raw, float amax, double largest, int32_t type, const BitportFormat& f) {
  const Limits& limits = kLimits[f.scale_type];
  const double end = kLimits[type].largest / largest * (1 - limits.eps);
  const float highest = float(end < limits.largest ? end : limits.largest);
  return defined(clamp(raw, float(limits.smallest), highest), amax, f);
}

uint8_t e8m0_of(float amax, const BitportFormat& f) {
  if (!std::isfinite(amax)) return 255;
  const int emax = std::ilogb(f.largest);
  const uint32_t bits = bits_of_float(amax);
  const uint32_t position = bits >= 0x800000u ? bits : bits > 0x400000u ? (bits - 0x400000u) * 2 : 0;
  const uint32_t fraction = position & 0x7fffffu;
  int code = int(position >> 23);
  switch (f.rule) {
    case BITPORT_EVEN: code += int((fraction + (1u << (22 - f.mantissa))) >> 23); break;
    case BITPORT_CEIL: code += fraction > 0; break;
    case BITPORT_RCEIL: code += fraction > uint32_t((double(f.largest) / std::ldexp(1.0, emax) - 1) * 0x1p23); break;
    default: break;
  }
  code -= emax;
  return uint8_t(code < 0 ? 0 : code > 254 - emax ? 254 - emax : code);
}

// Of a number from 2^-9 to 448, or NaN. Below 2^-6 the codes count steps of 2^-9.
uint8_t e4m3_of(float x) {
  if (x != x) return 0x7f;
  if (x < 0x1p-6f) return uint8_t(bits_of_float(x + 0x1p14f) - bits_of_float(0x1p14f));
  const uint32_t bits = bits_of_float(x);
  return uint8_t(((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120u << 3));
}

struct Affine { float scale, zero; };

Affine affine(const BitportFormat& f, const Range& range, float amax, int32_t type) {
  const double steps = double((1 << f.bits) - 1);
  const float end = float(kLimits[type].largest * (steps / (steps + 2)));
  const float least = number_of(range.low, type), most = number_of(range.high, type);
  const float low = least < 0 ? (least < -end ? -end : least) : 0;
  const float high = most > 0 ? (most > end ? end : most) : 0;
  float scale = stored((high / 2 - low / 2) / float(steps / 2), amax, 1, type, f);
  store_number(scale, &scale, f.scale_type, 0);
  scale = load_number(&scale, f.scale_type, 0);
  const float zero = (0 - low) / scale;
  return {scale, zero > 0 ? (zero < float(steps) ? zero : float(steps)) : 0};   // NaN: 0
}

}  // namespace

float amax_of(const Range& range, int32_t type) {
  const float low = number_of(range.low, type), high = number_of(range.high, type);
  if (!std::isfinite(low) || !std::isfinite(high)) return kNoScale;
  return std::fabs(low) > std::fabs(high) ? std::fabs(low) : std::fabs(high);
}

float global_scale(const BitportFormat& f, float amax) {
  if (amax == 0) return 1;
  const double largest = kE4m3Max * double(f.largest);
  const double highest = kFloat32Max / (largest > kE4m3Max ? largest : kE4m3Max) * (1 - 0x1p-20);
  return clamp(amax / float(largest), 0x1p-140f, float(highest));
}

Step choose_step(const BitportFormat& f, const Range& range, int32_t type, float global, void* scales, void* zeros,
                 int64_t at) {
  const float amax = amax_of(range, type);
  float scale, offset = f.kind == BITPORT_INTEGER ? (f.bits > 1 ? float(1 << (f.bits - 1)) : 0.5f) : 0;
  if (f.zero_type >= 0) {
    const Affine found = affine(f, range, amax, type);
    scale = found.scale;
    store_number(scale, scales, f.scale_type, at);
    if (f.zero_type == BITPORT_U8) {
      offset = std::nearbyintf(found.zero);
      static_cast<uint8_t*>(zeros)[at] = uint8_t(offset);
    } else {
      store_number(found.zero, zeros, f.zero_type, at);
      offset = load_number(zeros, f.zero_type, at);
    }
  } else if (f.scale_type == BITPORT_E8M0) {
    static_cast<uint8_t*>(scales)[at] = e8m0_of(amax, f);
    scale = load_number(scales, f.scale_type, at);
  } else if (f.scale_type == BITPORT_E4M3) {
    const float raw = f.global ? amax / f.largest / global : amax / f.largest;
    static_cast<uint8_t*>(scales)[at] = e4m3_of(defined(clamp(raw, kE4m3Smallest, kE4m3Max), amax, f));
    scale = load_number(scales, f.scale_type, at);
  } else {
    store_number(stored(amax / f.largest, amax, f.largest, type, f), scales, f.scale_type, at);
    scale = load_number(scales, f.scale_type, at);
  }
  if (f.global) scale *= global;
  // Products give the very quotient where nothing on the way leaves the exponents of float32.
  const bool tame = scale > 0x1p-80f && scale < 0x1p80f && amax <= scale * 0x1p16f;
  return {scale, tame ? 1 / scale : 0, offset, !(scale > 0) ? Way::constant : tame ? Way::product : Way::division};
}

}  // namespace bitport
