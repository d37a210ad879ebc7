// The scale and zero point of a row or tensor from its range, in float32 and bit-identical to bitport.numerics.qparams.
#include "uncontracted.h"
#include <cmath>
#include "int8.h"
#include "number.h"

namespace bitport {
namespace {

// Clamps a scale that the caller has divided: it must not be 0, and the largest code times it must be finite.
float stored(float scale, float amax, double largest_code, int32_t type) {
  const float highest = highest_scale(BITPORT_F32, type, largest_code);
  if (amax == 0) return 1;
  if (!std::isfinite(amax)) return float_of_bits(0x7fc00000u);
  return scale < 0x1p-149f ? 0x1p-149f : scale > highest ? highest : scale;
}

}  // namespace

Rounding rounding_of(float low, float high, int32_t type, int32_t act) {
  const float amax = low == low ? (high > -low ? high : -low) : low;
  if (act != BITPORT_INT8_ROW_ASYM) return {stored(amax / 127.0f, amax, 127, type), 0};
  const float end = float(kLimits[type].largest * (255.0 / 257.0));   // the ends of the range move by up to half a step
  if (low < -end) low = -end;
  if (high > end) high = end;
  const float scale = stored((high / 2 - low / 2) / 127.5f, amax, 1, type);
  const float zero = -low / scale;
  const float inside = zero > 0 ? (zero < 255 ? zero : 255) : 0;   // NaN: 0
  return {scale, std::nearbyintf(inside) - 128};
}

}  // namespace bitport
