// C functions on torch tensors, for programs that run without Python.
//
// Code that AOTInductor generates for an exported model calls the CPU ops directly
// (`aot_inductor.custom_ops_to_c_shims`); their arguments are those of the ops in src/bitport/export/ops.py. The
// library these functions are linked into, or its host, must provide the torch functions of native/torch/api.h
// (BITPORT_TENSOR_FUNCTIONS): libtorch does, and any other runtime with tensors can. Handles are opaque: they are only
// passed on to those functions.
//
// Every function returns AOTI_TORCH_SUCCESS (0) and a new tensor in *result, owned by the caller; or another code,
// leaving *result unchanged and a message for bitport_shim_error(). All arguments are validated before anything is
// written or tensor memory is read; no exception escapes. A Tensor? argument is null or points to a handle. The
// functions are thread-safe.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
#define BITPORT_SHIM extern "C" __attribute__((visibility("default")))
#else
#define BITPORT_SHIM __attribute__((visibility("default")))
#endif

typedef struct AtenTensorOpaque* AtenTensorHandle;
typedef int32_t AOTITorchError;

// Return codes. InvalidArgument has the same value as in ExecuTorch.
enum { BITPORT_SUCCESS = 0, BITPORT_FAILURE = 1, BITPORT_INVALID_ARGUMENT = 0x12 };

// The message of the last failed call of this thread; valid until its next one. Never null.
BITPORT_SHIM const char* bitport_shim_error(void);

// -- a weight in layout cpu_tiles (native/kernels/bitport_kernels.h) -------------------------------------------------
//
//   data    uint8 [n/32, k/32, 128 * bits]        scale   a float [n/32, k/group, 32]
//   zero    like scale, or uint8; Tensor?         scale2  float32 [1, 1]; Tensor?
//   table   float32 [2^bits], the value of each code
//   n, k    of the matrix; group: columns that share a scale, at least k for one scale per row
//   bits    of a code; integer: 1 for integers, 0 for floats and codebooks
//
// act is a BitportAct, then a BitportThen. Tensors must be contiguous and on the CPU.

// y [.., n] = then(x W^T + bias) * times; x [.., k] float32, bfloat16 or float16; bias [n], times [.., n] like x.
BITPORT_SHIM AOTITorchError aoti_torch_cpu_bitport_linear(
    AtenTensorHandle x, AtenTensorHandle data, AtenTensorHandle scale, AtenTensorHandle* zero, AtenTensorHandle* scale2,
    AtenTensorHandle table, int64_t n, int64_t k, int64_t group, int64_t bits, int64_t integer, AtenTensorHandle* bias,
    int64_t then, AtenTensorHandle* times, AtenTensorHandle* result);

// The same with round(x). A program links the kernels for rounding only if it calls this.
BITPORT_SHIM AOTITorchError aoti_torch_cpu_bitport_dyn_linear(
    AtenTensorHandle x, AtenTensorHandle data, AtenTensorHandle scale, AtenTensorHandle* zero, AtenTensorHandle* scale2,
    AtenTensorHandle table, int64_t n, int64_t k, int64_t group, int64_t bits, int64_t integer, int64_t act,
    AtenTensorHandle* act_scale, AtenTensorHandle* bias, int64_t then, AtenTensorHandle* times, AtenTensorHandle* result);

// y [rows, n]: multiplies rows ends[e-1] .. ends[e] of x by the weight of expert e. ends is int32 [experts], and every
// part of the weight has a leading dimension of experts.
BITPORT_SHIM AOTITorchError aoti_torch_cpu_bitport_grouped_linear(
    AtenTensorHandle x, AtenTensorHandle ends, AtenTensorHandle data, AtenTensorHandle scale, AtenTensorHandle* zero,
    AtenTensorHandle* scale2, AtenTensorHandle table, int64_t n, int64_t k, int64_t group, int64_t bits, int64_t integer,
    AtenTensorHandle* result);

// The same with round(x).
BITPORT_SHIM AOTITorchError aoti_torch_cpu_bitport_dyn_grouped_linear(
    AtenTensorHandle x, AtenTensorHandle ends, AtenTensorHandle data, AtenTensorHandle scale, AtenTensorHandle* zero,
    AtenTensorHandle* scale2, AtenTensorHandle table, int64_t n, int64_t k, int64_t group, int64_t bits, int64_t integer,
    int64_t act, AtenTensorHandle* result);

// y [.., k] of the torch dtype `dtype`: the rows of the weight selected by ids, int64 [..]. A weight that is only
// looked up may be stored by row: data uint8 [n, k * bits / 8], lowest bits first, scale and zero [n, k/group].
BITPORT_SHIM AOTITorchError aoti_torch_cpu_bitport_embedding(
    AtenTensorHandle ids, AtenTensorHandle data, AtenTensorHandle scale, AtenTensorHandle* zero, AtenTensorHandle* scale2,
    AtenTensorHandle table, int64_t n, int64_t k, int64_t group, int64_t bits, int64_t integer, int32_t dtype,
    AtenTensorHandle* result);

// y [batch, heads, rows, v_k] = softmax(scale q K^T + mask) V, over the tokens of a cache in this order: `first` of the
// dense ones, the quantized, the other dense ones. Tokens [batch, a divisor of heads, tokens, ..] may be strided, but
// those of a head are contiguous.
//
//   q        [batch, heads, rows, k_k], contiguous float32, bfloat16 or float16
//   data     uint8 or float8_e4m3fn [.., n, ceil(k * bits / 8)], lowest bits first
//   scale    a float [.., ceil(n/block), ceil(k/group)]; zero like it, or uint8; Tensor?. A block of more than one
//            token is for keys alone, with a group of 1; other groups are a multiple of 16, or at least k
//   dense    like q [.., m, k]; Tensor?, both or neither
//   mask     bool or float32, [batch, heads, rows, all tokens] or 1 along some axes; Tensor?
//   causal   row i of T sees all tokens but the last T - 1 - i
//   scale    0: 1 / sqrt(k_k)
BITPORT_SHIM AOTITorchError aoti_torch_cpu_bitport_attention(
    AtenTensorHandle q, AtenTensorHandle k_data, AtenTensorHandle k_scale, AtenTensorHandle* k_zero,
    AtenTensorHandle* k_dense, AtenTensorHandle k_table, int64_t k_n, int64_t k_k, int64_t k_block, int64_t k_group,
    int64_t k_bits, int64_t k_integer, AtenTensorHandle v_data, AtenTensorHandle v_scale, AtenTensorHandle* v_zero,
    AtenTensorHandle* v_dense, AtenTensorHandle v_table, int64_t v_n, int64_t v_k, int64_t v_block, int64_t v_group,
    int64_t v_bits, int64_t v_integer, int64_t first, AtenTensorHandle* mask, int64_t causal, double scale,
    AtenTensorHandle* result);

// The same where all tokens are floats: keys and values are the dense ones.
BITPORT_SHIM AOTITorchError aoti_torch_cpu_bitport_float_attention(
    AtenTensorHandle q, AtenTensorHandle keys, AtenTensorHandle values, AtenTensorHandle* mask, int64_t causal,
    double scale, AtenTensorHandle* result);

// -- the contract of tinygemm (aten::_weight_int4pack_mm) ------------------------------------------------------------

// y bfloat16 [m, n] = self W^T.
//
//   self               bfloat16 [m, k], contiguous
//   mat2               int32 [n/8, k/(inner*16), 32, inner/2], inner 2, 4 or 8; contiguous. A word holds eight codes of
//                      row 8*tile + lane/4: with c = (outer*inner + 2*pair) * 16 + 2*(lane % 4), from the lowest bits,
//                      columns c, c+8, c+16, c+24, c+1, c+9, c+17, c+25
//   group              32, 64, 128 or 256, dividing k
//   scales_and_zeros   bfloat16 [k/group, n, 2], contiguous: W = (code - 8) * s + z
//
// Any deviation, including a null pointer, is BITPORT_INVALID_ARGUMENT. On the CPU the words are repacked on every
// call: an exported model, whose weights are in the layout of the kernels, is faster.
BITPORT_SHIM AOTITorchError aoti_torch_cpu__weight_int4pack_mm(AtenTensorHandle self, AtenTensorHandle mat2, int64_t group,
                                                               AtenTensorHandle scales_and_zeros,
                                                               AtenTensorHandle* result);

// The same on the CUDA device of the tensors, in the library built by native/shim/cuda if nvcc is available.
BITPORT_SHIM AOTITorchError aoti_torch_cuda__weight_int4pack_mm(AtenTensorHandle self, AtenTensorHandle mat2, int64_t group,
                                                                AtenTensorHandle scales_and_zeros,
                                                                AtenTensorHandle* result);
