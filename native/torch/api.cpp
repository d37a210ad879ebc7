#include "api.h"
#include <dlfcn.h>
#include "../kernels/bitport_kernels.h"

namespace bitport {

Api torch;

const char* Api::load(const char* libtorch_cpu) {
  void* library = dlopen(libtorch_cpu, RTLD_NOW | RTLD_NOLOAD);
  if (!library) return "libtorch_cpu is not loaded in this process from the path given";
#define BITPORT_FIND(name, result, arguments) \
  name = reinterpret_cast<result(*) arguments>(dlsym(library, #name));
#define BITPORT_NEED(name, result, arguments) \
  BITPORT_FIND(name, result, arguments) \
  if (!name) return "this torch has no " #name ": torch 2.11 or later has it";
  BITPORT_TORCH_FUNCTIONS(BITPORT_NEED)
  BITPORT_TORCH_NEWER_FUNCTIONS(BITPORT_FIND)
#undef BITPORT_NEED
#undef BITPORT_FIND
  cpu = aoti_torch_device_type_cpu();
  dtypes[BITPORT_F32] = aoti_torch_dtype_float32();
  dtypes[BITPORT_BF16] = aoti_torch_dtype_bfloat16();
  dtypes[BITPORT_F16] = aoti_torch_dtype_float16();
  dtypes[BITPORT_U8] = aoti_torch_dtype_uint8();
  dtypes[BITPORT_E8M0] = torch_dtype_float8_e8m0fnu();
  dtypes[BITPORT_E4M3] = aoti_torch_dtype_float8_e4m3fn();
  int32 = aoti_torch_dtype_int32();
  int64 = aoti_torch_dtype_int64();
  return nullptr;
}

int32_t Api::type_of(int32_t dtype) const {
  for (int32_t type = BITPORT_F32; type <= BITPORT_E4M3; ++type)
    if (dtypes[type] == dtype) return type;
  return -1;
}

}  // namespace bitport
