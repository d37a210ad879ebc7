// Scales and zero points from ranges, in float32 and bit-identical to bitport.numerics.qparams.
#include "uncontracted.h"
#include <cmath>
#include "number.h"
#include "quantize.h"
#include "tiles.h"

namespace bitport {
namespace {

constexpr double kFloat32Max = kLimits[BITPORT_F32].largest;
constexpr float kNoScale = __builtin_nanf(""), kLargest = float(kFloat32Max);
constexpr float kE4m3Max = 448, kE4m3Smallest = 0x1p-9f;

float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

// The code of a number from 2^-9 to 448, or of a NaN, whose bits are larger. Below 2^-6 codes count steps of 2^-9.
int32_t e4m3_of(float x) {
  const int32_t bits = int32_t(bits_of_float(x)), steps = int32_t(bits_of_float(x + 0x1p14f) - bits_of_float(0x1p14f));
  const int32_t normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
  const int32_t code = bits < 121 << 23 ? steps : normal;
  return code < 0x7f ? code : 0x7f;
}

uint32_t most_of(const Range& range) { return range.positive > range.negative ? range.positive : range.negative; }

void floats_of(const uint32_t* bits, int64_t count, int32_t type, float* numbers) {
  if (type == BITPORT_F16)
    for (int64_t i = 0; i < count; ++i) numbers[i] = float_of_f16(uint16_t(bits[i]));
  else
    for (int64_t i = 0; i < count; ++i) numbers[i] = float_of_bits(type == BITPORT_F32 ? bits[i] : bits[i] << 16);
}

float steps_of(const BitportFormat& f) { return float((1 << f.bits) - 1); }

// Stores scales or zeros, and replaces them by the values as rounded to their type.
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
  const uint32_t above = uint32_t((double(f.largest) / std::ldexp(1.0, emax_) - 1) * 0x1p23);
  up_ = f.rule == BITPORT_EVEN   ? 1u << (22 - f.mantissa)
        : f.rule == BITPORT_CEIL ? 0x7fffffu
        : f.rule == BITPORT_RCEIL ? 0x7fffffu - above
                                  : 0;
  const int32_t kept = is_float(f.scale_type) ? f.scale_type : BITPORT_F32;
  highest_ = highest_scale(kept, x_type, f.zero_type < 0 ? double(f.largest) : 1);
  smallest_ = float(kLimits[kept].smallest);
  const double steps = steps_of(f);
  end_ = float(kLimits[x_type].largest * (steps / (steps + 2)));
}

float Scales::amax(const Range& range) const {
  const uint32_t bits = most_of(range);
  float most;
  floats_of(&bits, 1, type_, &most);
  return most <= kLargest ? most : kNoScale;
}

void Scales::measured(float amax) {
  const double largest = double(kE4m3Max) * double(f_.largest);
  const double highest = kFloat32Max / (largest > double(kE4m3Max) ? largest : double(kE4m3Max)) * (1 - 0x1p-20);
  global_ = amax == 0 ? 1 : clamp(amax / float(largest), 0x1p-140f, float(highest));
}

int32_t Scales::power_of_two(float amax) const {
  const uint32_t position = uint32_t(e8m0_position(int32_t(bits_of_float(amax))));
  const int32_t code = int32_t((position + up_) >> 23) - emax_, most = 254 - emax_;
  return amax != amax ? 255 : code < 0 ? 0 : code > most ? most : code;
}

void Scales::choose(const Range* ranges, int64_t count, void* scales, void* zeros, int64_t at, Step* steps) const {
  for (int64_t i = 0; i < count; i += kAtOnce)
    choose_some(ranges + i, smaller(count - i, kAtOnce), scales, zeros, at + i, steps + i);
}

// Branch-free loops over constants in local variables, so that the compiler vectorizes them.
void Scales::choose_some(const Range* ranges, int64_t count, void* scales, void* zeros, int64_t at, Step* steps) const {
  const float largest = f_.largest, global = global_, smallest = smallest_, highest = highest_, of_zeros = of_zeros_;
  const auto defined = [=](float scale, float amax) { return amax != amax ? kNoScale : amax == 0 ? of_zeros : scale; };
  float amax[kAtOnce], scale[kAtOnce], offset[kAtOnce];
  uint32_t bits[kAtOnce];
  for (int64_t i = 0; i < count; ++i) bits[i] = most_of(ranges[i]);
  floats_of(bits, count, type_, amax);
  for (int64_t i = 0; i < count; ++i) amax[i] = amax[i] <= kLargest ? amax[i] : kNoScale;
  const float usual = f_.kind != BITPORT_INTEGER ? 0 : f_.bits > 1 ? float(1 << (f_.bits - 1)) : 0.5f;
  for (int64_t i = 0; i < count; ++i) offset[i] = usual;
  if (f_.scale_type == BITPORT_E8M0) {
    uint8_t* const codes = static_cast<uint8_t*>(scales) + at;
    for (int64_t i = 0; i < count; ++i) codes[i] = uint8_t(power_of_two(amax[i]));
    for (int64_t i = 0; i < count; ++i) scale[i] = float_of_e8m0(codes[i]);
  } else if (f_.scale_type == BITPORT_E4M3) {
    uint8_t* const codes = static_cast<uint8_t*>(scales) + at;
    for (int64_t i = 0; i < count; ++i)
      scale[i] = defined(clamp(amax[i] / largest / global, kE4m3Smallest, kE4m3Max), amax[i]);
    for (int64_t i = 0; i < count; ++i) codes[i] = uint8_t(e4m3_of(scale[i]));
    for (int64_t i = 0; i < count; ++i) scale[i] = float_of_e4m3(codes[i]) * global;
  } else if (f_.zero_type < 0) {
    for (int64_t i = 0; i < count; ++i) scale[i] = defined(clamp(amax[i] / largest, smallest, highest), amax[i]);
    keep(scale, count, scales, f_.scale_type, at);
  } else {
    const float most = steps_of(f_), middle = (most + 1) / 2, end = end_;
    float below[kAtOnce], above[kAtOnce];
    for (int64_t i = 0; i < count; ++i) bits[i] = ranges[i].negative;
    floats_of(bits, count, type_, below);
    for (int64_t i = 0; i < count; ++i) bits[i] = ranges[i].positive;
    floats_of(bits, count, type_, above);
    for (int64_t i = 0; i < count; ++i) {
      below[i] = below[i] > end ? end : below[i];
      above[i] = above[i] > end ? end : above[i];
      scale[i] = defined(clamp((above[i] / 2 + below[i] / 2) / (most / 2), smallest, highest), amax[i]);
    }
    keep(scale, count, scales, f_.scale_type, at);
    for (int64_t i = 0; i < count; ++i) {
      const float zero = below[i] / scale[i];
      offset[i] = amax[i] == 0 ? middle : zero > 0 ? (zero < most ? zero : most) : 0;   // NaN: 0
    }
    if (f_.zero_type == BITPORT_U8)
      for (int64_t i = 0; i < count; ++i) offset[i] = (offset[i] + 0x1.8p23f) - 0x1.8p23f;   // an integer, ties to even
    keep(offset, count, zeros, f_.zero_type, at);
  }
  // Code boundaries have at most 10 significant bits, unless codes come from a table or have a fractional offset. If x
  // has 11 bits and the scale 12, x / scale is either a boundary or differs from it by a relative 2^-22 at least: one
  // correction yields boundaries exactly, and is off by less than 2^-23 elsewhere.
  const bool short_ends = type_ != BITPORT_F32 && (f_.kind == BITPORT_FLOAT || has_whole_offset(f_));
  const uint32_t beyond = short_ends ? 0xfff : 0x7fffff;
  float inverse[kAtOnce];
  for (int64_t i = 0; i < count; ++i) inverse[i] = 1 / scale[i];
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t mantissa = bits_of_float(scale[i]) & 0x7fffff;
    const Way by_products = mantissa == 0 ? Way::exact : (mantissa & beyond) == 0 ? Way::near : Way::product;
    // Products give the exact quotient if no intermediate result leaves the exponent range of float32.
    const bool tame = scale[i] > 0x1p-80f && scale[i] < 0x1p80f && amax[i] <= scale[i] * 0x1p16f;
    const Way way = !(scale[i] > 0) ? Way::constant : tame ? by_products : Way::division;
    steps[i] = {scale[i], tame ? inverse[i] : 0, offset[i], way};
  }
}

}  // namespace bitport
