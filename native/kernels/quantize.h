// A weight rounded to nearest, in two parts: the scale and the zero point of each block from its range
// (quantize_scales.cpp), and the loops over numbers, in every instruction set (quantize_loops.cpp).
#pragma once
#include "bitport_kernels.h"

namespace bitport {

// The largest magnitude among the positive and among the negative numbers of a block, 0 without any. They are bits of the
// numbers without the sign, 16 of bfloat16 and float16: ordered like the numbers, infinity and NaN above all.
struct Range {
  uint32_t positive = 0, negative = 0;
  void add(const Range& other) {
    positive = other.positive > positive ? other.positive : positive;
    negative = other.negative > negative ? other.negative : negative;
  }
};

// How the numbers of a block become codes. constant: there is no scale. The rest have x / scale from products with the
// inverse and two, one or no correction (quantize_loops.cpp). near: the quotient may be off by one unit in the last place,
// but not where a code ends. exact: the scale is a power of two.
enum class Way : int32_t { constant, division, product, near, exact };

inline bool has_whole_offset(const BitportFormat& f) {   // of its codes
  return f.kind == BITPORT_INTEGER && f.bits > 1 && (f.zero_type < 0 || f.zero_type == BITPORT_U8);
}

struct Step {
  float scale, inverse, offset;   // scale: of the block, times the global one
  Way way;
};

// From ranges of one format to scales; what all blocks share is worked out once.
class Scales {
 public:
  Scales(const BitportFormat& format, int32_t x_type);
  float amax(const Range& range) const;   // NaN where the block holds a number that is not finite
  void measured(float amax);              // the largest of all finite blocks: the global scale follows from it
  float global() const { return global_; }
  // Scales, and zeros if there are any, are written to elements from `at` on.
  void choose(const Range* ranges, int64_t count, void* scales, void* zeros, int64_t at, Step* steps) const;

 private:
  static constexpr int64_t kAtOnce = 64;
  void choose_some(const Range* ranges, int64_t count, void* scales, void* zeros, int64_t at, Step* steps) const;
  int32_t power_of_two(float amax) const;

  const BitportFormat& f_;
  const int32_t type_;
  float global_ = 1, of_zeros_, smallest_, highest_, end_ = 0;
  int32_t emax_;
  uint32_t up_;      // added to the fraction of amax, in units of 2^-23: where it carries, the next power of two is taken
};

struct Loops {
  // A row of k columns, its blocks of `block` columns added to ranges[0 ..].
  void (*measure16)(const void* x, int64_t k, int64_t block, Range* ranges);
  void (*measure32)(const void* x, int64_t k, int64_t block, Range* ranges);
  // Columns [from, to) of a row to a byte each, x (float32 or bfloat16) and codes at the first of them; steps of the whole
  // row.
  using Encode = void (*)(const BitportFormat& format, const void* x, int32_t type, int64_t from, int64_t to,
                          const Step* steps, uint8_t* codes);
  Encode (*encode)(const BitportFormat& format);   // null for a type that is not known
  void (*pack)(const uint8_t* codes, int64_t count, int32_t bits, uint8_t* dense);
};

const Loops& loops_of(int32_t isa);

}  // namespace bitport
