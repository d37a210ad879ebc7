// Tensors as a program without torch's headers sees them: a type, sizes, strides in elements, and memory that they share.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>
#include "bytes.h"

namespace bitport::runner {

struct Type {
  const char* name;    // as safetensors spells it
  const char* torch;   // as torch does
  int64_t bytes;
};

// A type by either name, or a Failure that lists them.
const Type& type_of(const std::string& name);
const std::vector<Type>& types();

using Sizes = std::vector<int64_t>;

// How many elements; a Failure where that many bytes of `type` cannot be.
int64_t count_of(const Sizes& sizes, int64_t element_bytes = 1);
std::string text_of(const Type& type, const Sizes& sizes);   // "BF16[1, 8]"

struct Tensor {
  const Type* type = nullptr;
  Sizes sizes, strides;
  std::shared_ptr<const void> memory;   // where the first element lies

  // Dense; the values are zeros.
  static Tensor zeros(const Type& type, Sizes sizes);
  // Dense, over bytes of a file; `owner` keeps them.
  static Tensor over(const Type& type, Sizes sizes, Bytes bytes, const std::shared_ptr<const void>& owner);
  template <typename Number>
  static Tensor of(const std::string& type, Sizes sizes, const std::vector<Number>& values);

  int64_t count() const { return count_of(sizes); }
  bool is_dense() const;
  // The same values one after another; itself where it is dense.
  Tensor dense() const;
  const void* data() const { return memory.get(); }
  // For filling one that is yours alone.
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
