// Files of named tensors in the safetensors format: inputs, outputs and weights.
//
//   u64 bytes of the header | header: {"name": {"dtype": .., "shape": [..], "data_offsets": [begin, end]}, ..} | data
//
// A header is rejected unless its tensors are within the data and have as many bytes as their shapes require.
#pragma once
#include <map>
#include <string>
#include "tensor.h"

namespace bitport::runner {

struct TensorFile {
  std::map<std::string, Tensor> tensors;
  std::map<std::string, std::string> metadata;
};

// The tensors share the bytes, which `owner` keeps alive.
TensorFile read_tensors(Bytes file, const std::shared_ptr<const void>& owner, const std::string& where);
// The same for a file, which is mapped.
TensorFile read_tensors(const std::string& path);
void write_tensors(const std::string& path, const std::map<std::string, Tensor>& tensors);

}  // namespace bitport::runner
