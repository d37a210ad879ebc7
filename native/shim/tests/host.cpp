#include "host.h"
#include <stdexcept>

using namespace host;

namespace host {

Faults faults;
int64_t alive = 0;

int64_t width(int32_t dtype) {
  switch (dtype) {
    case u8: case e4m3: case e8m0: case boolean: return 1;
    case bf16: case f16: return 2;
    case i64: return 8;
    default: return 4;
  }
}

AtenTensorOpaque tensor(std::vector<int64_t> sizes, int32_t dtype) {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  AtenTensorOpaque made;
  made.strides.assign(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) made.strides[i - 1] = int64_t(uint64_t(made.strides[i]) * uint64_t(sizes[i]));
  made.sizes = std::move(sizes);
  made.dtype = dtype;
  made.device = kCpu;
  made.bytes.assign(size_t(count * width(dtype)), 0);
  return made;
}

}  // namespace host

extern "C" {

int32_t aoti_torch_get_dim(AtenTensorHandle t, int64_t* result) { *result = int64_t(t->sizes.size()); return 0; }
int32_t aoti_torch_get_sizes(AtenTensorHandle t, int64_t** result) { *result = t->sizes.data(); return 0; }
int32_t aoti_torch_get_strides(AtenTensorHandle t, int64_t** result) { *result = t->strides.data(); return 0; }
int32_t aoti_torch_get_dtype(AtenTensorHandle t, int32_t* result) { *result = t->dtype; return 0; }
int32_t aoti_torch_get_device_type(AtenTensorHandle t, int32_t* result) { *result = t->device; return 0; }
int32_t aoti_torch_is_contiguous(AtenTensorHandle t, bool* result) { *result = t->contiguous; return 0; }
int32_t torch_get_const_data_ptr(AtenTensorHandle t, const void** result) { *result = t->bytes.data(); return 0; }
int32_t torch_get_mutable_data_ptr(AtenTensorHandle t, void** result) { *result = t->bytes.data(); return 0; }

int32_t aoti_torch_empty_strided(int64_t dim, const int64_t* sizes, const int64_t*, int32_t dtype, int32_t, int32_t,
                                 AtenTensorHandle* result) {
  if (faults.no_memory) return 1;
  *result = new AtenTensorOpaque(tensor({sizes, sizes + dim}, dtype));
  ++alive;
  return 0;
}

int32_t aoti_torch_delete_tensor_object(AtenTensorHandle t) {
  delete t;
  --alive;
  return 0;
}

int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t, void (*body)(int64_t, int64_t, void*), void* context) {
  if (faults.throws) throw std::runtime_error("no threads today");
  body(begin, (begin + end) / 2, context);
  body((begin + end) / 2, end, context);
  return 0;
}

int32_t torch_get_num_threads(uint32_t* result) { *result = 2; return 0; }
int32_t aoti_torch_device_type_cpu() { return kCpu; }
int32_t aoti_torch_dtype_float32() { return f32; }
int32_t aoti_torch_dtype_bfloat16() { return bf16; }
int32_t aoti_torch_dtype_float16() { return f16; }
int32_t aoti_torch_dtype_uint8() { return u8; }
int32_t aoti_torch_dtype_int32() { return i32; }
int32_t aoti_torch_dtype_int64() { return i64; }
int32_t aoti_torch_dtype_bool() { return boolean; }
int32_t aoti_torch_dtype_float8_e4m3fn() { return e4m3; }
int32_t torch_dtype_float8_e8m0fnu() { return e8m0; }

}  // extern "C"
