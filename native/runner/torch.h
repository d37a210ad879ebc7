// The C functions used from libtorch_cpu, and from a library made by AOTInductor, looked up by name when a method is
// loaded. Signatures as in torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/inductor/aoti_runtime/interface.h; no
// torch headers are needed, and one binary works with torch 2.11 and later.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include "tensor.h"

namespace bitport::runner {

using TensorHandle = struct TensorOpaque*;
using Container = struct ContainerOpaque*;
struct NamedHandle { const char* name; TensorHandle handle; };

// F(name, result, arguments); an int32_t result that is not a dtype or device is 0 for success.
#define BITPORT_RUNNER_TORCH(F) \
  F(aoti_torch_device_type_cpu, int32_t, ()) \
  F(aoti_torch_layout_strided, int32_t, ()) \
  F(aoti_torch_create_tensor_from_blob_v2, int32_t, \
    (void* data, int64_t dim, const int64_t* sizes, const int64_t* strides, int64_t offset, int32_t dtype, int32_t device, \
     int32_t index, TensorHandle*, int32_t layout, const uint8_t* metadata, int64_t metadata_bytes)) \
  F(aoti_torch_delete_tensor_object, int32_t, (TensorHandle)) \
  F(aoti_torch_get_dim, int32_t, (TensorHandle, int64_t*)) \
  F(aoti_torch_get_sizes, int32_t, (TensorHandle, int64_t**)) \
  F(aoti_torch_get_strides, int32_t, (TensorHandle, int64_t**)) \
  F(aoti_torch_get_dtype, int32_t, (TensorHandle, int32_t*)) \
  F(aoti_torch_get_device_type, int32_t, (TensorHandle, int32_t*)) \
  F(aoti_torch_get_data_ptr, int32_t, (TensorHandle, void**))

#define BITPORT_RUNNER_CODE(F) \
  F(AOTInductorModelContainerCreateWithDevice, int32_t, (Container*, size_t models, const char* device, const char* folder)) \
  F(AOTInductorModelContainerDelete, int32_t, (Container)) \
  F(AOTInductorModelContainerRun, int32_t, \
    (Container, TensorHandle* inputs, size_t, TensorHandle* outputs, size_t, void* stream, void* executor)) \
  F(AOTInductorModelContainerGetNumInputs, int32_t, (Container, size_t*)) \
  F(AOTInductorModelContainerGetNumOutputs, int32_t, (Container, size_t*)) \
  F(AOTInductorModelContainerGetNumConstants, int32_t, (Container, size_t*)) \
  F(AOTInductorModelContainerGetConstantName, int32_t, (Container, size_t, const char**)) \
  F(AOTInductorModelContainerGetConstantOriginalFQN, int32_t, (Container, size_t, const char**)) \
  F(AOTInductorModelContainerGetConstantFromFolded, int32_t, (Container, size_t, bool*)) \
  F(AOTInductorModelContainerGetConstantDtype, int32_t, (Container, size_t, int32_t*)) \
  F(AOTInductorModelContainerGetConstantDataSize, int32_t, (Container, size_t, size_t*)) \
  F(AOTInductorModelContainerUpdateUserManagedConstantBufferPairs, int32_t, \
    (Container, const NamedHandle*, size_t, bool inactive, bool all)) \
  F(AOTInductorGetLastError, int32_t, (const char**))

#define BITPORT_RUNNER_DECLARE(name, result, arguments) result(*name) arguments = nullptr;

struct Torch {
  BITPORT_RUNNER_TORCH(BITPORT_RUNNER_DECLARE)

  // The instance of this process; the first call loads it from `folder` or from the search path of the dynamic loader.
  static const Torch& loaded(const std::string& folder = "");

  int32_t dtype_of(const Type& type) const;
  // A tensor over this memory, which must outlive it; the caller owns the handle.
  TensorHandle handle_of(const Tensor& tensor) const;
  // Converts a handle to a Tensor, which takes ownership of it.
  Tensor tensor_of(TensorHandle handle) const;

 private:
  explicit Torch(const std::string& folder);
  std::vector<int32_t> dtypes_;   // by index in types()
};

struct Code {
  BITPORT_RUNNER_CODE(BITPORT_RUNNER_DECLARE)

  // Looks up the functions in a library opened by dlopen.
  explicit Code(void* library, const std::string& where);
  // Throws with the library's message for its last failure, unless code is 0.
  void check(int32_t code, const std::string& doing) const;
};

}  // namespace bitport::runner
