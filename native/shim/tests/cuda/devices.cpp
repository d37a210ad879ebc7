// tinygemm's product on CUDA refuses tensors that lie on several devices. It does so before it launches anything, so that
// no device is needed here.
#include "../shim_test.h"

namespace {

AtenTensorOpaque self = host::tensor({3, 256}, host::bf16), mat2 = host::tensor({2, 4, 32, 2}, host::i32),
                 pairs = host::tensor({4, 16, 2}, host::bf16);
const AtenTensorOpaque* elsewhere = nullptr;

}  // namespace

extern "C" {
int32_t aoti_torch_device_type_cuda() { return host::kElsewhere; }
int32_t aoti_torch_get_device_index(AtenTensorHandle t, int32_t* index) { return *index = t == elsewhere, 0; }
int32_t aoti_torch_get_current_cuda_stream(int32_t, void** stream) { return *stream = nullptr, 0; }
}

int main() {
  for (AtenTensorOpaque* each : {&self, &mat2, &pairs}) each->device = host::kElsewhere;
  for (AtenTensorOpaque* each : {&self, &mat2, &pairs}) {
    elsewhere = each;
    AtenTensorHandle y = nullptr;
    const AOTITorchError code = aoti_torch_cuda__weight_int4pack_mm(&self, &mat2, 64, &pairs, &y);
    expect_refused("two devices", code, y, nullptr, "different devices");
  }
  std::printf("%lld cases: no fault\n", cases);
}
