// Shared by the two source files of this device.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

namespace sim {

// Returns a CPU tensor that aliases the same memory: the simulated device's memory is host memory.
inline at::Tensor host(const at::Tensor& t) {
  if (t.is_cpu()) return t;
  return at::from_blob(t.storage().mutable_data(), t.sizes(), t.strides(), t.storage_offset(), [](void*) {},
                       at::TensorOptions().dtype(t.dtype()));
}

extern int64_t kernel_calls;  // calls that linear.cpp's kernel has computed itself
extern int64_t handed_back;   // calls that it has passed to bitport's generic kernel

}  // namespace sim
