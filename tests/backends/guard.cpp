// A device guard for a device that PyTorch was built without: FakeTensorMode needs one, which says which device is
// current, to move, slice and copy tensors. FAKE_DEVICE names the device: xpu, cuda or mps. No memory, no kernels.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>

template <c10::DeviceType kind>
struct Guard final : c10::impl::NoOpDeviceGuardImpl<kind> {
  c10::Device getDevice() const override { return c10::Device(kind, 0); }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

template <c10::DeviceType kind>
static bool stands_in(const char* name) {
  if (c10::DeviceTypeName(kind, /*lower_case=*/true) != name) return false;
  c10::impl::DeviceGuardImplRegistrar(kind, new Guard<kind>());
  return true;
}

static const bool registered = [] {
  const char* name = std::getenv("FAKE_DEVICE");
  using enum c10::DeviceType;
  return name && (stands_in<XPU>(name) || stands_in<CUDA>(name) || stands_in<MPS>(name));
}();
