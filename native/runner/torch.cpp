#include "torch.h"
#include <dlfcn.h>

namespace bitport::runner {
namespace {

void* symbol(void* library, const std::string& name, const std::string& where) {
  void* const found = dlsym(library, name.c_str());
  if (!found) fail(where, ": ", name, " is missing; torch 2.11 or later is needed");
  return found;
}

void want(int32_t code, const char* doing) {
  if (code) fail("torch failed to ", doing);
}

}  // namespace

#define BITPORT_RUNNER_FIND(name, result, arguments) name = reinterpret_cast<result(*) arguments>(symbol(library, #name, where));

Torch::Torch(const std::string& folder) {
  const std::string where = (folder.empty() ? "" : folder + "/") + "libtorch_cpu.so";
  void* const library = dlopen(where.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (!library) fail("torch's library cannot be loaded: ", dlerror(), "; give its folder with --torch or LD_LIBRARY_PATH");
  BITPORT_RUNNER_TORCH(BITPORT_RUNNER_FIND)
  for (const Type& type : types()) {
    const auto number = reinterpret_cast<int32_t (*)()>(dlsym(library, (std::string("aoti_torch_dtype_") + type.torch).c_str()));
    dtypes_.push_back(number ? number() : -1);
  }
}

const Torch& Torch::loaded(const std::string& folder) {
  static const Torch torch(folder);
  return torch;
}

int32_t Torch::dtype_of(const Type& type) const {
  const int32_t found = dtypes_[size_t(&type - types().data())];
  if (found < 0) fail("this torch knows no ", type.torch);
  return found;
}

TensorHandle Torch::handle_of(const Tensor& tensor) const {
  TensorHandle made = nullptr;
  want(aoti_torch_create_tensor_from_blob_v2(const_cast<void*>(tensor.data()), int64_t(tensor.sizes.size()), tensor.sizes.data(),
                                             tensor.strides.data(), 0, dtype_of(*tensor.type), aoti_torch_device_type_cpu(), 0,
                                             &made, aoti_torch_layout_strided(), nullptr, 0),
       "make a tensor");
  return made;
}

Tensor Torch::tensor_of(TensorHandle handle) const {
  const std::shared_ptr<void> owner(handle, [this](void* mine) { aoti_torch_delete_tensor_object(static_cast<TensorHandle>(mine)); });
  int64_t dim = 0, *sizes = nullptr, *strides = nullptr;
  int32_t dtype = 0, device = 0;
  void* data = nullptr;
  want(aoti_torch_get_dim(handle, &dim) || aoti_torch_get_sizes(handle, &sizes) || aoti_torch_get_strides(handle, &strides) ||
           aoti_torch_get_dtype(handle, &dtype) || aoti_torch_get_device_type(handle, &device) ||
           aoti_torch_get_data_ptr(handle, &data),
       "describe a tensor");
  if (device != aoti_torch_device_type_cpu()) fail("a result is not in the memory of the CPU");
  for (size_t i = 0; i < dtypes_.size(); ++i)
    if (dtypes_[i] == dtype) return {&types()[i], {sizes, sizes + dim}, {strides, strides + dim}, {owner, data}};
  fail("a result has a type of number that is not known here");
}

Code::Code(void* library, const std::string& where) {
  BITPORT_RUNNER_CODE(BITPORT_RUNNER_FIND)
}

void Code::check(int32_t code, const std::string& doing) const {
  if (!code) return;
  const char* reason = nullptr;
  AOTInductorGetLastError(&reason);
  fail(doing, ": ", reason && *reason ? reason : "failed without a reason");
}

}  // namespace bitport::runner
