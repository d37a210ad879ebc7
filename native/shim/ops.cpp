// The ops of exported models.
#include "given.h"

namespace bitport {
namespace {

const char* check_code(int64_t code, int64_t least, int64_t most, const char* reason) {
  return code < least || code > most ? reason : nullptr;
}

const char* check_act(int64_t act) {
  return check_code(act, BITPORT_AS_IS + 1, BITPORT_FP8_128, "act is no BitportAct that rounds");
}

// Gives the result of run(parts, &y), which returns null or why there is none, to the caller.
template <class Run>
const char* with_weight(const Given& given, AtenTensorHandle* result, const Run& run) {
  Parts parts;
  if (const char* reason = check(result)) return reason;
  if (const char* reason = given.read(&parts)) return reason;
  TensorHandle y = nullptr;
  if (const char* reason = run(parts, &y)) return reason;
  *result = reinterpret_cast<AtenTensorHandle>(y);
  return nullptr;
}

// The arguments of a product.
struct Asked {
  Given weight;
  AtenTensorHandle x, *bias;
  int64_t then;
  AtenTensorHandle* times;
  Product call;

  const char* answer(AtenTensorHandle* result, const char* (*product)(const Product&, int32_t, TensorHandle*)) {
    if (const char* reason = check_code(then, BITPORT_NOTHING, BITPORT_SILU, "then is no BitportThen")) return reason;
    return with_weight(weight, result, [&](const Parts& parts, TensorHandle* y) {
      call.x = as_handle(x);
      call.weight = parts;
      call.bias = as_optional(bias);
      call.then = int32_t(then);
      call.times = as_optional(times);
      return product(call, kBestIsa, y);
    });
  }
};

}  // namespace

void link_once() {
  [[maybe_unused]] static const bool linked = [] {
    torch.link();
    bitport_use_pool(torch_pool);
    return true;
  }();
}

}  // namespace bitport

using namespace bitport;

AOTITorchError aoti_torch_cpu_bitport_linear(
    AtenTensorHandle x, AtenTensorHandle data, AtenTensorHandle scale, AtenTensorHandle* zero, AtenTensorHandle* scale2,
    AtenTensorHandle table, int64_t n, int64_t k, int64_t group, int64_t bits, int64_t integer, AtenTensorHandle* bias,
    int64_t then, AtenTensorHandle* times, AtenTensorHandle* result) {
  return guarded("bitport_linear", [&] {
    Asked asked{{data, scale, zero, scale2, table, n, k, group, bits, integer}, x, bias, then, times};
    return asked.answer(result, linear);
  });
}

AOTITorchError aoti_torch_cpu_bitport_dyn_linear(
    AtenTensorHandle x, AtenTensorHandle data, AtenTensorHandle scale, AtenTensorHandle* zero, AtenTensorHandle* scale2,
    AtenTensorHandle table, int64_t n, int64_t k, int64_t group, int64_t bits, int64_t integer, int64_t act,
    AtenTensorHandle* act_scale, AtenTensorHandle* bias, int64_t then, AtenTensorHandle* times, AtenTensorHandle* result) {
  return guarded("bitport_dyn_linear", [&]() -> const char* {
    if (const char* reason = check_act(act)) return reason;
    Asked asked{{data, scale, zero, scale2, table, n, k, group, bits, integer}, x, bias, then, times};
    asked.call.act = int32_t(act);
    asked.call.act_scale = as_optional(act_scale);
    return asked.answer(result, dyn_linear);
  });
}

AOTITorchError aoti_torch_cpu_bitport_grouped_linear(
    AtenTensorHandle x, AtenTensorHandle ends, AtenTensorHandle data, AtenTensorHandle scale, AtenTensorHandle* zero,
    AtenTensorHandle* scale2, AtenTensorHandle table, int64_t n, int64_t k, int64_t group, int64_t bits, int64_t integer,
    AtenTensorHandle* result) {
  return guarded("bitport_grouped_linear", [&] {
    const Given weight{data, scale, zero, scale2, table, n, k, group, bits, integer};
    return with_weight(weight, result, [&](const Parts& parts, TensorHandle* y) {
      return grouped_linear(as_handle(x), as_handle(ends), parts, kBestIsa, y);
    });
  });
}

AOTITorchError aoti_torch_cpu_bitport_dyn_grouped_linear(
    AtenTensorHandle x, AtenTensorHandle ends, AtenTensorHandle data, AtenTensorHandle scale, AtenTensorHandle* zero,
    AtenTensorHandle* scale2, AtenTensorHandle table, int64_t n, int64_t k, int64_t group, int64_t bits, int64_t integer,
    int64_t act, AtenTensorHandle* result) {
  return guarded("bitport_dyn_grouped_linear", [&]() -> const char* {
    const Given weight{data, scale, zero, scale2, table, n, k, group, bits, integer};
    if (const char* reason = check_act(act)) return reason;
    return with_weight(weight, result, [&](const Parts& parts, TensorHandle* y) {
      return dyn_grouped_linear(as_handle(x), as_handle(ends), parts, int32_t(act), kBestIsa, y);
    });
  });
}

AOTITorchError aoti_torch_cpu_bitport_embedding(
    AtenTensorHandle ids, AtenTensorHandle data, AtenTensorHandle scale, AtenTensorHandle* zero, AtenTensorHandle* scale2,
    AtenTensorHandle table, int64_t n, int64_t k, int64_t group, int64_t bits, int64_t integer, int32_t dtype,
    AtenTensorHandle* result) {
  return guarded("bitport_embedding", [&] {
    const Given weight{data, scale, zero, scale2, table, n, k, group, bits, integer};
    return with_weight(weight, result, [&](const Parts& parts, TensorHandle* y) {
      return embedding(as_handle(ids), parts, true, dtype, y);
    });
  });
}
