// The code of a method that computes nothing, in the form of AOTInductor's:
//   INPUTS    how many it takes
//   OUTPUTS   the dtypes of what it gives, between commas: each [1, 4], of the bytes of the constant if there is one
//   CONSTANTS 1: it has the constant w, float32 [4]
//   REFUSES   1: a run fails before it takes its inputs, as where AOTI_RUNTIME_CHECK_INPUTS finds that they are wrong
#include <cstddef>
#include <cstdint>

using Handle = struct TensorOpaque*;
using Container = struct ContainerOpaque*;
struct Named { const char* name; Handle handle; };

extern "C" {

int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float8_e4m3fn();
int32_t aoti_torch_get_data_ptr(Handle, void**);
int32_t aoti_torch_delete_tensor_object(Handle);
int32_t aoti_torch_create_tensor_from_blob_v2(void*, int64_t, const int64_t*, const int64_t*, int64_t, int32_t, int32_t, int32_t,
                                              Handle*, int32_t, const uint8_t*, int64_t);

alignas(8) static char zeros[32];
static void* constant = zeros;

int32_t AOTInductorModelContainerCreateWithDevice(Container*, size_t, const char*, const char*) { return 0; }
int32_t AOTInductorModelContainerDelete(Container) { return 0; }
int32_t AOTInductorModelContainerGetNumInputs(Container, size_t* count) { return *count = INPUTS, 0; }
int32_t AOTInductorModelContainerGetNumOutputs(Container, size_t* count) {
  const int32_t dtypes[] = {OUTPUTS};
  return *count = sizeof dtypes / sizeof *dtypes, 0;
}
int32_t AOTInductorModelContainerGetNumConstants(Container, size_t* count) { return *count = CONSTANTS, 0; }
int32_t AOTInductorModelContainerGetConstantName(Container, size_t, const char** name) { return *name = "w", 0; }
int32_t AOTInductorModelContainerGetConstantOriginalFQN(Container, size_t, const char** name) { return *name = "w", 0; }
int32_t AOTInductorModelContainerGetConstantFromFolded(Container, size_t, bool* folded) { return *folded = false, 0; }
int32_t AOTInductorModelContainerGetConstantDtype(Container, size_t, int32_t* dtype) {
  return *dtype = aoti_torch_dtype_float32(), 0;
}
int32_t AOTInductorModelContainerGetConstantDataSize(Container, size_t, size_t* bytes) { return *bytes = 16, 0; }
int32_t AOTInductorModelContainerUpdateUserManagedConstantBufferPairs(Container, const Named* pairs, size_t count, bool, bool) {
  return count ? aoti_torch_get_data_ptr(pairs->handle, &constant) : 0;
}
int32_t AOTInductorGetLastError(const char** text) { return *text = "the inputs are wrong", 0; }

int32_t AOTInductorModelContainerRun(Container, Handle* inputs, size_t count, Handle* outputs, size_t, void*, void*) {
  if (REFUSES) return 1;
  for (size_t i = 0; i < count; ++i) {
    aoti_torch_delete_tensor_object(inputs[i]);
    inputs[i] = nullptr;
  }
  const int64_t sizes[] = {1, 4}, strides[] = {4, 1};
  const int32_t dtypes[] = {OUTPUTS};
  for (const int32_t dtype : dtypes)
    if (aoti_torch_create_tensor_from_blob_v2(constant, 2, sizes, strides, 0, dtype, 0, 0, outputs++, 0, nullptr, 0)) return 1;
  return 0;
}

}  // extern "C"
