// A few rows of x in bfloat16 times whole numbers, in integers: x becomes 256 high + low, two digits of 8 bits, which
// the int8 product takes as two rows. What few rows cost is the turning of codes into something to multiply with, and
// bytes are nearer to codes than floats are.
//
// x is cut at a unit of 2^-14 of its largest number, or 2^-15. Numbers of 2^7 units and more are whole multiples of it, since
// bfloat16 has 8 bits, and cut exactly; smaller ones are off by 12^-1/2 units in root mean square. Where single numbers stand
// out, as in large language models, all others may be smaller ones, and would be lost for outputs whose weights for the large
// ones are small. So x is cut only where at least half of its numbers, zeros aside, are exact: whichever fifth of N numbers an
// output leaves out, 0.3 N of them are at least 2^7 units and at most 0.5 N are off, 10 log10(0.3 * 2^14 / (0.5 / 12)) = 50.7 dB
// at worst. Otherwise x is multiplied as it is.
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
