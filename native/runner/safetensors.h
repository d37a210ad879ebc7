// Files of named tensors, in the safetensors format: inputs, outputs and weights.
//
//   u64 bytes of the header | header: {"name": {"dtype": .., "shape": [..], "data_offsets": [begin, end]}, ..} | data
//
// A header is believed only where its tensors lie within the data and have as many bytes as their shape takes.
#pragma once
#include <map>
#include <string>
#include "tensor.h"

namespace bitport::runner {

struct TensorFile {
  std::map<std::string, Tensor> tensors;
  std::map<std::string, std::string> metadata;
};

// Tensors share the bytes, which `owner` keeps.
TensorFile read_tensors(Bytes file, const std::shared_ptr<const void>& owner, const std::string& where);
// The same of a file, mapped.
TensorFile read_tensors(const std::string& path);
void write_tensors(const std::string& path, const std::map<std::string, Tensor>& tensors);

}  // namespace bitport::runner
