// Rounding rows of x before a product of floats.
#pragma once
#include <cstdint>
#include "engine.h"

namespace bitport {

static inline bool rounds_to_floats(int32_t act) { return act >= BITPORT_FP8_ROW && act <= BITPORT_FP8_128; }

// The rounded rows [m][k], as bfloat16 where `bf16` (every value is one) or as float32, and what each row is still to
// be multiplied by: one number [m], or for BITPORT_FP8_128 in bfloat16, which does not hold a code times its scale, one for
// each kScaled columns [k / kScaled, rounded up][m]. Equal to bitport.numerics.fake_quantize, but for that product.
// False: out of memory.
bool round_rows(const Product& product, int32_t act, const float* act_scale, bool bf16, void* rows, float* row_scale);

// Whether the product with x rounded to int8 is had from floats, and the rows for it: codes less their zero point, and
// the scale of each. False: out of memory.
bool int8_as_floats(const Product& product, int32_t act);
bool round_rows_to_int8(const Product& product, int32_t act, uint16_t* rows, float* row_scale);

}  // namespace bitport
