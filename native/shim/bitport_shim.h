// C functions over tensors of torch, for programs that run without Python.
//
// What AOTInductor generates for an exported model calls the first three directly (`aot_inductor.custom_ops_to_c_shims`);
// their arguments are those of the ops in src/bitport/export/ops.py. The library that they are linked into, or its host,
// provides the functions of torch in native/torch/api.h (BITPORT_TENSOR_FUNCTIONS): libtorch does, and so may any runtime
// that has tensors. A handle is only ever passed on to those functions.
//
// Every function gives AOTI_TORCH_SUCCESS (0) and a new tensor in *result, which the caller owns; or another code, *result
// untouched, and a text for bitport_shim_error(). Nothing is written and no memory of a tensor is read before all
// arguments were checked against each other; no exception leaves. A Tensor? argument is null, or points to a handle.
// Several threads may call at once.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
#define BITPORT_SHIM extern "C" __attribute__((visibility("default")))
#else
#define BITPORT_SHIM __attribute__((visibility("default")))
#endif

typedef struct AtenTensorOpaque* AtenTensorHandle;
typedef int32_t AOTITorchError;

// What the functions return. InvalidArgument is the number that ExecuTorch gives it.
enum { BITPORT_SUCCESS = 0, BITPORT_FAILURE = 1, BITPORT_INVALID_ARGUMENT = 0x12 };

// What was wrong with the last call of this thread that failed; valid until the next one. Never null.
BITPORT_SHIM const char* bitport_shim_error(void);

// -- a weight in layout cpu_tiles (native/kernels/bitport_kernels.h) -------------------------------------------------
//
//   data    uint8 [n/32, k/32, 128 * bits]        scale   a float [n/32, k/group, 32]
//   zero    like scale, or uint8; Tensor?         scale2  float32 [1, 1]; Tensor?
//   table   float32 [2^bits], what each code means
//   n, k    of the matrix; group: columns that share a scale, k or more for one scale a row
//   bits    of a code; integer: 1 for integers, 0 for floats and codebooks
//
// act is a BitportAct, then a BitportThen. Tensors are contiguous and on the CPU.

// y [.., n] = then(x W^T + bias) * times; x [.., k] float32, bfloat16 or float16; bias [n], times [.., n] like x.
BITPORT_SHIM AOTITorchError aoti_torch_cpu_bitport_linear(
    AtenTensorHandle x, AtenTensorHandle data, AtenTensorHandle scale, AtenTensorHandle* zero, AtenTensorHandle* scale2,
    AtenTensorHandle table, int64_t n, int64_t k, int64_t group, int64_t bits, int64_t integer, AtenTensorHandle* bias,
    int64_t then, AtenTensorHandle* times, AtenTensorHandle* result);

// The same of round(x). What it calls is linked into a program only if the program calls it.
BITPORT_SHIM AOTITorchError aoti_torch_cpu_bitport_dyn_linear(
    AtenTensorHandle x, AtenTensorHandle data, AtenTensorHandle scale, AtenTensorHandle* zero, AtenTensorHandle* scale2,
    AtenTensorHandle table, int64_t n, int64_t k, int64_t group, int64_t bits, int64_t integer, int64_t act,
    AtenTensorHandle* act_scale, AtenTensorHandle* bias, int64_t then, AtenTensorHandle* times, AtenTensorHandle* result);

// y [rows, n]: rows ends[e-1] .. ends[e] of x times the weight of expert e; ends int32 [experts], and every part of the
// weight has a leading dimension of experts.
BITPORT_SHIM AOTITorchError aoti_torch_cpu_bitport_grouped_linear(
    AtenTensorHandle x, AtenTensorHandle ends, AtenTensorHandle data, AtenTensorHandle scale, AtenTensorHandle* zero,
    AtenTensorHandle* scale2, AtenTensorHandle table, int64_t n, int64_t k, int64_t group, int64_t bits, int64_t integer,
    AtenTensorHandle* result);

// The same of round(x).
BITPORT_SHIM AOTITorchError aoti_torch_cpu_bitport_dyn_grouped_linear(
    AtenTensorHandle x, AtenTensorHandle ends, AtenTensorHandle data, AtenTensorHandle scale, AtenTensorHandle* zero,
    AtenTensorHandle* scale2, AtenTensorHandle table, int64_t n, int64_t k, int64_t group, int64_t bits, int64_t integer,
    int64_t act, AtenTensorHandle* result);

// y [.., k] of torch's dtype `dtype`: the rows of the weight that ids, int64 [..], name. A weight for lookups alone may lie
// row by row: data uint8 [n, k * bits / 8], the lowest bits first, scale and zero [n, k/group].
BITPORT_SHIM AOTITorchError aoti_torch_cpu_bitport_embedding(
    AtenTensorHandle ids, AtenTensorHandle data, AtenTensorHandle scale, AtenTensorHandle* zero, AtenTensorHandle* scale2,
    AtenTensorHandle table, int64_t n, int64_t k, int64_t group, int64_t bits, int64_t integer, int32_t dtype,
    AtenTensorHandle* result);

// -- the contract of tinygemm (aten::_weight_int4pack_mm) ------------------------------------------------------------

// y bfloat16 [m, n] = self W^T.
//
//   self               bfloat16 [m, k], contiguous
//   mat2               int32 [n/8, k/(inner*16), 32, inner/2], inner 2, 4 or 8; contiguous. A word holds eight codes of
//                      row 8*tile + lane/4; with c = (outer*inner + 2*pair) * 16 + 2*(lane % 4), from the lowest bits up
//                      columns c, c+8, c+16, c+24, c+1, c+9, c+17, c+25
//   group              32, 64, 128 or 256, dividing k
//   scales_and_zeros   bfloat16 [k/group, n, 2], contiguous: W = (code - 8) * s + z
//
// Whatever differs, a null pointer among it, is BITPORT_INVALID_ARGUMENT. On the CPU the words are rearranged on every
// call: an exported model, whose weights lie as the kernels want them, is faster.
BITPORT_SHIM AOTITorchError aoti_torch_cpu__weight_int4pack_mm(AtenTensorHandle self, AtenTensorHandle mat2, int64_t group,
                                                               AtenTensorHandle scales_and_zeros,
                                                               AtenTensorHandle* result);

// The same on the device of the tensors, in the library that native/shim/cuda makes where nvcc exists.
BITPORT_SHIM AOTITorchError aoti_torch_cuda__weight_int4pack_mm(AtenTensorHandle self, AtenTensorHandle mat2, int64_t group,
                                                                AtenTensorHandle scales_and_zeros,
                                                                AtenTensorHandle* result);
