// Registration of the CPU kernels with the torch that the process has loaded: no torch header, nothing linked. What
// torch offers is looked up by name (api.h), so one binary serves torch 2.11 and every later one.
#pragma once
#include <cstdint>
#include "../kernels/bitport_kernels.h"

// Registers CPU kernels of the ops bitport::linear, dyn_linear, linear_then, dyn_linear_then, grouped_linear, dyn_grouped_linear
// and embedding, all switched off, and gives the library torch's thread pool. Each op's schema must exist when it is first called, and an
// overload `choose` with the same arguments, each str as an int[] of its bytes. libtorch_cpu: path of the loaded library.
// Null, or why it failed.
BITPORT_API const char* bitport_register_torch(const char* libtorch_cpu);

// A number type of weights, by the name that ops give it. table: 2^bits floats, copied. 0, or 1 if it does not fit.
BITPORT_API int32_t bitport_name_type(const char* name, int32_t bits, int32_t integer, const float* table);

// The most rows of x for which `linear` takes weights of this type with groups, or with one scale a row; below 0: any.
BITPORT_API int32_t bitport_limit_rows(const char* name, int32_t whole_row, int64_t most);

// A rounding of x (BitportAct), by the name that ops give it. 0, or 1 if it does not fit.
BITPORT_API int32_t bitport_name_rounding(const char* name, int32_t act);

// What may follow a product (BitportThen), by the name that ops give it. 0, or 1 if it does not fit.
BITPORT_API int32_t bitport_name_activation(const char* name, int32_t then);

// Whether the kernel of `op` takes calls; while it does not, all go to `choose`. 0, or 1 if there is no such op.
BITPORT_API int32_t bitport_take_calls(const char* op, int32_t on);

// The variant that registered kernels run (BitportIsa), below 0 the best. How many calls they took since the start.
BITPORT_API void bitport_torch_isa(int32_t isa);
BITPORT_API int64_t bitport_calls_taken(void);
