// Arguments of the C functions, as the ops on tensors take them.
#pragma once
#include "../torch/calls.h"
#include "error.h"

namespace bitport {

constexpr int32_t kBestIsa = -1;

inline TensorHandle as_handle(AtenTensorHandle tensor) { return reinterpret_cast<TensorHandle>(tensor); }
inline TensorHandle as_optional(const AtenTensorHandle* tensor) { return tensor ? as_handle(*tensor) : nullptr; }

// The weight arguments of an op.
struct Given {
  AtenTensorHandle data, scale, *zero, *scale2, table;
  int64_t n, k, group, bits, integer;

  const char* read(Parts* parts) const {
    if (bits < 1 || bits > 8) return "a weight has 1 to 8 bits";
    const View meaning(as_handle(table));
    if (!meaning.ok || meaning.type() != BITPORT_F32 || !meaning.has_shape(int64_t(1) << bits))
      return "the table is not contiguous float32 [2^bits] on the CPU";
    *parts = {as_handle(data), as_handle(scale), as_optional(zero), as_optional(scale2), {}, n, k, group};
    parts->number.bits = int32_t(bits);
    parts->number.integer = integer != 0;
    parts->number.table = static_cast<const float*>(meaning.data);
    return nullptr;
  }
};

inline const char* check(const AtenTensorHandle* result) { return result ? nullptr : "the pointer for the result is null"; }

}  // namespace bitport
