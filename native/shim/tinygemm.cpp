// tinygemm's product on the CPU: repacks its words to tiles and its pairs (s, z) to scales and zeros, then runs the
// kernels.
#include <cmath>
#include <cstring>
#include <memory>
#include "../kernels/number.h"
#include "../torch/calls.h"
#include "contract.h"
#include "error.h"

namespace bitport {
namespace {

// Unpacks words to codes dense along k: bytes [n, k/2], the even column in the low half. Nibble i of a word belongs to
// column c + (0, 8, 16, 24, 1, 9, 17, 25)[i]: nibbles i and i + 4 are neighbours.
void spread(const Contract& c, uint8_t* dense, int64_t tile) {
  const int64_t outers = c.k / (16 * c.inner), pairs = c.inner / 2;
  const int32_t* word = static_cast<const int32_t*>(c.mat2.data) + tile * outers * 32 * pairs;
  for (int64_t outer = 0; outer < outers; ++outer)
    for (int64_t lane = 0; lane < 32; ++lane)
      for (int64_t pair = 0; pair < pairs; ++pair) {
        const uint32_t codes = uint32_t(*word++);
        const int64_t column = (outer * c.inner + 2 * pair) * 16 + 2 * (lane % 4);
        uint8_t* at = dense + (8 * tile + lane / 4) * (c.k / 2) + column / 2;
        for (int i = 0; i < 4; ++i) at[4 * i] = uint8_t((codes >> (4 * i) & 15) | (codes >> (4 * i + 16) & 15) << 4);
      }
}

// W = (code - 8) s + z = (code - zero) scale. If s is negligible compared to z, W is z: the scale is then chosen so
// small that the code does not matter.
void convert(const Contract& c, float* scale, float* zero) {
  const uint16_t* pair = static_cast<const uint16_t*>(c.pairs.data);
  const int64_t groups = c.k / c.group, blocks = (c.n + 31) / 32;
  std::memset(scale, 0, size_t(blocks * groups * 32) * sizeof(float));
  std::memset(zero, 0, size_t(blocks * groups * 32) * sizeof(float));
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t row = 0; row < c.n; ++row, pair += 2) {
      const float z = float_of_bf16(pair[1]), tiny = std::fabs(z) * 0x1p-20f;
      const float s = std::fabs(float_of_bf16(pair[0])) < tiny ? tiny : float_of_bf16(pair[0]);
      const int64_t at = (row / 32 * groups + g) * 32 + row % 32;
      scale[at] = s;
      zero[at] = s ? 8 - z / s : 8;
    }
}

struct Spread { const Contract* contract; uint8_t* dense; };

const char* multiply(const Contract& c, void* y) {
  const int64_t groups = c.k / c.group, blocks = (c.n + 31) / 32, steps = (c.k + 31) / 32;
  const std::unique_ptr<uint8_t[]> dense(new uint8_t[size_t(c.n * c.k / 2)]);
  const std::unique_ptr<uint8_t[]> tiles(new uint8_t[size_t(blocks * steps * 512)]);
  const std::unique_ptr<float[]> scale(new float[size_t(blocks * groups * 32)]), zero(new float[size_t(blocks * groups * 32)]);
  Spread work{&c, dense.get()};
  const Body body = [](int64_t begin, int64_t end, void* context) {
    const Spread& given = *static_cast<const Spread*>(context);
    for (int64_t tile = begin; tile < end; ++tile) spread(*given.contract, given.dense, tile);
  };
  if (torch.torch_parallel_for(0, c.n / 8, 8, body, &work)) return "torch ran no threads";
  convert(c, scale.get(), zero.get());
  uint32_t threads = 1;
  if (torch.torch_get_num_threads(&threads)) threads = 1;
  if (const int32_t code = bitport_pack(dense.get(), 4, c.n, c.k, tiles.get(), int32_t(threads))) return bitport_error(code);
  float table[16];
  for (int code = 0; code < 16; ++code) table[code] = float(code - 8);
  const BitportTiles w{tiles.get(), scale.get(), zero.get(), nullptr, table,       c.n,        c.k, c.group,
                       4,           1,           BITPORT_F32, BITPORT_F32};
  const int32_t code = bitport_linear(&w, c.self.data, BITPORT_BF16, c.m, nullptr, BITPORT_NOTHING, nullptr, y, int32_t(threads), -1);
  return code ? bitport_error(code) : nullptr;
}

}  // namespace
}  // namespace bitport

AOTITorchError aoti_torch_cpu__weight_int4pack_mm(AtenTensorHandle self, AtenTensorHandle mat2, int64_t group,
                                                  AtenTensorHandle scales_and_zeros, AtenTensorHandle* result) {
  using namespace bitport;
  return guarded("_weight_int4pack_mm", [&]() -> const char* {
    Contract contract;
    if (!result) return "the pointer for the result is null";
    if (const char* reason = contract.read(self, mat2, group, scales_and_zeros)) return reason;
    const int64_t sizes[] = {contract.m, contract.n};
    Fresh y;
    if (!y.make(2, sizes, contract.self.dtype)) return "torch gave no tensor for the result";
    if (contract.m && contract.n)
      if (const char* reason = multiply(contract, y.data)) return reason;
    *result = reinterpret_cast<AtenTensorHandle>(y.give());
    return nullptr;
  });
}
