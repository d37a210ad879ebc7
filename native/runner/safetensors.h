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

using Tensors = std::map<std::string, Tensor>;

// The tensors share the bytes, which `owner` keeps alive. Metadata are skipped.
Tensors read_tensors(Bytes file, const std::shared_ptr<const void>& owner, const std::string& where);
// The same for a file, which is mapped.
Tensors read_tensors(const std::string& path);
void write_tensors(const std::string& path, const Tensors& tensors);

}  // namespace bitport::runner
