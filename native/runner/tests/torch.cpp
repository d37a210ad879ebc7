// A stand-in for libtorch_cpu: tensors over memory of others. It knows no float8_e8m0fnu, refuses an address between two
// elements, and says at the end how many tensors were left behind.
#include <cstdint>
#include <cstdio>
#include <vector>

struct TensorOpaque {
  std::vector<int64_t> sizes, strides;
  int32_t dtype;
  void* data;
};
using Handle = TensorOpaque*;

namespace {

struct Count {
  long long alive = 0;
  ~Count() { if (alive) std::fprintf(stderr, "%lld tensors are left\n", alive); }
} tensors;

}  // namespace

extern "C" {

// Numbers that say how large an element is: bytes * 100 + one of its own.
#define DTYPE(name, number) int32_t aoti_torch_dtype_##name() { return number; }
DTYPE(float64, 800) DTYPE(int64, 801) DTYPE(float32, 400) DTYPE(int32, 401) DTYPE(float16, 200) DTYPE(bfloat16, 201)
DTYPE(int16, 202) DTYPE(int8, 100) DTYPE(uint8, 101) DTYPE(bool, 102) DTYPE(float8_e4m3fn, 103) DTYPE(float8_e5m2, 104)

int32_t aoti_torch_device_type_cpu() { return 0; }
int32_t aoti_torch_layout_strided() { return 0; }

int32_t aoti_torch_create_tensor_from_blob_v2(void* data, int64_t dim, const int64_t* sizes, const int64_t* strides, int64_t,
                                              int32_t dtype, int32_t, int32_t, Handle* made, int32_t, const uint8_t*, int64_t) {
  if (dtype >= 100 && reinterpret_cast<uintptr_t>(data) % uintptr_t(dtype / 100)) return 1;
  *made = new TensorOpaque{{sizes, sizes + dim}, {strides, strides + dim}, dtype, data};
  ++tensors.alive;
  return 0;
}

int32_t aoti_torch_delete_tensor_object(Handle tensor) {
  delete tensor;
  --tensors.alive;
  return 0;
}

int32_t aoti_torch_get_dim(Handle t, int64_t* dim) { return *dim = int64_t(t->sizes.size()), 0; }
int32_t aoti_torch_get_sizes(Handle t, int64_t** sizes) { return *sizes = t->sizes.data(), 0; }
int32_t aoti_torch_get_strides(Handle t, int64_t** strides) { return *strides = t->strides.data(), 0; }
int32_t aoti_torch_get_dtype(Handle t, int32_t* dtype) { return *dtype = t->dtype, 0; }
int32_t aoti_torch_get_device_type(Handle, int32_t* device) { return *device = 0, 0; }
int32_t aoti_torch_get_data_ptr(Handle t, void** data) { return *data = t->data, 0; }

}  // extern "C"
