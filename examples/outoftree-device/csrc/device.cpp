// The minimum that a device needs for PyTorch to hold tensors on it: memory, a current device, and the handful of aten
// ops that create, view and copy tensors. Everything else falls back to the CPU, with a count, or fails if that is
// switched off. None of this concerns bitport: a vendor has it already.
#include "host.h"

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <utility>

namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;
DeviceIndex current = 0;

// -- which device is current ------------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  Device getDevice() const override { return Device(kSim, current); }
  void setDevice(Device device) const override {
    if (device.index() >= 0) current = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override { setDevice(device); }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Stream getStream(Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void synchronizeDevice(DeviceIndex) const override {}  // all calls are synchronous
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// -- memory -----------------------------------------------------------------------------------------------------------

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* block = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    TORCH_CHECK(block || !bytes, "sim: no memory for ", bytes, " bytes");
    return {block, block, &std::free, Device(kSim, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(kSim, &memory)

void resize_storage(const c10::Storage& storage, size_t bytes) {
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr block = memory.allocate(bytes);
  if (const size_t keep = std::min(bytes, storage.nbytes())) std::memcpy(block.get(), storage.data(), keep);
  auto* target = storage.unsafeGetStorageImpl();
  target->set_data_ptr_noswap(std::move(block));
  target->set_nbytes(bytes);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(current, index); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  bool isPinnedPtr(const void*) const override { return false; }
  Device getDeviceFromPtr(void*) const override { return Device(kSim, current); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};
const bool hooked = [] { return at::RegisterPrivateUse1HooksInterface(new Hooks()), true; }();

// -- tensors ----------------------------------------------------------------------------------------------------------

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor empty(IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(sizes, &memory, kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, &memory, kKeys, c10::dtype_or_default(dtype));
}

const Tensor& resize_to(const Tensor& self, IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  const size_t bytes = at::detail::computeStorageNbytesContiguous(sizes, self.itemsize(), self.storage_offset());
  if (self.storage().nbytes() < bytes) resize_storage(self.storage(), bytes);
  impl->set_sizes_contiguous(sizes);
  return self;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  sim::host(to).copy_(sim::host(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) resize_to(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar item(const Tensor& self) { return sim::host(self).item(); }

Tensor& set_storage(Tensor& self, c10::Storage source) {
  return at::cpu::set_(self, source, 0, {static_cast<int64_t>(source.nbytes() / self.itemsize())}, {1});
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_to);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("as_strided", TORCH_FN(at::cpu::as_strided));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset",
         [](Tensor& self, c10::Storage source, int64_t offset, IntArrayRef sizes, IntArrayRef strides) -> Tensor& {
           return at::cpu::set_(self, source, offset, sizes, strides);
         });
}

// -- everything else --------------------------------------------------------------------------------------------------

bool fallback_allowed = true;
std::map<std::string, int64_t> fallbacks;

void to_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string name = c10::toString(op.operator_name());
  TORCH_CHECK_NOT_IMPLEMENTED(fallback_allowed, "sim: no kernel for ", name, ", and the CPU fallback is switched off");
  ++fallbacks[name];
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&to_cpu>()); }

// Under torch.autocast no op of this device is cast, except that bitport casts inputs of quantized weights itself.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY(simdev, m) {
  m.def("allow_fallback(bool on) -> ()", [](bool on) { fallback_allowed = on; });
  m.def("reset() -> ()", [] {
    fallbacks.clear();
    sim::kernel_calls = sim::handed_back = 0;
  });
  m.def("device_count() -> int", [] { return static_cast<int64_t>(kDevices); });
  m.def("kernel_calls() -> int", [] { return sim::kernel_calls; });
  m.def("handed_back() -> int", [] { return sim::handed_back; });
  m.def("fallbacks() -> Dict(str, int)", [] {
    c10::Dict<std::string, int64_t> counted;
    for (const auto& [name, count] : fallbacks) counted.insert(name, count);
    return counted;
  });
}

}  // namespace
