// The names that ops use for number types, roundings of x and functions after a product: defined once by Python, looked
// up in every call of a boxed kernel.
#pragma once
#include <cstdint>
#include <string_view>

namespace bitport {

struct NumberType {
  int32_t bits = 0, integer = 0;
  const float* table = nullptr;
  int64_t most_rows[2] = {INT64_MAX, INT64_MAX};   // of x for which `linear` takes it: with groups, with one scale per row
};

const NumberType* number_type(std::string_view name);   // null: unknown
int32_t rounding(std::string_view name);                // BitportAct, or -1
int32_t activation(std::string_view name);              // BitportThen, or -1

}  // namespace bitport
