// What may follow a product, on the sums of a tile, before they are rounded: sum = f(sum + bias) * times.
//   f(z) = max(z, 0) - |z| tail(|z|),   tail(a) = Phi(-a)                                    gelu, Phi: the normal distribution
//                                                 sigmoid(-a)                                silu
//                                                 sigmoid(-2 sqrt(2 / pi) (a + 0.044715 a^3))   gelu_tanh
// so that nothing cancels which is not small. A tail exp(-e) is off by less than (16 + 2 e) 2^-24 of itself. From some a
// on it stays what it is there, less than 1e-12 after its product with a: -infinity gives as good as 0, the limit.
#pragma once
#include "bitport_kernels.h"

namespace bitport {

struct Following {
  int32_t then;
  const float* bias;    // of this tile's columns, or null
  const void* times;    // of the first row and these columns, or null; rows lie `next` numbers apart
  int32_t type;         // of times
  int64_t next, count;  // count: columns of this tile
};

using Activate = void (*)(const Following& f, float* sum, int64_t rows);   // sum [rows][32]

void scalar_activate(const Following& f, float* sum, int64_t rows);
void avx2_activate(const Following& f, float* sum, int64_t rows);
void avx512_activate(const Following& f, float* sum, int64_t rows);
void neon_activate(const Following& f, float* sum, int64_t rows);

constexpr int64_t kActivated = 8;   // rows at once: their sums stay in the nearest memory from step to step

Activate activate_for(int32_t isa);

}  // namespace bitport
