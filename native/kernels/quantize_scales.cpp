// Scales and zero points from ranges, in float32 and number for number as bitport.numerics.qparams chooses them.
#include "uncontracted.h"
#include <cmath>
#include "number.h"
#include "quantize.h"
#include "tiles.h"

namespace bitport {
namespace {

constexpr float kNoScale = __builtin_nanf("");
constexpr double kFloat32Max = 0x1.fffffep127;
constexpr float kE4m3Max = 448, kE4m3Smallest = 0x1p-9f;

struct Limits { double largest, smallest, eps; };   // smallest: above 0
constexpr Limits kLimits[] = {{kFloat32Max, 0x1p-149, 0x1p-23}, {0x1.fep127, 0x1p-133, 0x1p-7}, {65504, 0x1p-24, 0x1p-10}};

float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

// Of a number from 2^-9 to 448, or NaN. Below 2^-6 the codes count steps of 2^-9.
uint8_t e4m3_of(float x) {
  if (x != x) return 0x7f;
  if (x < 0x1p-6f) return uint8_t(bits_of_float(x + 0x1p14f) - bits_of_float(0x1p14f));
  const uint32_t bits = bits_of_float(x);
  return uint8_t(((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120u << 3));
}

float steps_of(const BitportFormat& f) { return float((1 << f.bits) - 1); }

// Stores scales or zeros; they become what their type keeps of them.
void keep(float* numbers, int64_t count, void* to, int32_t type, int64_t at) {
  if (type == BITPORT_F32) {
    std::memcpy(static_cast<float*>(to) + at, numbers, size_t(count) * sizeof(float));
  } else if (type == BITPORT_BF16) {
    uint16_t* const kept = static_cast<uint16_t*>(to) + at;
    for (int64_t i = 0; i < count; ++i) {
      kept[i] = bf16_of_float(numbers[i]);
      numbers[i] = float_of_bf16(kept[i]);
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      store_number(numbers[i], to, type, at + i);
      numbers[i] = load_number(to, type, at + i);
    }
  }
}

}  // namespace

Scales::Scales(const BitportFormat& f, int32_t x_type) : f_(f), type_(x_type), emax_(std::ilogb(f.largest)) {
  of_zeros_ = f.has_zero ? 1.0f : 0.0f;
  above_ = uint32_t((double(f.largest) / std::ldexp(1.0, emax_) - 1) * 0x1p23);
  const Limits& limits = kLimits[f.scale_type <= BITPORT_F16 ? f.scale_type : BITPORT_F32];
  const double input = kLimits[x_type].largest, steps = steps_of(f);
  const double highest = input / (f.zero_type < 0 ? double(f.largest) : 1) * (1 - limits.eps);
  highest_ = float(highest < limits.largest ? highest : limits.largest);
  smallest_ = float(limits.smallest);
  end_ = float(input * (steps / (steps + 2)));
}

float Scales::number(uint32_t bits) const {
  return type_ == BITPORT_F32 ? float_of_bits(bits)
                              : type_ == BITPORT_BF16 ? float_of_bf16(uint16_t(bits)) : float_of_f16(uint16_t(bits));
}

float Scales::amax(const Range& range) const {
  const float most = number(range.positive > range.negative ? range.positive : range.negative);
  return std::isfinite(most) ? most : kNoScale;
}

void Scales::measured(float amax) {
  const double largest = double(kE4m3Max) * double(f_.largest);
  const double highest = kFloat32Max / (largest > double(kE4m3Max) ? largest : double(kE4m3Max)) * (1 - 0x1p-20);
  global_ = amax == 0 ? 1 : clamp(amax / float(largest), 0x1p-140f, float(highest));
}

float Scales::defined(float scale, float amax) const { return amax != amax ? kNoScale : amax == 0 ? of_zeros_ : scale; }

uint8_t Scales::power_of_two(float amax) const {
  if (amax != amax) return 255;
  const uint32_t bits = bits_of_float(amax);
  const uint32_t position = bits >= 0x800000u ? bits : bits > 0x400000u ? (bits - 0x400000u) * 2 : 0;
  const uint32_t fraction = position & 0x7fffffu;
  int code = int(position >> 23) - emax_;
  switch (f_.rule) {
    case BITPORT_EVEN: code += int((fraction + (1u << (22 - f_.mantissa))) >> 23); break;
    case BITPORT_CEIL: code += fraction > 0; break;
    case BITPORT_RCEIL: code += fraction > above_; break;
    default: break;
  }
  return uint8_t(code < 0 ? 0 : code > 254 - emax_ ? 254 - emax_ : code);
}

// Codes end at numbers of at most 10 bits, unless they come from a table or have an offset with a fraction. Where x has 11 bits
// and the scale 12, x / scale is such a number or differs from it by 2^-22 of it at least: one correction finds the number
// itself, and is off by less than 2^-23 elsewhere.
Way Scales::by_products(float scale) const {
  const uint32_t mantissa = bits_of_float(scale) & 0x7fffff;
  if (mantissa == 0) return Way::exact;
  const bool short_ends = f_.kind == BITPORT_FLOAT || has_whole_offset(f_);
  return short_ends && type_ != BITPORT_F32 && (mantissa & 0xfff) == 0 ? Way::near : Way::product;
}

void Scales::choose(const Range* ranges, int64_t count, void* scales, void* zeros, int64_t at, Step* steps) const {
  for (int64_t i = 0; i < count; i += kAtOnce)
    choose_some(ranges + i, smaller(count - i, kAtOnce), scales, zeros, at + i, steps + i);
}

void Scales::choose_some(const Range* ranges, int64_t count, void* scales, void* zeros, int64_t at, Step* steps) const {
  float amax[kAtOnce], scale[kAtOnce], offset[kAtOnce];
  for (int64_t i = 0; i < count; ++i) amax[i] = this->amax(ranges[i]);
  const float usual = f_.kind != BITPORT_INTEGER ? 0 : f_.bits > 1 ? float(1 << (f_.bits - 1)) : 0.5f;
  for (int64_t i = 0; i < count; ++i) offset[i] = usual;
  if (f_.scale_type == BITPORT_E8M0) {
    uint8_t* const codes = static_cast<uint8_t*>(scales) + at;
    for (int64_t i = 0; i < count; ++i) codes[i] = power_of_two(amax[i]);
    for (int64_t i = 0; i < count; ++i) scale[i] = float_of_e8m0(codes[i]);
  } else if (f_.scale_type == BITPORT_E4M3) {
    uint8_t* const codes = static_cast<uint8_t*>(scales) + at;
    for (int64_t i = 0; i < count; ++i) {
      const float raw = amax[i] / f_.largest, shared = f_.global ? raw / global_ : raw;
      codes[i] = e4m3_of(defined(clamp(shared, kE4m3Smallest, kE4m3Max), amax[i]));
      scale[i] = float_of_e4m3(codes[i]) * global_;
    }
  } else if (f_.zero_type < 0) {
    for (int64_t i = 0; i < count; ++i) scale[i] = defined(clamp(amax[i] / f_.largest, smallest_, highest_), amax[i]);
    keep(scale, count, scales, f_.scale_type, at);
  } else {
    const float most = steps_of(f_);
    float below[kAtOnce];
    for (int64_t i = 0; i < count; ++i) {
      const float low = number(ranges[i].negative), high = number(ranges[i].positive);
      below[i] = low > end_ ? end_ : low;
      const float above = high > end_ ? end_ : high;
      scale[i] = defined(clamp((above / 2 + below[i] / 2) / (most / 2), smallest_, highest_), amax[i]);
    }
    keep(scale, count, scales, f_.scale_type, at);
    for (int64_t i = 0; i < count; ++i) {
      const float zero = below[i] / scale[i], inside = zero > 0 ? (zero < most ? zero : most) : 0;   // NaN: 0
      offset[i] = f_.zero_type == BITPORT_U8 ? std::nearbyintf(inside) : inside;
    }
    keep(offset, count, zeros, f_.zero_type, at);
  }
  for (int64_t i = 0; i < count; ++i) {
    // Products give the very quotient where nothing on the way leaves the exponents of float32.
    const bool tame = scale[i] > 0x1p-80f && scale[i] < 0x1p80f && amax[i] <= scale[i] * 0x1p16f;
    const Way way = !(scale[i] > 0) ? Way::constant : tame ? by_products(scale[i]) : Way::division;
    steps[i] = {scale[i], tame ? 1 / scale[i] : 0, offset[i], way};
  }
}

}  // namespace bitport
