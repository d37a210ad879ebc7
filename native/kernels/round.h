// Rounding of rows of x before a product in floats.
#pragma once
#include <cstdint>
#include "engine.h"

namespace bitport {

constexpr int64_t kFewNumbers = 1 << 14;   // of x: a second thread does not pay off

static inline bool rounds_to_floats(int32_t act) { return act >= BITPORT_FP8_ROW && act <= BITPORT_FP8_128; }

// Rounds a row of x whenever it is laid out, in the thread that lays it out: rounded rows never go through memory. Rows
// times factors equal bitport.numerics.fake_quantize up to the rounding of that product.
struct RoundedRows {
  const Product& product;
  int32_t act;
  bool bf16;        // rows are bfloat16, which holds every value, else float32
  bool in_blocks;   // BITPORT_FP8_128 in bfloat16, which cannot hold a code times its scale: one factor per kScaled columns
  float global;     // the scale of the tensor, or the global scale of nvfp4: global_scale()
  float* factors;   // still to be applied to the product: [m], or with in_blocks [ceil(k / kScaled)][m]

  // The rounded row [k], in memory that belongs to the calling thread until its next call; null if out of memory.
  const void* row(int64_t row) const;
};

// What all rows share: act_scale if given, else from the largest number of x; 1 if every row is rounded by itself.
float global_scale(const Product& product, int32_t act, const float* act_scale);

// Whether the product with x rounded to int8 is computed in floats, and a row for it: codes minus their zero point, with
// the scale as its factor. Returns false if out of memory.
bool int8_as_floats(const Product& product, int32_t act);
bool round_row_to_int8(const Product& product, int32_t act, int64_t row, uint16_t* to, float* factor);

}  // namespace bitport
