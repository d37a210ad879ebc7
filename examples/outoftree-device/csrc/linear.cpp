// bitport::linear on this device, for int4 and int8 weights in the device's own layout. PyTorch's dispatcher calls it
// because it is registered at the device's key. Calls that it does not support go to `bitport::linear.generic`, which
// handles every weight and raises bitport's own errors for invalid arguments.
#include "host.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

int64_t sim::kernel_calls = 0;
int64_t sim::handed_back = 0;

namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

constexpr int64_t kRows = 8;  // rows of the weight that are interleaved; see layout.py

// The ten arguments that make up a weight in every bitport op.
struct Weight {
  const Tensor& data;
  const Tensor& scale;
  const MaybeTensor& zero;
  const MaybeTensor& scale2;
  std::string_view dtype;
  int64_t n, k, block_n, block_k;
  std::string_view layout;

  int64_t bits() const { return dtype == "int4" ? 4 : dtype == "int8" ? 8 : 0; }
  int64_t blocks() const { return (n + kRows - 1) / kRows; }
  int64_t groups() const { return (k + block_k - 1) / block_k; }
};

bool is_float(const Tensor& t) {
  const auto dtype = t.scalar_type();
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

bool is(const Tensor& t, c10::Device device, at::IntArrayRef sizes) {
  return t.device() == device && t.sizes() == sizes && t.is_contiguous();
}

// Checks everything that the code below relies on when it reads memory: sizes may come from a file.
bool takes(const Tensor& x, const Weight& w, const MaybeTensor& bias) {
  if (w.layout != "sim_rows8" || !w.bits() || w.block_n != 1 || w.block_k < 1 || w.n < 0 || w.k < 1) return false;
  const auto device = x.device();
  if (device.type() != c10::kPrivateUse1 || !is_float(x) || x.dim() < 1 || x.size(-1) != w.k || w.scale2) return false;
  if (w.data.scalar_type() != at::kByte || !is(w.data, device, {w.blocks(), w.k, w.bits()})) return false;
  if (!is_float(w.scale) || !is(w.scale, device, {w.groups(), w.blocks() * kRows})) return false;
  if (w.zero && (w.zero->scalar_type() != at::kByte || !is(*w.zero, device, {w.n, w.groups()}))) return false;
  return !bias || (is_float(*bias) && is(*bias, device, {w.n}));
}

Tensor generic(const Tensor& x, const Weight& w, const MaybeTensor& bias) {
  ++sim::handed_back;
  using Linear = Tensor(const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&, const MaybeTensor&,
                        std::string_view, int64_t, int64_t, int64_t, int64_t, std::string_view, const MaybeTensor&);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("bitport::linear", "generic").typed<Linear>();
  return op.call(x, w.data, w.scale, w.zero, w.scale2, w.dtype, w.n, w.k, w.block_n, w.block_k, w.layout, bias);
}

// y[row] = sum over groups of scale * (sum over the group of x * (code - zero)), eight rows of the weight at a time.
template <int bits>
void product(const float* x, const uint8_t* data, const float* scale, const uint8_t* zero, const Weight& w, float* y) {
  const int64_t width = w.blocks() * kRows;
  for (int64_t block = 0; block < w.blocks(); ++block) {
    float sum[kRows] = {};
    for (int64_t group = 0; group < w.groups(); ++group) {
      float part[kRows] = {}, middle[kRows];
      for (int64_t r = 0; r < kRows; ++r) {
        const int64_t row = block * kRows + r;
        middle[r] = zero && row < w.n ? zero[row * w.groups() + group] : 1 << (bits - 1);
      }
      for (int64_t k = group * w.block_k; k < std::min((group + 1) * w.block_k, w.k); ++k) {
        const uint8_t* codes = data + (block * w.k + k) * bits;
        for (int64_t r = 0; r < kRows; ++r) {
          const int code = bits == 8 ? codes[r] : r < 4 ? codes[r] & 0xF : codes[r - 4] >> 4;
          part[r] += x[k] * (code - middle[r]);
        }
      }
      for (int64_t r = 0; r < kRows; ++r) sum[r] += part[r] * scale[group * width + block * kRows + r];
    }
    for (int64_t r = 0; r < std::min(kRows, w.n - block * kRows); ++r) y[block * kRows + r] += sum[r];
  }
}

Tensor linear(const Tensor& x, const Tensor& data, const Tensor& scale, const MaybeTensor& zero,
              const MaybeTensor& scale2, std::string_view dtype, int64_t n, int64_t k, int64_t block_n, int64_t block_k,
              std::string_view layout, const MaybeTensor& bias) {
  const Weight w{data, scale, zero, scale2, dtype, n, k, block_n, block_k, layout};
  if (!takes(x, w, bias)) return generic(x, w, bias);
  ++sim::kernel_calls;
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = n;
  const Tensor y = at::empty(sizes, x.options());
  const Tensor rows = sim::host(x).to(at::kFloat).contiguous();
  const Tensor scales = sim::host(scale).to(at::kFloat);
  const Tensor sums = at::zeros(sizes, rows.options());
  if (bias) sums.copy_(sim::host(*bias).expand(sizes));
  const uint8_t* zeros = zero ? zero->const_data_ptr<uint8_t>() : nullptr;
  const auto run = w.bits() == 4 ? product<4> : product<8>;
  for (int64_t m = 0; m < rows.numel() / k; ++m) {
    run(rows.const_data_ptr<float>() + m * k, data.const_data_ptr<uint8_t>(), scales.const_data_ptr<float>(), zeros, w,
        sums.mutable_data_ptr<float>() + m * n);
  }
  sim::host(y).copy_(sums);
  return y;
}

TORCH_LIBRARY_IMPL(bitport, PrivateUse1, m) { m.impl("linear", linear); }

}  // namespace
