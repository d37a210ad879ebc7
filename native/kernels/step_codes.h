// Scalar coding of moments, and the location and scale of a block.
#pragma once
#include <cfloat>
#include "bitport_kernels.h"
#include "machine.h"
#include "number.h"

namespace bitport {

struct Place {
  uint8_t* codes;
  float* scale;
};

static BITPORT_INLINE Place place_of(const BitportMoment& m, int64_t k, int64_t row, int64_t begin) {
  const int64_t bits = m.map->bits, block = m.map->block;
  return {static_cast<uint8_t*>(m.data) + row * ((k * bits + 7) / 8) + begin * bits / 8,
          m.scale + row * ((k + block - 1) / block) + begin / block};
}

static BITPORT_INLINE bool is_finite(uint32_t bits) { return (bits & 0x7f800000u) != 0x7f800000u; }

// As in numerics/qparams.py: clamped below the largest float, NaN if a number is not finite. At least the smallest
// normal number, so that its reciprocal is finite.
static BITPORT_INLINE float scale_of(uint32_t amax, const BitportMap& map) {
  if (amax == 0) return map.scale_of_zeros;
  if (!is_finite(amax)) return float_of_bits(0x7fc00000u);
  const float raw = float_of_bits(amax) / map.largest;
  const float highest = highest_scale(BITPORT_F32, BITPORT_F32, map.largest);
  return raw < FLT_MIN ? FLT_MIN : raw > highest ? highest : raw;
}

static BITPORT_INLINE uint8_t code_of(uint32_t bits, const BitportMap& map) {
  const uint8_t code = map.first[bits >> 16];
  return uint8_t(code + (float_of_bits(bits) > map.thresholds[code]));
}

// Codes `count` numbers that were divided by the scale of their block.
static BITPORT_INLINE void code_one_by_one(const BitportMap& map, const float* steps, int64_t count, uint8_t* codes) {
  if (map.bits == 4) {
    for (int64_t i = 0; i < count / 2; ++i)
      codes[i] = uint8_t(code_of(bits_of_float(steps[2 * i]), map) | code_of(bits_of_float(steps[2 * i + 1]), map) << 4);
    if (count % 2) codes[count / 2] = code_of(bits_of_float(steps[count - 1]), map);
  } else if (map.way == BITPORT_SIGN) {
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = bits_of_float(steps[i]);
      codes[i] = uint8_t((bits >> 24 & 0x80u) | code_of(bits & 0x7fffffffu, map));
    }
  } else {
    for (int64_t i = 0; i < count; ++i) codes[i] = code_of(bits_of_float(steps[i]), map);
  }
}

}  // namespace bitport
