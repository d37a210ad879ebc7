// Registers the CPU kernels with the torch library loaded in this process, without torch headers or linking against
// torch. Functions are looked up by name (api.h), so one binary works with torch 2.11 and later.
#pragma once
#include <cstdint>
#include "../kernels/bitport_kernels.h"

// Registers CPU kernels of the ops bitport::linear, dyn_linear, linear_then, dyn_linear_then, grouped_linear,
// dyn_grouped_linear and embedding, all disabled, and makes the kernel library use torch's thread pool. The schema of
// an op must exist when it is first called, as must an overload `choose` with the same arguments, each str as an int[]
// of its bytes. libtorch_cpu: path of the loaded library. Returns null, or the reason of a failure.
BITPORT_API const char* bitport_register_torch(const char* libtorch_cpu);

// Defines the name that ops use for a number type of weights. table: 2^bits floats, copied. Returns 0, or 1 if invalid.
BITPORT_API int32_t bitport_name_type(const char* name, int32_t bits, int32_t integer, const float* table);

// The maximum number of rows of x for which `linear` takes weights of this type, with groups or with one scale per row;
// negative: unlimited.
BITPORT_API int32_t bitport_limit_rows(const char* name, int32_t whole_row, int64_t most);

// Defines the name that ops use for a rounding of x (BitportAct). Returns 0, or 1 if invalid.
BITPORT_API int32_t bitport_name_rounding(const char* name, int32_t act);

// Defines the name that ops use for a function after a product (BitportThen). Returns 0, or 1 if invalid.
BITPORT_API int32_t bitport_name_activation(const char* name, int32_t then);

// Enables or disables the kernel of `op`; while disabled, all calls go to `choose`. Returns 0, or 1 if there is no such
// op.
BITPORT_API int32_t bitport_take_calls(const char* op, int32_t on);

// The ISA of registered kernels (BitportIsa), negative for the best; and how many calls they have taken in this
// process.
BITPORT_API void bitport_torch_isa(int32_t isa);
BITPORT_API int64_t bitport_calls_taken(void);
