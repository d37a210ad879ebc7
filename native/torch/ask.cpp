#include "api.h"
#include "../kernels/bitport_kernels.h"

namespace bitport {

Api torch;

void Api::ask() {
  device = aoti_torch_device_type_cpu();
  dtypes[BITPORT_F32] = aoti_torch_dtype_float32();
  dtypes[BITPORT_BF16] = aoti_torch_dtype_bfloat16();
  dtypes[BITPORT_F16] = aoti_torch_dtype_float16();
  dtypes[BITPORT_U8] = aoti_torch_dtype_uint8();
  dtypes[BITPORT_E8M0] = torch_dtype_float8_e8m0fnu();
  dtypes[BITPORT_E4M3] = aoti_torch_dtype_float8_e4m3fn();
  int32 = aoti_torch_dtype_int32();
  int64 = aoti_torch_dtype_int64();
  boolean = aoti_torch_dtype_bool();
}

}  // namespace bitport
