#include "numbers.h"
#include <algorithm>
#include <cmath>
#include <random>
#include "../kernels/number.h"

namespace bitport::runner {
namespace {

template <typename Number>
Number at(const Tensor& dense, int64_t i) {
  Number value;
  std::memcpy(&value, static_cast<const char*>(dense.data()) + i * int64_t(sizeof value), sizeof value);
  return value;
}

bool is(const Tensor& tensor, const char* name) { return !std::strcmp(tensor.type->name, name); }

}  // namespace

std::optional<double> value_at(const Tensor& dense, int64_t i) {
  if (is(dense, "BF16")) return float_of_bf16(at<uint16_t>(dense, i));
  if (is(dense, "F32")) return at<float>(dense, i);
  if (is(dense, "F16")) return float_of_f16(at<uint16_t>(dense, i));
  if (is(dense, "F64")) return at<double>(dense, i);
  if (is(dense, "I64")) return double(at<int64_t>(dense, i));
  if (is(dense, "I32")) return at<int32_t>(dense, i);
  if (is(dense, "I16")) return at<int16_t>(dense, i);
  if (is(dense, "I8")) return at<int8_t>(dense, i);
  if (is(dense, "U8") || is(dense, "BOOL")) return at<uint8_t>(dense, i);
  return std::nullopt;
}

Tensor random_tensor(const Type& type, const Sizes& sizes, uint64_t seed) {
  Tensor made = Tensor::zeros(type, sizes);
  std::mt19937_64 generator(seed);
  std::normal_distribution<double> normal;
  auto* const data = static_cast<char*>(made.mutable_data());
  const auto fill = [&](auto convert) {
    for (int64_t i = 0, count = made.count(); i < count; ++i) {
      const auto value = convert(normal(generator));
      std::memcpy(data + i * int64_t(sizeof value), &value, sizeof value);
    }
  };
  if (is(made, "BF16")) fill([](double x) { return bf16_of_float(float(x)); });
  if (is(made, "F16")) fill([](double x) { return f16_of_float(float(x)); });
  if (is(made, "F32")) fill([](double x) { return float(x); });
  if (is(made, "F64")) fill([](double x) { return x; });
  return made;
}

Tensor copy_of(const Tensor& tensor) {
  Tensor made = Tensor::zeros(*tensor.type, tensor.sizes);
  std::memcpy(made.mutable_data(), tensor.dense().data(), size_t(tensor.count() * tensor.type->bytes));
  return made;
}

Difference compare(const Tensor& got, const Tensor& want, double relative, double absolute) {
  Difference found;
  found.alike = got.type == want.type && got.sizes == want.sizes;
  if (!found.alike) return found;
  const Tensor mine = got.dense(), theirs = want.dense();
  const bool floats = is(got, "BF16") || is(got, "F32") || is(got, "F16") || is(got, "F64");
  const bool exact = relative == 0 && absolute == 0 && !floats;   // distinct integers may be equal as float64
  const auto bytes = size_t(mine.type->bytes);
  for (int64_t i = 0, count = mine.count(); i < count; ++i) {
    const auto place = size_t(i) * bytes;
    if (!std::memcmp(static_cast<const char*>(mine.data()) + place, static_cast<const char*>(theirs.data()) + place, bytes)) continue;
    const auto x = value_at(mine, i), y = value_at(theirs, i);
    if (x && y && std::isnan(*x) && std::isnan(*y)) continue;
    const double difference = x && y ? std::fabs(*x - *y) : INFINITY;
    if (std::isnan(difference) || exact || !(difference <= absolute + relative * std::fabs(*y))) ++found.beyond;
    found.worst = std::isnan(difference) ? INFINITY : std::max(found.worst, difference);
  }
  return found;
}

}  // namespace bitport::runner
