// Attention over the tokens of a cache, as torch's tensors hold them: the tokens of a head are contiguous, heads and
// sequences have any strides.
#include <cmath>
#include "calls.h"
#include "../kernels/number.h"
#include "../kernels/tiles.h"

namespace bitport {
namespace {

// A CPU tensor of four dimensions, with any strides. Not `ok` for any other, or if torch fails to return them.
struct Strided {
  const int64_t *sizes = nullptr, *strides = nullptr;
  const void* data = nullptr;
  int32_t dtype = -1;
  bool ok = false;

  explicit Strided(TensorHandle handle) {
    int64_t dim = 0, *found = nullptr, *apart = nullptr;
    int32_t device = -1;
    ok = handle && !torch.aoti_torch_get_device_type(handle, &device) && device == torch.device &&
         !torch.aoti_torch_get_dim(handle, &dim) && dim == 4 && !torch.aoti_torch_get_sizes(handle, &found) &&
         !torch.aoti_torch_get_strides(handle, &apart) && !torch.aoti_torch_get_dtype(handle, &dtype) &&
         !torch.torch_get_const_data_ptr(handle, &data);
    sizes = found;
    strides = apart;
  }

  int32_t type() const { return torch.type_of(dtype); }
  // 0 along axes of one entry, which is for all.
  int64_t step(int axis) const { return sizes[axis] > 1 ? strides[axis] : 0; }
};

// [sequences][heads][rows][width], the rows of each head contiguous.
struct Heads : Strided {
  explicit Heads(TensorHandle handle) : Strided(handle) {
    if (!ok) return;
    const bool empty = !sizes[0] || !sizes[1] || !sizes[2] || !sizes[3];
    const bool together = (sizes[3] == 1 || strides[3] == 1) && (sizes[2] == 1 || strides[2] == sizes[3]);
    ok = empty || (together && data && strides[0] >= 0 && strides[1] >= 0);
  }

  bool has_shape(int64_t sequences, int64_t heads, int64_t rows, int64_t width) const {
    return sizes[0] == sequences && sizes[1] == heads && sizes[2] == rows && sizes[3] == width;
  }
  void write_steps(int64_t* steps) const {
    for (int axis = 0; axis < 2; ++axis) steps[axis] = step(axis);
  }
};

// The parts of keys or of values: [sequences][groups][tokens]. Null, or why the kernel does not take them.
const char* read(const Tokens& given, bool keys, int64_t sequences, int64_t groups, BitportTokens* t) {
  const Parts& parts = given.parts;
  if (!parts.data) {   // all tokens are floats
    const Heads dense(given.dense);
    if (!dense.ok || dense.sizes[3] < 1 || dense.sizes[3] > kMost) return "keys and values are not floats [batch, heads, tokens, width]";
    *t = BitportTokens{};
    t->width = t->group = dense.sizes[3];
    t->block = 1;
    return nullptr;
  }
  const int64_t n = parts.n, k = parts.k, group = parts.group, block = given.block;
  if (n < 0 || n > kMost || k < 1 || k > kMost || group < 1 || block < 1) return "a size of the tokens is out of range";
  if (parts.scale2) return "tokens have no second scale";
  if (block > 1 ? !keys || group != 1 : group % 16 && group < k) return "these blocks of scales are not those of tokens";
  const Heads data(parts.data), scale(parts.scale);
  if (!data.ok || !data.has_shape(sequences, groups, n, ceil_div(k * parts.number.bits, 8))) return "codes of another shape";
  if (data.type() != BITPORT_U8 && data.type() != BITPORT_E4M3) return "codes are not bytes";
  const int64_t rows = ceil_div(n, block), columns = ceil_div(k, group);
  if (!scale.ok || !scale.has_shape(sequences, groups, rows, columns) || scale.type() < 0) return "scales of another shape or dtype";
  *t = BitportTokens{};
  t->zero_type = BITPORT_U8;
  if (parts.zero) {
    const Heads zero(parts.zero);
    if (!zero.ok || !zero.has_shape(sequences, groups, rows, columns) || zero.type() < 0) return "zeros of another shape or dtype";
    t->zero = zero.data;
    t->zero_type = zero.type();
    zero.write_steps(t->zero_step);
  }
  t->codes = static_cast<const uint8_t*>(data.data);
  t->scale = scale.data;
  t->table = parts.number.table;
  t->width = k;
  t->group = group;
  t->block = block;
  t->bits = parts.number.bits;
  t->integer = parts.number.integer;
  t->scale_type = scale.type();
  data.write_steps(t->codes_step);
  scale.write_steps(t->scale_step);
  return nullptr;
}

bool read_dense(TensorHandle handle, int32_t dtype, int64_t sequences, int64_t groups, int64_t count, BitportTokens* t) {
  const Heads dense(handle);
  if (!dense.ok || dense.dtype != dtype || !dense.has_shape(sequences, groups, count, t->width)) return false;
  t->dense = dense.data;
  dense.write_steps(t->dense_step);
  return true;
}

bool read_mask(TensorHandle handle, BitportAttention* a) {
  const Strided mask(handle);
  if (!mask.ok || !mask.data || (mask.dtype != torch.boolean && mask.type() != BITPORT_F32)) return false;
  const int64_t most[] = {a->batch, a->heads, a->rows, a->quantized + a->dense};
  for (int axis = 0; axis < 4; ++axis) {
    if (mask.sizes[axis] != 1 && mask.sizes[axis] != most[axis]) return false;
    a->mask_step[axis] = mask.step(axis);
  }
  a->mask = mask.data;
  a->mask_type = mask.dtype == torch.boolean ? BITPORT_U8 : BITPORT_F32;
  return true;
}

}  // namespace

const char* attention(const Attention& call, int32_t isa, TensorHandle* result) {
  const View q(call.q);
  if (!q.ok || q.dim != 4 || !is_float(q.type())) return "q is not contiguous float32, bfloat16 or float16 [batch, heads, rows, width]";
  const Heads keys(call.keys.parts.data ? call.keys.parts.data : call.keys.dense);
  if (!keys.ok || keys.sizes[1] < 1 || q.sizes[1] % keys.sizes[1]) return "keys are not of heads that divide those of q";
  const int64_t batch = q.sizes[0], groups = keys.sizes[1];
  BitportAttention a{};
  if (const char* reason = read(call.keys, true, batch, groups, &a.keys)) return reason;
  if (const char* reason = read(call.values, false, batch, groups, &a.values)) return reason;
  if (a.keys.width != q.sizes[3] || call.values.parts.n != call.keys.parts.n ||
      !call.values.parts.data != !call.keys.parts.data)
    return "keys, values and q do not fit together";
  if (!call.keys.dense != !call.values.dense) return "dense keys and values go together";
  if (call.keys.dense) {
    const Heads dense(call.keys.dense);
    a.dense = dense.ok ? dense.sizes[2] : 0;
    if (!read_dense(call.keys.dense, q.dtype, batch, groups, a.dense, &a.keys) ||
        !read_dense(call.values.dense, q.dtype, batch, groups, a.dense, &a.values))
      return "dense tokens of another shape or dtype than q";
    if (!a.dense) a.keys.dense = a.values.dense = nullptr;
  }
  a.batch = batch;
  a.heads = q.sizes[1];
  a.groups = groups;
  a.rows = q.sizes[2];
  a.quantized = call.keys.parts.data ? call.keys.parts.n : 0;
  a.first_dense = call.first;
  const int64_t tokens = a.quantized + a.dense;
  if (a.first_dense < 0 || a.first_dense > a.dense || !tokens || (call.causal && a.rows > tokens)) return "too few tokens";
  a.scale = float(call.scale ? call.scale : 1 / std::sqrt(double(a.keys.width)));
  if (!(a.scale > 0 && a.scale < INFINITY)) return "the scale is not a positive number";
  a.causal = call.causal;
  a.type = q.type();
  if (call.mask && !read_mask(call.mask, &a)) return "the mask is not bool or float32, or does not fit";
  const int64_t sizes[] = {a.batch, a.heads, a.rows, a.values.width};
  Fresh y;
  if (!y.make(4, sizes, q.dtype)) return "torch gave no tensor for the result";
  a.q = q.data;
  a.y = y.data;
  uint32_t threads = 1;
  if (torch.torch_get_num_threads(&threads)) threads = 1;
  if (const int32_t code = bitport_attention(&a, int32_t(threads), isa)) return bitport_error(code);
  *result = y.give();
  return nullptr;
}

}  // namespace bitport
