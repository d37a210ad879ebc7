// Rounds a weight to nearest in two parts: the scale and zero point of each block from its range (quantize_scales.cpp),
// and the loops over elements for every instruction set (quantize_loops.cpp).
#pragma once
#include "bitport_kernels.h"

namespace bitport {

// The largest magnitudes of the positive and of the negative elements of a block, 0 if there are none. Stored as bit
// patterns without the sign, 16 bits for bfloat16 and float16: these are ordered like the numbers, with infinity and
// NaN above all.
struct Range {
  uint32_t positive = 0, negative = 0;
  void add(const Range& other) {
    positive = other.positive > positive ? other.positive : positive;
    negative = other.negative > negative ? other.negative : negative;
  }
};

// How the elements of a block become codes. constant: there is no scale. The others compute x / scale by multiplying
// with the inverse, with two, one or no correction (quantize_loops.cpp). near: the quotient may be off by one ulp, but
// not where that changes the code. exact: the scale is a power of two.
enum class Way : int32_t { constant, division, product, near, exact };

inline bool has_whole_offset(const BitportFormat& f) {   // of its codes
  return f.kind == BITPORT_INTEGER && f.bits > 1 && (f.zero_type < 0 || f.zero_type == BITPORT_U8);
}

struct Step {
  float scale, inverse, offset;   // scale: of the block, times the global scale
  Way way;
};

// Computes scales from ranges for one format; what all blocks share is computed once.
class Scales {
 public:
  Scales(const BitportFormat& format, int32_t x_type);
  float amax(const Range& range) const;   // NaN if the block holds a non-finite number
  void measured(float amax);              // the maximum over all finite blocks, which determines the global scale
  float global() const { return global_; }
  // Writes scales, and zeros if there are any, to elements from `at` on.
  void choose(const Range* ranges, int64_t count, void* scales, void* zeros, int64_t at, Step* steps) const;

 private:
  static constexpr int64_t kAtOnce = 64;
  void choose_some(const Range* ranges, int64_t count, void* scales, void* zeros, int64_t at, Step* steps) const;
  int32_t power_of_two(float amax) const;

  const BitportFormat& f_;
  const int32_t type_;
  float global_ = 1, of_zeros_, smallest_, highest_, end_ = 0;
  int32_t emax_;
  uint32_t up_;      // added to the fraction of amax, in units of 2^-23: a carry selects the next power of two
};

struct Loops {
  // Merges a row of k columns, in blocks of `block` columns, into ranges[0 ..].
  void (*measure16)(const void* x, int64_t k, int64_t block, Range* ranges);
  void (*measure32)(const void* x, int64_t k, int64_t block, Range* ranges);
  // Encodes columns [from, to) of a row to a byte each. x (float32 or bfloat16) and codes point to the first of them;
  // steps belong to the whole row.
  using Encode = void (*)(const BitportFormat& format, const void* x, int32_t type, int64_t from, int64_t to,
                          const Step* steps, uint8_t* codes);
  Encode (*encode)(const BitportFormat& format);   // null for an unknown type
  void (*pack)(const uint8_t* codes, int64_t count, int32_t bits, uint8_t* dense);
};

const Loops& loops_of(int32_t isa);

}  // namespace bitport
