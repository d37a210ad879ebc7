// Tensors for a program without torch's headers: a type, sizes, strides in elements, and shared memory.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>
#include "bytes.h"

namespace bitport::runner {

struct Type {
  const char* name;    // as in safetensors
  const char* torch;   // as in torch
  int64_t bytes;
};

// Returns a type by either name, or throws a Failure that lists them.
const Type& type_of(const std::string& name);
const std::vector<Type>& types();

using Sizes = std::vector<int64_t>;

// The number of elements; throws a Failure if the size in bytes overflows.
int64_t count_of(const Sizes& sizes, int64_t element_bytes = 1);
std::string text_of(const Type& type, const Sizes& sizes);   // "BF16[1, 8]"

struct Tensor {
  const Type* type = nullptr;
  Sizes sizes, strides;
  std::shared_ptr<const void> memory;   // points to the first element

  // A contiguous tensor of zeros.
  static Tensor zeros(const Type& type, Sizes sizes);
  // A contiguous tensor over bytes of a file; `owner` keeps them alive.
  static Tensor over(const Type& type, Sizes sizes, Bytes bytes, const std::shared_ptr<const void>& owner);
  template <typename Number>
  static Tensor of(const std::string& type, Sizes sizes, const std::vector<Number>& values);

  int64_t count() const { return count_of(sizes); }
  bool is_dense() const;
  // Whether it begins at a multiple of the size of an element, as torch's code expects; bytes of a file need not.
  bool is_aligned() const;
  // A contiguous copy, or itself if it is contiguous.
  Tensor dense() const;
  const void* data() const { return memory.get(); }
  // For filling a tensor that nothing else shares.
  void* mutable_data() { return const_cast<void*>(memory.get()); }
};

Sizes dense_strides(const Sizes& sizes);

template <typename Number>
Tensor Tensor::of(const std::string& type, Sizes sizes, const std::vector<Number>& values) {
  Tensor made = zeros(type_of(type), std::move(sizes));
  if (sizeof(Number) != size_t(made.type->bytes) || int64_t(values.size()) != made.count())
    fail(values.size(), " values of ", sizeof(Number), " bytes are no ", text_of(*made.type, made.sizes));
  std::memcpy(made.mutable_data(), values.data(), values.size() * sizeof(Number));
  return made;
}

}  // namespace bitport::runner
