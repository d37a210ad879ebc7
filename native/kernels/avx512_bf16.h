// The parts of the product in bfloat16 that need no tile registers.
#pragma once
#include "engine.h"

namespace bitport {

// Rows up to which vdpbf16ps beats float32: its rate is half of a float32 product's on the processors measured, so that
// it pays only while reading the codes is what takes the time.
constexpr int64_t kVectorRows = 4;

// panel [count / 32][2 halves of 16 rows][16 pairs of columns][16 rows][2]: what AMX takes as its second operand
void avx512_decode_bf16(const BitportTiles& weight, int64_t tile, int64_t k, int64_t count, void* panel);
// The same, unscaled.
void avx512_look_up_bf16(const BitportTiles& weight, int64_t tile, int64_t k, int64_t count, void* panel);
void avx512_fused_bf16(const Job& job, int64_t tile, void* panel, float* sum);   // up to kVectorRows rows

}  // namespace bitport
