// The product with int8 inputs with 256-bit vectors, in parts.
#pragma once
#include "avx2.h"
#include "int8.h"

namespace bitport {

constexpr int64_t kInt8Stretch = 256;   // columns: a panel of 8 KiB, or 16 if codes have more than 4 bits

// Parts of Int8Engine; few rows by Digits too.
void avx2_int8_range(const void* x, int32_t type, int64_t count, float* low, float* high);
int32_t avx2_int8_round(const void* x, int32_t type, int64_t count, Rounding rounding, int8_t* to, int64_t from,
                        int64_t next);
void avx2_int8_finish(float* sum, const float* ones, Rounding rounding, int64_t count, const float* bias, void* y,
                      int32_t type, bool stream);
void avx2_int8_fused(const Int8Job& job, int64_t tile, void* panel, float* sum);

}  // namespace bitport
