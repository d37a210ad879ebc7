// tinygemm's product on CUDA: a warp per eight rows of the weight, a few rows of x at a time. Arguments are validated
// as on the CPU. The host provides torch's functions for tensors on the device. Compiled, but not yet run on one.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include "../contract.h"
#include "../error.h"

extern "C" {
int32_t aoti_torch_device_type_cuda();
int32_t aoti_torch_get_device_index(AtenTensorHandle, int32_t*);
int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream);
}

namespace bitport {
namespace {

constexpr int kRows = 4;            // rows of x per read of the weight
constexpr int64_t kBlocks = 65535;  // limit on the second dimension of a grid

// Lane t processes row 8 * tile + t / 4 and, for every word, columns c + (0, 8, 16, 24, 1, 9, 17, 25), one per nibble.
// They are in one group, since groups have at least 32 columns.
__global__ void multiply(const __nv_bfloat16* x, const int32_t* words, const __nv_bfloat162* pairs, __nv_bfloat16* y,
                         int64_t m, int64_t n, int64_t k, int64_t inner, int64_t group) {
  const int lane = threadIdx.x;
  const int64_t row = 8 * int64_t(blockIdx.x) + lane / 4, first = kRows * int64_t(blockIdx.y);
  const int64_t outers = k / (16 * inner), steps = inner / 2;
  const int32_t* word = words + (int64_t(blockIdx.x) * outers * 32 + lane) * steps;
  float sums[kRows] = {};
  for (int64_t outer = 0; outer < outers; ++outer, word += 32 * steps)
    for (int64_t step = 0; step < steps; ++step) {
      const uint32_t codes = uint32_t(word[step]);
      const int64_t column = (outer * inner + 2 * step) * 16 + 2 * (lane % 4);
      const float2 pair = __bfloat1622float2(pairs[column / group * n + row]);
      for (int i = 0; i < 8; ++i) {
        const int64_t at = column + 8 * (i % 4) + i / 4;
        const float w = (float(codes >> (4 * i) & 15) - 8.0f) * pair.x + pair.y;
        for (int r = 0; r < kRows; ++r)
          if (first + r < m) sums[r] += w * __bfloat162float(x[(first + r) * k + at]);
      }
    }
  for (int r = 0; r < kRows; ++r) {
    sums[r] += __shfl_xor_sync(0xffffffff, sums[r], 1);
    sums[r] += __shfl_xor_sync(0xffffffff, sums[r], 2);
    if (lane % 4 == 0 && first + r < m) y[(first + r) * n + row] = __float2bfloat16(sums[r]);
  }
}

const char* run(const Contract& c, AtenTensorHandle self, AtenTensorHandle mat2, AtenTensorHandle pairs,
                AtenTensorHandle* result) {
  int32_t index = 0, of_mat2 = 0, of_pairs = 0;
  void* stream = nullptr;
  if (aoti_torch_get_device_index(self, &index) || aoti_torch_get_device_index(mat2, &of_mat2) ||
      aoti_torch_get_device_index(pairs, &of_pairs) || aoti_torch_get_current_cuda_stream(index, &stream))
    return "torch named no device and stream";
  if (of_mat2 != index || of_pairs != index) return "self, mat2 and scales_and_zeros are on different devices";
  const int64_t sizes[] = {c.m, c.n}, blocks = (c.m + kRows - 1) / kRows;
  if (blocks > kBlocks) return "self has more rows than one launch takes, 262140";
  Fresh y;
  if (!y.make(2, sizes, c.self.dtype, index)) return "torch gave no tensor for the result";
  if (c.m && c.n) {
    multiply<<<dim3(unsigned(c.n / 8), unsigned(blocks)), 32, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const __nv_bfloat16*>(c.self.data), static_cast<const int32_t*>(c.mat2.data),
        static_cast<const __nv_bfloat162*>(c.pairs.data), static_cast<__nv_bfloat16*>(y.data), c.m, c.n, c.k, c.inner,
        c.group);
    const cudaError_t code = cudaGetLastError();
    if (code != cudaSuccess) return cudaGetErrorString(code);
  }
  *result = reinterpret_cast<AtenTensorHandle>(y.give());
  return nullptr;
}

}  // namespace

// This library only takes CUDA tensors.
void link_once() {
  [[maybe_unused]] static const bool linked = [] {
    torch.link();
    torch.device = aoti_torch_device_type_cuda();
    return true;
  }();
}

}  // namespace bitport

AOTITorchError aoti_torch_cuda__weight_int4pack_mm(AtenTensorHandle self, AtenTensorHandle mat2, int64_t group,
                                                   AtenTensorHandle scales_and_zeros, AtenTensorHandle* result) {
  using namespace bitport;
  return guarded("_weight_int4pack_mm", [&]() -> const char* {
    Contract contract;
    if (!result) return "the pointer for the result is null";
    if (const char* reason = contract.read(self, mat2, group, scales_and_zeros)) return reason;
    return run(contract, self, mat2, scales_and_zeros, result);
  });
}
