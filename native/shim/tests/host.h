// A stand-in for torch: tensors, and the functions that the shim calls, with faults that tests can turn on.
#pragma once
#include <cstdint>
#include <vector>
#include "../bitport_shim.h"

struct AtenTensorOpaque {
  std::vector<int64_t> sizes, strides;
  int32_t dtype = 0, device = 0;
  bool contiguous = true;
  std::vector<uint8_t> bytes;   // exactly as many as the tensor has

  template <class T>
  T* as() { return reinterpret_cast<T*>(bytes.data()); }
};

namespace host {

enum Dtype : int32_t { u8 = 100, f32, bf16, f16, i32, i64, e4m3, e8m0, boolean };   // different from torch's own numbers
constexpr int32_t kCpu = 7, kElsewhere = 8;

struct Faults { bool no_memory = false, throws = false; };
extern Faults faults;
extern int64_t alive;   // tensors created and not deleted

int64_t width(int32_t dtype);
AtenTensorOpaque tensor(std::vector<int64_t> sizes, int32_t dtype);   // zeros

}  // namespace host
