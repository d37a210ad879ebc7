// The function applied to the sums of a tile before they are rounded: sum = f(sum + bias) * times.
//   f(z) = max(z, 0) - |z| tail(|z|),   tail(a) = Phi(-a)                                    gelu, Phi: the normal distribution
//                                                 sigmoid(-a)                                silu
//                                                 sigmoid(-2 sqrt(2 / pi) (a + 0.044715 a^3))   gelu_tanh
// In this form only small terms cancel. The relative error of a tail exp(-e) is below
// (16 + 2 e) 2^-24. Beyond some a the tail is constant, and less than 1e-12 times a: -infinity yields nearly the limit, 0.
#pragma once
#include "bitport_kernels.h"

namespace bitport {

struct Following {
  int32_t then;
  const float* bias;    // for the columns of this tile, or null
  const void* times;    // for the first row and these columns, or null; rows are `next` elements apart
  int32_t type;         // of times
  int64_t next, count;  // count: columns of this tile
};

using Activate = void (*)(const Following& f, float* sum, int64_t rows);   // sum [rows][32]

void scalar_activate(const Following& f, float* sum, int64_t rows);
void avx2_activate(const Following& f, float* sum, int64_t rows);
void avx512_activate(const Following& f, float* sum, int64_t rows);
void neon_activate(const Following& f, float* sum, int64_t rows);

constexpr int64_t kActivated = 8;   // rows at once, so that their sums stay in L1 from step to step

Activate activate_for(int32_t isa);

}  // namespace bitport
