// Attention in exported models, in a file of its own: only a program that calls it links its kernels.
#include "given.h"

using namespace bitport;

namespace {

const char* answer(const Attention& call, AtenTensorHandle* result) {
  TensorHandle y = nullptr;
  if (const char* reason = attention(call, kBestIsa, &y)) return reason;
  *result = reinterpret_cast<AtenTensorHandle>(y);
  return nullptr;
}

}  // namespace

AOTITorchError aoti_torch_cpu_bitport_attention(
    AtenTensorHandle q, AtenTensorHandle k_data, AtenTensorHandle k_scale, AtenTensorHandle* k_zero,
    AtenTensorHandle* k_dense, AtenTensorHandle k_table, int64_t k_n, int64_t k_k, int64_t k_block, int64_t k_group,
    int64_t k_bits, int64_t k_integer, AtenTensorHandle v_data, AtenTensorHandle v_scale, AtenTensorHandle* v_zero,
    AtenTensorHandle* v_dense, AtenTensorHandle v_table, int64_t v_n, int64_t v_k, int64_t v_block, int64_t v_group,
    int64_t v_bits, int64_t v_integer, int64_t first, AtenTensorHandle* mask, int64_t causal, double scale,
    AtenTensorHandle* result) {
  return guarded("bitport_attention", [&]() -> const char* {
    if (const char* reason = check(result)) return reason;
    if (!k_data || !v_data) return "no codes of keys or of values";
    Attention call;
    const Given keys{k_data, k_scale, k_zero, nullptr, k_table, k_n, k_k, k_group, k_bits, k_integer};
    const Given values{v_data, v_scale, v_zero, nullptr, v_table, v_n, v_k, v_group, v_bits, v_integer};
    if (const char* reason = keys.read(&call.keys.parts)) return reason;
    if (const char* reason = values.read(&call.values.parts)) return reason;
    call.q = as_handle(q);
    call.keys.block = k_block;
    call.values.block = v_block;
    call.keys.dense = as_optional(k_dense);
    call.values.dense = as_optional(v_dense);
    call.first = first;
    call.mask = as_optional(mask);
    call.causal = causal != 0;
    call.scale = scale;
    return answer(call, result);
  });
}

AOTITorchError aoti_torch_cpu_bitport_float_attention(AtenTensorHandle q, AtenTensorHandle keys, AtenTensorHandle values,
                                                      AtenTensorHandle* mask, int64_t causal, double scale,
                                                      AtenTensorHandle* result) {
  return guarded("bitport_float_attention", [&]() -> const char* {
    if (const char* reason = check(result)) return reason;
    Attention call;
    call.q = as_handle(q);
    call.keys.dense = as_handle(keys);
    call.values.dense = as_handle(values);
    call.mask = as_optional(mask);
    call.causal = causal != 0;
    call.scale = scale;
    return answer(call, result);
  });
}
