// A few rows of bfloat16 x times integer weights, in integer arithmetic: x becomes 256 high + low, two 8-bit digits
// that the int8 product takes as two rows. With few rows the cost is in converting codes to operands, and bytes are
// closer to codes than floats are.
//
// x is rounded to a unit of 2^-14 or 2^-15 of its largest number. Since bfloat16 has 8 significant bits, numbers of 2^7
// units and more are integer multiples of the unit and hence exact; smaller ones have a root mean square error of
// 12^-1/2 units. If there are outliers, as in large language models, all other numbers may be small, and would be lost
// for outputs whose weights for the outliers are small. So digits are used only if at least half of the nonzero numbers
// are exact: whichever fifth of N numbers an output ignores, 0.3 N of them are at least 2^7 units and at most 0.5 N
// inexact, 10 log10(0.3 * 2^14 / (0.5 / 12)) = 50.7 dB at worst. Otherwise x is multiplied as is.
#pragma once
#include "int8.h"

namespace bitport {

// The functions of an instruction set.
struct Digits {
  const Engine& floats;      // its widen() and store()
  decltype(Int8Engine::fused) fused;
  int64_t panel_bytes;       // scratch bytes for fused()
  int64_t stretch;           // maximum number of columns whose products are summed as integers
  // The magnitude bits of the largest of k numbers.
  uint16_t (*largest)(const uint16_t* x, int64_t k);
  // Writes the digits of columns [from, to), a multiple of 16 except at the end of the row, to two rows whose steps are
  // `next` bytes apart, and the sums of both.
  void (*split)(const uint16_t* x, int64_t from, int64_t to, float unit, int8_t* codes, int64_t next, float* high_sum,
                float* low_sum);
  void (*join)(float* sum, float unit);   // computes the sums of a row from those of both digits [2][32]
};

#if BITPORT_X86
extern const Digits avx2_digits, avx512_digits;
#elif BITPORT_ARM
extern const Digits neon_digits, neon_dot_digits, neon_matrix_digits;
#endif

}  // namespace bitport
