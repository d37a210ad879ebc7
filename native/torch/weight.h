// A weight in layout cpu_tiles, as the kernels read it.
#pragma once
#include "names.h"
#include "tensors.h"
#include "../kernels/bitport_kernels.h"

namespace bitport {

// What an op says of a weight; zero and scale2 may be null.
struct Parts {
  TensorHandle data = nullptr, scale = nullptr, zero = nullptr, scale2 = nullptr;
  NumberType number;
  int64_t n = 0, k = 0, group = 0;
};

// One weight, or `experts` of them one after another (-1: a single one without that dimension).
struct Weight {
  BitportTiles tiles{};
  int64_t experts = -1;
  bool dense = false;
  int64_t most_rows = 0;   // for which `linear` takes it

  // Null, or why it is not exactly such a weight: sizes may come from a file, and nothing is read that was not measured
  // here.
  const char* read(const Parts& given, bool batched);
  // The same of a weight for lookups, whose rows may lie dense (bitport_dense_rows): then its data are a matrix.
  const char* read_rows(const Parts& given);

  BitportTiles expert(int64_t at) const;

 private:
  const char* read(const Parts& given, bool batched, bool as_rows);
  int64_t code_bytes_ = 0, scale_bytes_ = 0, zero_bytes_ = 0;   // of one expert
};

}  // namespace bitport
