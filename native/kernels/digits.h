// A few rows of x in bfloat16 times whole numbers, in integers: x becomes 256 high + low, two digits of 8 bits, which
// the int8 product takes as two rows. What few rows cost is the turning of codes into something to multiply with, and
// bytes are nearer to codes than floats are.
//
// x is cut at 2^-14 of its largest number, where that is at most 2^7 times the mean size: roundings are 2^-8.8 of the mean
// size then (-53 dB), and lose no more than that of y to bfloat16. Where a number stands out by more, as single ones do in
// large language models, the others would be lost for outputs whose weight for it is small: x is multiplied as it is.
#pragma once
#include "int8.h"

namespace bitport {

// What an instruction set brings.
struct Digits {
  const Engine& floats;      // its widen() and store()
  decltype(Int8Engine::fused) fused;
  int64_t panel_bytes;       // that fused() uses
  int64_t stretch;           // columns whose products are summed as integers at most
  // The bits of the largest of k sizes.
  uint16_t (*largest)(const uint16_t* x, int64_t k);
  // The digits of columns [from, to), whole units of 16 but for the end of the row, in two rows of steps that lie `next`
  // bytes apart, and the sums of both.
  void (*split)(const uint16_t* x, int64_t from, int64_t to, float unit, int8_t* codes, int64_t next, float* high_sum,
                float* low_sum);
  void (*join)(float* sum, float unit);   // y of a row from the sums of both digits [2][32]
};

#if BITPORT_X86
extern const Digits avx2_digits, avx512_digits;
#elif BITPORT_ARM
extern const Digits neon_digits, neon_dot_digits, neon_matrix_digits;
#endif

}  // namespace bitport
