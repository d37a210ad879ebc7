// The arguments of a boxed kernel: read without taking them, given back to torch when the work is done.
#pragma once
#include <cstring>
#include <string_view>
#include "api.h"

namespace bitport {

constexpr int64_t kMostDims = 16;

// A contiguous tensor on the CPU, as far as kernels look at it. Not `ok`: anything else, or one whose parts torch would
// not tell.
struct View {
  TensorHandle handle = nullptr;
  int64_t dim = 0;
  const int64_t* sizes = nullptr;
  int32_t dtype = -1;
  const void* data = nullptr;
  bool ok = false;

  View() = default;
  explicit View(Value value) : handle(reinterpret_cast<TensorHandle>(value)) {
    int64_t* found = nullptr;
    int32_t device = -1;
    bool contiguous = false;
    ok = !torch.aoti_torch_get_device_type(handle, &device) && device == torch.cpu &&
         !torch.aoti_torch_is_contiguous(handle, &contiguous) && contiguous &&
         !torch.aoti_torch_get_dim(handle, &dim) && dim <= kMostDims && !torch.aoti_torch_get_sizes(handle, &found) &&
         !torch.aoti_torch_get_dtype(handle, &dtype) && !torch.torch_get_const_data_ptr(handle, &data) && data;
    sizes = found;
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

// A T? argument: null where it is None.
inline const Value* optional(Value value) { return reinterpret_cast<const Value*>(value); }

inline std::string_view text(Value value) {
  const StringHandle handle = reinterpret_cast<StringHandle>(value);
  size_t length = 0;
  const char* characters = nullptr;
  if (torch.torch_string_length(handle, &length) || torch.torch_string_c_str(handle, &characters)) return {};
  return {characters, length};
}

// Gives the arguments back. kinds has a letter for each: T tensor, O optional tensor, S str, I what holds nothing.
inline void release(const Value* stack, const char* kinds) {
  for (; *kinds; ++kinds, ++stack) {
    if (*kinds == 'T') torch.aoti_torch_delete_tensor_object(reinterpret_cast<TensorHandle>(*stack));
    if (*kinds == 'S') torch.torch_delete_string(reinterpret_cast<StringHandle>(*stack));
    if (*kinds == 'O' && *stack) {
      Value* held = reinterpret_cast<Value*>(*stack);
      torch.aoti_torch_delete_tensor_object(reinterpret_cast<TensorHandle>(*held));
      // before torch 2.13 it comes from operator new, and the receiver deletes it
      if (torch.torch_delete_stable_ivalue) torch.torch_delete_stable_ivalue(held);
      else delete held;
    }
  }
}

// Every str argument as the int[] of its bytes, in place: torch leaks each str that is handed to it.
inline bool spell_out(Value* stack, const char* kinds) {
  for (; *kinds; ++kinds, ++stack) {
    if (*kinds != 'S') continue;
    const std::string_view characters = text(*stack);
    ListHandle bytes = nullptr;
    if (torch.torch_new_list_reserve_size(characters.size(), &bytes)) return false;
    for (const char one : characters)
      if (torch.torch_list_push_back(bytes, Value(uint8_t(one)))) return false;
    torch.torch_delete_string(reinterpret_cast<StringHandle>(*stack));
    *stack = reinterpret_cast<Value>(bytes);
  }
  return true;
}

// A fresh contiguous tensor on the CPU.
struct Fresh {
  TensorHandle handle = nullptr;
  void* data = nullptr;

  bool make(int64_t dim, const int64_t* sizes, int32_t dtype) {
    int64_t strides[kMostDims], step = 1;
    for (int64_t i = dim; i-- > 0; step *= sizes[i]) strides[i] = step;
    return !torch.aoti_torch_empty_strided(dim, sizes, strides, dtype, torch.cpu, 0, &handle) &&
           !torch.torch_get_mutable_data_ptr(handle, &data);
  }
  Value give() {
    const Value value = reinterpret_cast<Value>(handle);
    handle = nullptr;
    return value;
  }
  Fresh() = default;
  Fresh(const Fresh&) = delete;
  Fresh& operator=(const Fresh&) = delete;
  ~Fresh() { if (handle) torch.aoti_torch_delete_tensor_object(handle); }
};

}  // namespace bitport
