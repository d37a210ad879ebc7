// The ten arguments by which every op takes a weight, as the kernels read it.
#pragma once
#include "arguments.h"
#include "../kernels/bitport_kernels.h"

namespace bitport {

struct NumberType {
  int32_t bits, integer;
  const float* table;
  int64_t most_rows[2] = {INT64_MAX, INT64_MAX};   // of x for which `linear` takes it: with groups, with one scale a row
};

const NumberType* number_type(std::string_view name);   // null: nobody named it
int32_t rounding(std::string_view name);                // BitportAct, or -1
int32_t activation(std::string_view name);              // BitportThen, or -1

// A weight in layout cpu_tiles, or `experts` of them one after another (-1: a single one without that dimension).
struct Weight {
  BitportTiles tiles{};
  int64_t experts = -1;
  int64_t most_rows = 0;   // for which `linear` takes it

  // Reads the arguments data .. layout. False for whatever is not exactly such a weight: sizes may come from a file,
  // and nothing is read that was not measured here.
  bool read(const Value* arguments, bool batched);

  BitportTiles expert(int64_t at) const;

 private:
  int64_t code_bytes_ = 0, scale_bytes_ = 0, zero_bytes_ = 0;   // of one expert
};

}  // namespace bitport
