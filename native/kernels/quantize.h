// A weight rounded to nearest, in two parts: the scale and the zero point of each block from its range
// (quantize_scales.cpp), and the loops over numbers, in every instruction set (quantize_loops.cpp).
#pragma once
#include "bitport_kernels.h"

namespace bitport {

// Smallest and largest number of a block, as signed integers that are ordered like the numbers, NaN at both ends: the bits
// of a float (of bfloat16 and float16, 16 bits), all but the sign turned where it is set.
struct Range {
  int32_t low = INT32_MAX, high = INT32_MIN;
};

// How the numbers of a block become codes. constant: there is no scale, all are code `constant`. product: x / scale may
// be had from products with the inverse, see quantize_loops.cpp.
enum class Way : int32_t { constant, division, product };

struct Step {
  float scale, inverse, offset;   // scale: of the block, times the global one
  Way way;
};

// A finite number of the range, or NaN where it holds one that is not: the largest magnitude.
float amax_of(const Range& range, int32_t type);

float global_scale(const BitportFormat& format, float amax);   // amax: of all blocks that are finite

// Scale and zero point of a block are written to element `at` of both.
Step choose_step(const BitportFormat& format, const Range& range, int32_t type, float global, void* scale, void* zero,
                 int64_t at);

struct Loops {
  // Columns [0, k) of a row, its blocks of `block` columns merged into ranges[0 ..].
  void (*measure16)(const void* x, int64_t k, int64_t block, Range* ranges);
  void (*measure32)(const void* x, int64_t k, int64_t block, Range* ranges);
  // Columns [from, to) of a row, x and codes at the first of them; steps of the whole row.
  using Encode = void (*)(const BitportFormat& format, const float* x, int64_t from, int64_t to, const Step* steps,
                          uint8_t* codes);
  Encode (*encode)(const BitportFormat& format);
  // A byte each to dense ones; `codes` may be read up to the next eight.
  void (*pack)(const uint8_t* codes, int64_t count, int32_t bits, uint8_t* dense);
};

const Loops& loops_of(int32_t isa);

}  // namespace bitport
