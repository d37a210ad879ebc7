// What FakeTensorMode lacks to move, slice and copy tensors of a device that PyTorch was built without: somebody who
// says which device is current. KIND is XPU, CUDA or MPS. No memory, no kernels.
#include <c10/core/impl/DeviceGuardImplInterface.h>

constexpr auto kKind = c10::DeviceType::KIND;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kKind> {
  c10::Device getDevice() const override { return c10::Device(kKind, 0); }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

static const c10::impl::DeviceGuardImplRegistrar registered(kKind, new Guard());
