#include "calls.h"
#include <atomic>
#include <cstring>
#include "../kernels/number.h"
#include "../kernels/share.h"

namespace bitport {
namespace {

const char* const kNoMemory = "torch gave no tensor for the result";

int32_t threads() {
  uint32_t count = 1;
  return torch.torch_get_num_threads(&count) ? 1 : int32_t(count);
}

// x [.., k] of floats
bool are_rows(const View& x, int64_t k) {
  return x.ok && is_float(x.type()) && x.dim >= 1 && x.sizes[x.dim - 1] == k;
}

const char* said(int32_t code) { return code ? bitport_error(code) : nullptr; }

// Whether each row is rounded independently: one scale for all of x cannot be computed from the rows of one expert.
bool by_row(int32_t act) {
  switch (act) {
    case BITPORT_AS_IS: case BITPORT_INT8_ROW: case BITPORT_INT8_ROW_ASYM:
    case BITPORT_FP8_ROW: case BITPORT_FP8_128: case BITPORT_MXFP8: case BITPORT_MXFP4: return true;
    default: return false;
  }
}

using Multiply = decltype(bitport_dyn_linear);

// Whether to assign whole experts to threads: if that keeps all threads busy nearly to the end, each expert is
// multiplied by one thread, and threads are woken only once. end: end of the rows of each expert. The cost of a product
// is its number of rows plus kRead for reading the weight.
bool share_experts(const int32_t* end, int64_t experts, int32_t threads) {
  constexpr int64_t kRead = 16;
  constexpr int32_t kMostThreads = 64;
  if (threads < 2 || threads > kMostThreads) return false;
  int64_t busy[kMostThreads] = {}, all = 0, last = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t rows = end[e] - (e ? end[e - 1] : 0);
    if (!rows) continue;
    int64_t* first = busy;   // the thread that finishes first so far
    for (int32_t t = 1; t < threads; ++t) first = busy[t] < *first ? busy + t : first;
    *first += kRead + rows;
    last = *first > last ? *first : last;
    all += kRead + rows;
  }
  return last * threads <= all + all / 8;
}

int32_t multiply_as_is(const BitportTiles* w, const void* x, int32_t x_type, int64_t m, int32_t, const float*, const void* bias,
                       int32_t then, const void* times, void* y, int32_t threads, int32_t isa) {
  return bitport_linear(w, x, x_type, m, bias, then, times, y, threads, isa);
}

const char* product(const Product& call, int32_t isa, TensorHandle* result, Multiply multiply) {
  const View x(call.x);
  Weight weight;
  if (const char* reason = weight.read(call.weight, false)) return reason;
  const BitportTiles& w = weight.tiles;
  if (!are_rows(x, w.k)) return "x is not contiguous float32, bfloat16 or float16 [.., k] on the CPU";
  const int64_t m = x.count() / w.k;
  if (call.act == BITPORT_AS_IS && m > weight.most_rows) return "x has more rows than this kernel is asked for";
  const View scale(call.act_scale);
  if (call.act_scale) {
    const bool takes = call.act == BITPORT_INT8_TENSOR || call.act == BITPORT_FP8_TENSOR || call.act == BITPORT_NVFP4;
    if (!takes || !scale.ok || scale.type() != BITPORT_F32 || scale.count() != 1)
      return "act_scale is not one float32 number for a rounding with one scale";
  }
  const View bias(call.bias);
  if (call.bias && (!bias.ok || bias.dtype != x.dtype || !bias.has_shape(w.n))) return "bias is not contiguous [n] of x's dtype";
  int64_t sizes[kMostDims];
  std::memcpy(sizes, x.sizes, size_t(x.dim) * sizeof(int64_t));
  sizes[x.dim - 1] = w.n;
  const View times(call.times);
  if (call.times && (!times.ok || times.dtype != x.dtype || !times.has_sizes(x.dim, sizes)))
    return "times is not contiguous, of the result's shape and x's dtype";
  Fresh y;
  if (!y.make(x.dim, sizes, x.dtype)) return kNoMemory;
  if (m) {
    const int32_t code = multiply(&w, x.data, x.type(), m, call.act, static_cast<const float*>(scale.data), bias.data, call.then,
                                  times.data, y.data, threads(), isa);
    if (code) return said(code);
  }
  *result = y.give();
  return nullptr;
}

const char* by_expert(TensorHandle x_handle, TensorHandle ends_handle, const Parts& parts, int32_t act, int32_t isa,
                      TensorHandle* result, Multiply multiply) {
  const View x(x_handle), ends(ends_handle);
  Weight weight;
  if (const char* reason = weight.read(parts, true)) return reason;
  if (!are_rows(x, weight.tiles.k) || x.dim != 2) return "x is not contiguous float32, bfloat16 or float16 [rows, k]";
  if (!ends.ok || ends.dtype != torch.int32 || !ends.has_shape(weight.experts)) return "ends are not contiguous int32 [experts]";
  const int32_t* end = static_cast<const int32_t*>(ends.data);
  for (int64_t e = 0; e < weight.experts; ++e)
    if (end[e] < (e ? end[e - 1] : 0) || end[e] > x.sizes[0]) return "ends do not grow from 0 to at most the rows of x";
  const int64_t sizes[] = {x.sizes[0], weight.tiles.n}, width = width_of(x.type());
  const int64_t from = weight.tiles.k * width, to = weight.tiles.n * width;
  Fresh y;
  if (!y.make(2, sizes, x.dtype)) return kNoMemory;
  const char* rows = static_cast<const char*>(x.data);
  char* sums = static_cast<char*>(y.data);
  const int32_t all = threads();
  const bool apart = share_experts(end, weight.experts, all);
  std::atomic<int32_t> failed{0};
  share(weight.experts, apart ? all : 1, [&](int64_t e) {
    const int64_t row = e ? end[e - 1] : 0, count = end[e] - row;
    if (!count || failed) return;
    const BitportTiles own = weight.expert(e);
    const int32_t code = multiply(&own, rows + row * from, x.type(), count, act, nullptr, nullptr, BITPORT_NOTHING, nullptr,
                                  sums + row * to, apart ? 1 : all, isa);
    if (code) failed = code;
  });
  if (failed) return said(failed);
  const int64_t row = weight.experts ? end[weight.experts - 1] : 0;
  if (sizes[0] > row) std::memset(sums + row * to, 0, size_t((sizes[0] - row) * to));
  *result = y.give();
  return nullptr;
}

}  // namespace

int32_t torch_pool(int64_t begin, int64_t end, int64_t grain, BitportBody body, void* context) {
  return torch.torch_parallel_for(begin, end, grain, body, context);
}

const char* linear(const Product& call, int32_t isa, TensorHandle* y) { return product(call, isa, y, multiply_as_is); }
const char* dyn_linear(const Product& call, int32_t isa, TensorHandle* y) { return product(call, isa, y, bitport_dyn_linear); }

const char* grouped_linear(TensorHandle x, TensorHandle ends, const Parts& weight, int32_t isa, TensorHandle* y) {
  return by_expert(x, ends, weight, BITPORT_AS_IS, isa, y, multiply_as_is);
}

const char* dyn_grouped_linear(TensorHandle x, TensorHandle ends, const Parts& weight, int32_t act, int32_t isa, TensorHandle* y) {
  if (!by_row(act)) return "rows of experts are not rounded by one scale of all";
  return by_expert(x, ends, weight, act, isa, y, bitport_dyn_linear);
}

const char* embedding(TensorHandle ids_handle, const Parts& parts, bool or_dense, int32_t dtype, TensorHandle* result) {
  const View ids(ids_handle);
  const int32_t type = torch.type_of(dtype);
  Weight weight;
  if (const char* reason = or_dense ? weight.read_rows(parts) : weight.read(parts, false)) return reason;
  if (!ids.ok || ids.dtype != torch.int64 || ids.dim >= kMostDims) return "ids are not contiguous int64 on the CPU";
  if (!is_float(type)) return "rows are given in float32, bfloat16 or float16";
  int64_t sizes[kMostDims];
  std::memcpy(sizes, ids.sizes, size_t(ids.dim) * sizeof(int64_t));
  sizes[ids.dim] = weight.tiles.k;
  Fresh y;
  if (!y.make(ids.dim + 1, sizes, dtype)) return kNoMemory;
  if (ids.count()) {
    const int64_t* rows = static_cast<const int64_t*>(ids.data);
    const auto look_up = weight.dense ? bitport_dense_rows : bitport_rows;
    const int32_t code = look_up(&weight.tiles, rows, ids.count(), y.data, type, threads());
    if (code) return said(code);
  }
  *result = y.give();
  return nullptr;
}

}  // namespace bitport
