// What a step of an optimizer (step.cpp) asks of an instruction set: one block of one parameter.
#pragma once
#include <cstdint>
#include "bitport_kernels.h"

namespace bitport {

constexpr int64_t kMostInBlock = 256;

// Numbers [begin, begin + count) of row `row` of the matrices of a step; count is at most kMostInBlock.
using StepBlock = void (*)(const BitportStep& step, int64_t row, int64_t begin, int64_t count);

// In loops that are vectors of its width.
StepBlock step_in_loops(int32_t isa, int32_t rule);

constexpr int64_t kInVectors = 64;
bool has_byte_lookups();   // besides AVX-512
// Of a multiple of kInVectors; null where moments are of different kinds.
StepBlock step_whole_vectors(int32_t rule, const BitportStep& step);

}  // namespace bitport
