// The functions used from torch's stable C API, looked up by name. Signatures as in
// torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/stable/c/shim.h of torch 2.10.
#pragma once
#include <cstddef>
#include <cstdint>

namespace bitport {

// One argument or result of a boxed kernel, 64 bits:
//   Tensor      an owned TensorHandle
//   int         the value
//   bool        0 or 1
//   float       the bits of a double
//   ScalarType  torch's number for it, as returned by the dtype functions
//   str         an owned StringHandle
//   T[]         an owned ListHandle
//   T?          null, or an owned pointer to a Value that holds T
// A kernel owns its arguments, and writes its results, owned by the caller, to the start of the same array.
using Value = uint64_t;
using TensorHandle = struct TensorOpaque*;
using StringHandle = struct StringOpaque*;
using ListHandle = struct ListOpaque*;
using LibraryHandle = struct LibraryOpaque*;
using Kernel = void (*)(Value* stack, uint64_t arguments, uint64_t results);
using Body = void (*)(int64_t begin, int64_t end, void* context);

// The version of these conventions: 2.10.
constexpr uint64_t kAbi = (uint64_t(2) << 56) | (uint64_t(10) << 48);

// F(name, result, arguments): functions for tensors, threads and dtypes. An int32_t result that is not a dtype or
// device is 0 for success.
#define BITPORT_TENSOR_FUNCTIONS(F) \
  F(aoti_torch_get_dim, int32_t, (TensorHandle, int64_t*)) \
  F(aoti_torch_get_sizes, int32_t, (TensorHandle, int64_t**)) \
  F(aoti_torch_get_strides, int32_t, (TensorHandle, int64_t**)) \
  F(aoti_torch_get_dtype, int32_t, (TensorHandle, int32_t*)) \
  F(aoti_torch_get_device_type, int32_t, (TensorHandle, int32_t*)) \
  F(aoti_torch_is_contiguous, int32_t, (TensorHandle, bool*)) \
  F(torch_get_const_data_ptr, int32_t, (TensorHandle, const void**)) \
  F(torch_get_mutable_data_ptr, int32_t, (TensorHandle, void**)) \
  F(aoti_torch_empty_strided, int32_t, \
    (int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device, int32_t index, \
     TensorHandle*)) \
  F(aoti_torch_delete_tensor_object, int32_t, (TensorHandle)) \
  F(torch_parallel_for, int32_t, (int64_t begin, int64_t end, int64_t grain, Body, void* context)) \
  F(torch_get_num_threads, int32_t, (uint32_t*)) \
  F(aoti_torch_device_type_cpu, int32_t, ()) \
  F(aoti_torch_dtype_float32, int32_t, ()) \
  F(aoti_torch_dtype_bfloat16, int32_t, ()) \
  F(aoti_torch_dtype_float16, int32_t, ()) \
  F(aoti_torch_dtype_uint8, int32_t, ()) \
  F(aoti_torch_dtype_int32, int32_t, ()) \
  F(aoti_torch_dtype_int64, int32_t, ()) \
  F(aoti_torch_dtype_bool, int32_t, ()) \
  F(aoti_torch_dtype_float8_e4m3fn, int32_t, ()) \
  F(torch_dtype_float8_e8m0fnu, int32_t, ())

// Additional functions for registration and what only kernels of registered ops need.
#define BITPORT_LIBRARY_FUNCTIONS(F) \
  F(aoti_torch_library_init_impl, int32_t, \
    (const char* ns, const char* key, const char* file, uint32_t line, LibraryHandle*)) \
  F(torch_library_impl, int32_t, (LibraryHandle, const char* op, Kernel, uint64_t abi)) \
  F(torch_call_dispatcher, int32_t, (const char* op, const char* overload, Value* stack, uint64_t abi)) \
  F(aoti_torch_check, void, (bool claim, const char* function, const char* file, uint32_t line, const char* text)) \
  F(torch_string_length, int32_t, (StringHandle, size_t*)) \
  F(torch_string_c_str, int32_t, (StringHandle, const char**)) \
  F(torch_delete_string, int32_t, (StringHandle)) \
  F(torch_new_list_reserve_size, int32_t, (size_t, ListHandle*)) \
  F(torch_list_push_back, int32_t, (ListHandle, Value))

// Functions of torch 2.13 and later, null before.
#define BITPORT_TORCH_NEWER_FUNCTIONS(F) \
  F(torch_delete_stable_ivalue, int32_t, (Value*)) \
  F(torch_exception_get_what_without_backtrace, const char*, ())

struct Api {
#define BITPORT_DECLARE(name, result, arguments) result(*name) arguments = nullptr;
  BITPORT_TENSOR_FUNCTIONS(BITPORT_DECLARE)
  BITPORT_LIBRARY_FUNCTIONS(BITPORT_DECLARE)
  BITPORT_TORCH_NEWER_FUNCTIONS(BITPORT_DECLARE)
#undef BITPORT_DECLARE
  int32_t device = -1;      // device type of accepted tensors: the CPU, unless a host sets another
  int32_t dtypes[6] = {};   // torch's dtypes by BitportType
  int32_t int32 = -1, int64 = -1, boolean = -1;

  const char* load(const char* libtorch_cpu);   // looks functions up by name in that library; null, or what is missing
  void link();                                  // sets the tensor functions as resolved by the linker (native/shim)
  void ask();                                   // queries the numbers above, once the functions are set

  // BitportType, or -1
  int32_t type_of(int32_t dtype) const {
    for (int32_t type = 0; type < int32_t(sizeof(dtypes) / sizeof(dtypes[0])); ++type)
      if (dtypes[type] == dtype) return type;
    return -1;
  }
};

extern Api torch;

}  // namespace bitport
