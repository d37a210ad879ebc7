// The ops on torch tensors, for any caller. Each returns null and a new tensor in y, or, without side effects, why the
// arguments are not a case that the kernels handle.
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

// linear: act must be BITPORT_AS_IS. A separate function, so that the linker can drop the kernels that dyn_linear
// calls.
const char* linear(const Product& call, int32_t isa, TensorHandle* y);
const char* dyn_linear(const Product& call, int32_t isa, TensorHandle* y);

// x [rows, k], int32 ends [experts] and a weight per expert. Rows past the last end yield zeros.
const char* grouped_linear(TensorHandle x, TensorHandle ends, const Parts& weight, int32_t isa, TensorHandle* y);
const char* dyn_grouped_linear(TensorHandle x, TensorHandle ends, const Parts& weight, int32_t act, int32_t isa, TensorHandle* y);

// Rows of the weight in the torch dtype `dtype`. or_dense: the rows of the weight may be dense, too.
const char* embedding(TensorHandle ids, const Parts& weight, bool or_dense, int32_t dtype, TensorHandle* y);

// Keys or values in layout plain, with a scale for each block x group of them, and those that are floats, or null. All
// may be floats: then the parts are null.
struct Tokens {
  Parts parts;
  int64_t block = 1;
  TensorHandle dense = nullptr;
};

// softmax(scale q K^T + mask) V: the op `attention`. scale 0: the usual one.
struct Attention {
  TensorHandle q = nullptr;
  Tokens keys, values;
  int64_t first = 0;   // of the floats, those that come before the quantized tokens
  TensorHandle mask = nullptr;
  bool causal = false;
  double scale = 0;
};
const char* attention(const Attention& call, int32_t isa, TensorHandle* y);

// Runs work on torch's threads.
int32_t torch_pool(int64_t begin, int64_t end, int64_t grain, BitportBody body, void* context);

}  // namespace bitport
