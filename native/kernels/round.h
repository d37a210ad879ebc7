// Rounding of rows of x before a product in floats.
#pragma once
#include <cstdint>
#include "engine.h"

namespace bitport {

static inline bool rounds_to_floats(int32_t act) { return act >= BITPORT_FP8_ROW && act <= BITPORT_FP8_128; }

// Writes the rounded rows [m][k], as bfloat16 (which holds every value) if `bf16`, else as float32, and the factors
// still to be applied to the product: one per row [m], or, for BITPORT_FP8_128 in bfloat16, which cannot hold a code
// times its scale, one per kScaled columns [ceil(k / kScaled)][m]. Rows times factors equal
// bitport.numerics.fake_quantize up to the rounding of that product. Returns false if out of memory.
bool round_rows(const Product& product, int32_t act, const float* act_scale, bool bf16, void* rows, float* row_scale);

// Whether the product with x rounded to int8 is computed in floats, and the rows for it: codes minus their zero point,
// with the scale of each row. round_rows_to_int8() returns false if out of memory.
bool int8_as_floats(const Product& product, int32_t act);
bool round_rows_to_int8(const Product& product, int32_t act, uint16_t* rows, float* row_scale);

}  // namespace bitport
