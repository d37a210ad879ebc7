// What may follow a product, in place, on 32 sums of a row: sum = f(sum + bias) * times.
//   f(z) = max(z, 0) - |z| tail(|z|),   tail(a) = Phi(-a)                             gelu, Phi: the normal distribution
//                                                 sigmoid(-a)                         silu
//                                                 sigmoid(-2 sqrt(2/pi) (a + 0.044715 a^3))   gelu_tanh
// in which nothing cancels but what has to. The error is below (12 + 2 e) 2^-24 of f, where exp(-e) is what the tail
// falls by: below 2^-19 wherever f is above 2^-23 of z. Past exp(-80) the tail stays what it is there; -infinity gives as
// good as 0, the limit, where the formula in floats has no number.
#pragma once
#include "bitport_kernels.h"

namespace bitport {

// bias: of these 32; times: of type, `count` of them, as of the bias. Either may be null.
using Activate = void (*)(int32_t then, float* sum, const float* bias, const void* times, int32_t type, int64_t count);

void scalar_activate(int32_t then, float* sum, const float* bias, const void* times, int32_t type, int64_t count);
void avx2_activate(int32_t then, float* sum, const float* bias, const void* times, int32_t type, int64_t count);
void avx512_activate(int32_t then, float* sum, const float* bias, const void* times, int32_t type, int64_t count);

Activate activate_for(int32_t isa);

}  // namespace bitport
