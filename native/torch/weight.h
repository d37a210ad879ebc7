// A weight in layout cpu_tiles, as the kernels read it.
#pragma once
#include "names.h"
#include "tensors.h"
#include "../kernels/bitport_kernels.h"

namespace bitport {

// The arguments of an op that describe a weight; zero and scale2 may be null.
struct Parts {
  TensorHandle data = nullptr, scale = nullptr, zero = nullptr, scale2 = nullptr;
  NumberType number;
  int64_t n = 0, k = 0, group = 0;
};

// One weight, or `experts` contiguous ones (-1: a single one without that dimension).
struct Weight {
  BitportTiles tiles{};
  int64_t experts = -1;
  bool dense = false;
  int64_t most_rows = 0;   // for which `linear` takes it

  // Returns null, or why this is not exactly such a weight: sizes may come from a file, so nothing is read beyond what
  // was validated here.
  const char* read(const Parts& given, bool batched);
  // The same for a weight to look up, whose rows may be dense (bitport_dense_rows): its data are then a matrix.
  const char* read_rows(const Parts& given);

  BitportTiles expert(int64_t at) const;

 private:
  const char* read(const Parts& given, bool batched, bool as_rows);
  int64_t code_bytes_ = 0, scale_bytes_ = 0, zero_bytes_ = 0;   // per expert
};

}  // namespace bitport
