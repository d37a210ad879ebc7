// Elements of tensors: reading as float64, filling, comparing.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include "tensor.h"

namespace bitport::runner {

// Element i of a contiguous tensor; empty for types that are only compared bitwise.
std::optional<double> value_at(const Tensor& dense, int64_t i);

// Floats from a normal distribution, determined by the seed; integers (usually indices) and other types are zeros.
Tensor random_tensor(const Type& type, const Sizes& sizes, uint64_t seed);
// A contiguous, writable copy.
Tensor copy_of(const Tensor& tensor);

struct Difference {
  double worst = 0;       // the largest |got - want|
  int64_t beyond = 0;     // elements with |got - want| > absolute + relative * |want|
  bool alike = true;      // type and sizes are the same
  bool ok() const { return alike && !beyond; }
};

// NaN matches any NaN, and -0 matches 0; with both tolerances 0 everything else must match exactly.
Difference compare(const Tensor& got, const Tensor& want, double relative, double absolute);

}  // namespace bitport::runner
