#include "tensor.h"
#include <cstdlib>
#include <limits>

namespace bitport::runner {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kMostDims = 16;

std::shared_ptr<void> memory_of(int64_t bytes) {
  const size_t whole = (size_t(bytes) / kAlignment + 1) * kAlignment;
  void* const made = std::aligned_alloc(kAlignment, whole);
  if (!made) fail("no memory for ", bytes, " bytes");
  std::memset(made, 0, whole);
  return {made, std::free};
}

}  // namespace

const std::vector<Type>& types() {
  static const std::vector<Type> kTypes = {
      {"F64", "float64", 8},  {"F32", "float32", 4},  {"F16", "float16", 2}, {"BF16", "bfloat16", 2},
      {"I64", "int64", 8},    {"I32", "int32", 4},    {"I16", "int16", 2},   {"I8", "int8", 1},
      {"U8", "uint8", 1},     {"BOOL", "bool", 1},    {"F8_E4M3", "float8_e4m3fn", 1},
      {"F8_E5M2", "float8_e5m2", 1}, {"F8_E8M0", "float8_e8m0fnu", 1}};
  return kTypes;
}

const Type& type_of(const std::string& name) {
  for (const Type& type : types())
    if (name == type.name || name == type.torch) return type;
  fail("unknown type '", name, "'; known: ", joined(types(), [](const Type& type) { return type.name; }));
}

int64_t count_of(const Sizes& sizes, int64_t element_bytes) {
  if (sizes.size() > kMostDims) fail("a tensor of ", sizes.size(), " dimensions; at most ", kMostDims, " are allowed");
  int64_t bytes = element_bytes;   // also limits the product of sizes beside a zero, since strides are such products
  bool none = false;
  for (const int64_t size : sizes) {
    if (size < 0) fail("a tensor of ", size, " elements along a dimension");
    none |= size == 0;
    if (size && __builtin_mul_overflow(bytes, size, &bytes)) fail("a tensor larger than any memory");
  }
  return none ? 0 : bytes / element_bytes;
}

std::string text_of(const Type& type, const Sizes& sizes) {
  return std::string(type.name) + "[" + joined(sizes, [](int64_t size) { return std::to_string(size); }) + "]";
}

Sizes dense_strides(const Sizes& sizes) {
  Sizes strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  return strides;
}

Tensor Tensor::zeros(const Type& type, Sizes sizes) {
  const int64_t bytes = count_of(sizes, type.bytes) * type.bytes;
  Sizes strides = dense_strides(sizes);
  return {&type, std::move(sizes), std::move(strides), memory_of(bytes)};
}

Tensor Tensor::over(const Type& type, Sizes sizes, Bytes bytes, const std::shared_ptr<const void>& owner) {
  const int64_t wanted = count_of(sizes, type.bytes) * type.bytes;
  if (uint64_t(wanted) != bytes.size) fail(text_of(type, sizes), " takes ", wanted, " bytes, not ", bytes.size);
  Sizes strides = dense_strides(sizes);
  return {&type, std::move(sizes), std::move(strides), std::shared_ptr<const void>(owner, bytes.data)};
}

bool Tensor::is_dense() const {
  const Sizes wanted = dense_strides(sizes);
  for (size_t i = 0; i < sizes.size(); ++i)
    if (sizes[i] != 1 && strides[i] != wanted[i]) return count() == 0;
  return true;
}

bool Tensor::is_aligned() const { return reinterpret_cast<uintptr_t>(data()) % uintptr_t(type->bytes) == 0; }

Tensor Tensor::dense() const {
  if (is_dense()) return *this;
  Tensor made = zeros(*type, sizes);
  auto* to = static_cast<uint8_t*>(made.mutable_data());
  const auto* from = static_cast<const uint8_t*>(data());
  Sizes at(sizes.size(), 0);
  for (int64_t i = 0, left = count(); i < left; ++i, to += type->bytes) {
    int64_t offset = 0;
    for (size_t d = 0; d < at.size(); ++d) offset += at[d] * strides[d];
    std::memcpy(to, from + offset * type->bytes, size_t(type->bytes));
    for (size_t d = at.size(); d-- > 0;) {   // the next position, the last dimension fastest
      if (++at[d] < sizes[d]) break;
      at[d] = 0;
    }
  }
  return made;
}

}  // namespace bitport::runner
