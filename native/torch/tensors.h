// Reading and creating torch tensors.
#pragma once
#include "api.h"

namespace bitport {

constexpr int64_t kMostDims = 16;

// The properties of a contiguous CPU tensor that kernels need. Not `ok` for any other tensor, or if torch fails to
// return them.
struct View {
  TensorHandle handle = nullptr;
  int64_t dim = 0;
  const int64_t* sizes = nullptr;
  int32_t dtype = -1;
  const void* data = nullptr;
  bool ok = false;

  View() = default;
  explicit View(TensorHandle given) : handle(given) {
    if (!handle) return;
    int64_t* found = nullptr;
    int32_t device = -1;
    bool contiguous = false;
    ok = !torch.aoti_torch_get_device_type(handle, &device) && device == torch.device &&
         !torch.aoti_torch_is_contiguous(handle, &contiguous) && contiguous &&
         !torch.aoti_torch_get_dim(handle, &dim) && dim <= kMostDims && !torch.aoti_torch_get_sizes(handle, &found) &&
         !torch.aoti_torch_get_dtype(handle, &dtype) && !torch.torch_get_const_data_ptr(handle, &data);
    sizes = found;
    ok = ok && (data || !count());
  }

  template <class... Sizes>
  bool has_shape(Sizes... expected) const {
    const int64_t wanted[] = {int64_t(expected)...};
    return has_sizes(int64_t(sizeof...(Sizes)), wanted);
  }
  bool has_sizes(int64_t dims, const int64_t* wanted) const {
    if (dim != dims) return false;
    for (int64_t i = 0; i < dim; ++i)
      if (sizes[i] != wanted[i]) return false;
    return true;
  }
  int64_t count() const {
    int64_t product = 1;
    for (int64_t i = 0; i < dim; ++i) product *= sizes[i];
    return product;
  }
  int32_t type() const { return torch.type_of(dtype); }
};

// A new contiguous CPU tensor.
struct Fresh {
  TensorHandle handle = nullptr;
  void* data = nullptr;

  bool make(int64_t dim, const int64_t* sizes, int32_t dtype, int32_t index = 0) {
    int64_t strides[kMostDims], step = 1;
    for (int64_t i = dim; i-- > 0;) {
      strides[i] = step;
      if (__builtin_mul_overflow(step, sizes[i], &step)) return false;   // also beside a size of 0, as torch refuses it
    }
    return !torch.aoti_torch_empty_strided(dim, sizes, strides, dtype, torch.device, index, &handle) &&
           !torch.torch_get_mutable_data_ptr(handle, &data);
  }
  TensorHandle give() {
    const TensorHandle given = handle;
    handle = nullptr;
    return given;
  }
  Fresh() = default;
  Fresh(const Fresh&) = delete;
  Fresh& operator=(const Fresh&) = delete;
  ~Fresh() { if (handle) torch.aoti_torch_delete_tensor_object(handle); }
};

}  // namespace bitport
