// The ops on tensors of torch, whoever calls them. Each gives null and a new tensor in y, or why the arguments are not the
// plain case that the kernels take; then nothing was done.
#pragma once
#include "weight.h"

namespace bitport {

// y = then(round(x) W^T + bias) * times; act_scale, bias and times may be null.
struct Product {
  TensorHandle x = nullptr;
  Parts weight;
  int32_t act = BITPORT_AS_IS;
  TensorHandle act_scale = nullptr, bias = nullptr;
  int32_t then = BITPORT_NOTHING;
  TensorHandle times = nullptr;
};

// linear: x as it is, and act says so. A function of its own, since the linker leaves out what nothing calls.
const char* linear(const Product& call, int32_t isa, TensorHandle* y);
const char* dyn_linear(const Product& call, int32_t isa, TensorHandle* y);

// x [rows, k], int32 ends [experts] and a weight per expert. Rows past the last end give zeros.
const char* grouped_linear(TensorHandle x, TensorHandle ends, const Parts& weight, int32_t isa, TensorHandle* y);
const char* dyn_grouped_linear(TensorHandle x, TensorHandle ends, const Parts& weight, int32_t act, int32_t isa, TensorHandle* y);

// Rows of the weight in torch's `dtype`. or_dense: of one whose rows lie dense too.
const char* embedding(TensorHandle ids, const Parts& weight, bool or_dense, int32_t dtype, TensorHandle* y);

// Work on torch's threads.
int32_t torch_pool(int64_t begin, int64_t end, int64_t grain, BitportBody body, void* context);

}  // namespace bitport
