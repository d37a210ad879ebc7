// What stands in a tensor: read as float64, filled, compared.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include "tensor.h"

namespace bitport::runner {

// Element i of a dense tensor; none for types that are compared by their bits only.
std::optional<double> value_at(const Tensor& dense, int64_t i);

// Floats from a normal distribution, the same ones for a seed; whole numbers (indexes, as a rule) and the rest are zeros.
Tensor random_tensor(const Type& type, const Sizes& sizes, uint64_t seed);
// A dense copy in memory of its own, which may be written.
Tensor copy_of(const Tensor& tensor);

struct Difference {
  double worst = 0;       // the largest |got - want|
  int64_t beyond = 0;     // elements with |got - want| > absolute + relative * |want|
  bool alike = true;      // type and sizes are the same
  bool ok() const { return alike && !beyond; }
};

// NaN is what NaN is wanted for, whichever it is, and -0 is 0; all else is bit for bit with both tolerances 0.
Difference compare(const Tensor& got, const Tensor& want, double relative, double absolute);

}  // namespace bitport::runner
