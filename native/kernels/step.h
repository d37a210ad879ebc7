// What an optimizer step (step.cpp) needs from an instruction set: the update of one block of one parameter.
#pragma once
#include <cstdint>
#include "bitport_kernels.h"

namespace bitport {

constexpr int64_t kMostInBlock = 256;

// Numbers [begin, begin + count) of row `row` of the matrices of a step; count is at most kMostInBlock.
using StepBlock = void (*)(const BitportStep& step, int64_t row, int64_t begin, int64_t count);

// The update in auto-vectorized loops.
StepBlock step_in_loops(int32_t isa, int32_t rule);

constexpr int64_t kInVectors = 64;
bool has_byte_lookups();   // needed in addition to AVX-512
// For counts that are multiples of kInVectors; null if the moments are of different kinds.
StepBlock step_whole_vectors(int32_t rule, const BitportStep& step);

}  // namespace bitport
