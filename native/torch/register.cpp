// The CPU kernels of the ops, as torch calls them. Each takes the call if it is the plain case: a weight in cpu_tiles,
// every part contiguous and exactly of the size it must have. Everything else, errors too, it hands to the overload
// `choose`, which is bitport's choice among all kernels.
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include "bitport_torch.h"
#include "weight.h"

namespace bitport {
namespace {

std::atomic<int32_t> isa{-1};
std::atomic<int64_t> taken{0};

int32_t threads() {
  uint32_t count = 1;
  return torch.torch_get_num_threads(&count) ? 1 : int32_t(count);
}

int32_t torch_pool(int64_t begin, int64_t end, int64_t grain, BitportBody body, void* context) {
  return torch.torch_parallel_for(begin, end, grain, body, context);
}

bool is_float(int32_t type) { return type == BITPORT_F32 || type == BITPORT_BF16 || type == BITPORT_F16; }

// x [.., k]: at least one row of floats
bool are_rows(const View& x, int64_t k) {
  return x.ok && is_float(x.type()) && x.dim >= 1 && x.sizes[x.dim - 1] == k;
}

bool run(const BitportTiles& w, const View& x, const void* rows, int64_t m, int32_t act, const float* act_scale,
         const void* bias, void* y, int32_t then = BITPORT_NOTHING, const void* times = nullptr) {
  const int32_t variant = isa.load(std::memory_order_relaxed);
  return !bitport_linear(&w, rows, x.type(), m, act, act_scale, bias, then, times, y, threads(), variant);
}

struct After { int32_t then = BITPORT_NOTHING; const Value* times = nullptr; };

// x and ten arguments of the weight, then bias.
bool product(const Value* stack, int32_t act, const Value* act_scale, const Value* bias_given, Value* result,
             After after = {}) {
  const View x(stack[0]);
  Weight weight;
  if (!x.ok || !weight.read(stack + 1, false) || !are_rows(x, weight.tiles.k)) return false;
  if (act == BITPORT_AS_IS && x.count() / weight.tiles.k > weight.most_rows) return false;
  const View scale = act_scale ? View(*act_scale) : View();
  const bool one_number = scale.ok && scale.type() == BITPORT_F32 && scale.count() == 1;
  if (act_scale && !(one_number && act == BITPORT_INT8_TENSOR)) return false;
  const View bias = bias_given ? View(*bias_given) : View();
  if (bias_given && (!bias.ok || bias.dtype != x.dtype || !bias.has_shape(weight.tiles.n))) return false;
  int64_t sizes[kMostDims];
  std::memcpy(sizes, x.sizes, size_t(x.dim) * sizeof(int64_t));
  sizes[x.dim - 1] = weight.tiles.n;
  const View times = after.times ? View(*after.times) : View();
  if (after.times && (!times.ok || times.dtype != x.dtype || !times.has_sizes(x.dim, sizes))) return false;
  Fresh y;
  const int64_t m = x.count() / weight.tiles.k;
  if (!y.make(x.dim, sizes, x.dtype)) return false;
  if (!run(weight.tiles, x, x.data, m, act, static_cast<const float*>(scale.data), bias.data, y.data, after.then, times.data))
    return false;
  *result = y.give();
  return true;
}

bool linear(const Value* stack, Value* result) {
  return product(stack, BITPORT_AS_IS, nullptr, optional(stack[11]), result);
}

bool dyn_linear(const Value* stack, Value* result) {
  const int32_t act = rounding(text(stack[11]));
  return act > BITPORT_AS_IS && product(stack, act, optional(stack[12]), optional(stack[13]), result);
}

bool linear_then(const Value* stack, Value* result) {
  const After after{activation(text(stack[12])), optional(stack[13])};
  return after.then > BITPORT_NOTHING && product(stack, BITPORT_AS_IS, nullptr, optional(stack[11]), result, after);
}

bool dyn_linear_then(const Value* stack, Value* result) {
  const int32_t act = rounding(text(stack[11]));
  const After after{activation(text(stack[14])), optional(stack[15])};
  return act > BITPORT_AS_IS && after.then > BITPORT_NOTHING &&
         product(stack, act, optional(stack[12]), optional(stack[13]), result, after);
}

// x [rows, k], int32 ends [experts], and ten arguments of the weight. Rows past the last end give zeros.
bool by_expert(const Value* stack, int32_t act, Value* result) {
  const View x(stack[0]), ends(stack[1]);
  Weight weight;
  if (!x.ok || !ends.ok || !weight.read(stack + 2, true) || !are_rows(x, weight.tiles.k) || x.dim != 2) return false;
  if (ends.dtype != torch.int32 || !ends.has_shape(weight.experts)) return false;
  const int32_t* end = static_cast<const int32_t*>(ends.data);
  for (int64_t e = 0; e < weight.experts; ++e)
    if (end[e] < (e ? end[e - 1] : 0) || end[e] > x.sizes[0]) return false;
  const int64_t sizes[] = {x.sizes[0], weight.tiles.n}, width = x.type() == BITPORT_F32 ? 4 : 2;
  const int64_t from = weight.tiles.k * width, to = weight.tiles.n * width;
  Fresh y;
  if (!y.make(2, sizes, x.dtype)) return false;
  const char* rows = static_cast<const char*>(x.data);
  char* sums = static_cast<char*>(y.data);
  int64_t row = 0;
  for (int64_t e = 0; e < weight.experts; row = end[e++]) {
    const int64_t count = end[e] - row;
    const BitportTiles own = weight.expert(e);
    if (count && !run(own, x, rows + row * from, count, act, nullptr, nullptr, sums + row * to)) return false;
  }
  std::memset(sums + row * to, 0, size_t((sizes[0] - row) * to));
  *result = y.give();
  return true;
}

bool grouped_linear(const Value* stack, Value* result) { return by_expert(stack, BITPORT_AS_IS, result); }

// Where each row is rounded by itself: a scale over the whole tensor is not the scale over an expert's rows.
bool dyn_grouped_linear(const Value* stack, Value* result) {
  const int32_t act = rounding(text(stack[12]));
  switch (act) {
    case BITPORT_INT8_ROW: case BITPORT_INT8_ROW_ASYM:
    case BITPORT_FP8_ROW: case BITPORT_FP8_128: case BITPORT_MXFP8: case BITPORT_MXFP4:
      return by_expert(stack, act, result);
    default: return false;
  }
}

// ids, ten arguments of the weight, and the dtype of the result.
bool embedding(const Value* stack, Value* result) {
  const View ids(stack[0]);
  const int32_t dtype = int32_t(stack[11]), type = torch.type_of(dtype);
  Weight weight;
  if (!ids.ok || ids.dtype != torch.int64 || ids.dim >= kMostDims || !is_float(type)) return false;
  if (!weight.read(stack + 1, false)) return false;
  int64_t sizes[kMostDims];
  std::memcpy(sizes, ids.sizes, size_t(ids.dim) * sizeof(int64_t));
  sizes[ids.dim] = weight.tiles.k;
  Fresh y;
  if (!y.make(ids.dim + 1, sizes, dtype)) return false;
  const int64_t* rows = static_cast<const int64_t*>(ids.data);
  if (bitport_rows(&weight.tiles, rows, ids.count(), y.data, type, threads())) return false;
  *result = y.give();
  return true;
}

// C functions keep of an exception its text at most; where it came from in Python follows "At:".
[[noreturn]] void fail(const char* op) {
  const auto what = torch.torch_exception_get_what_without_backtrace;
  const std::string text = what ? what() : "the kernel that was chosen failed";
  throw std::runtime_error(std::string(op) + ": " + text.substr(0, text.find("\n\nAt:\n")));
}

struct Op {
  const char* name;
  const char* kinds;   // as release() wants them
  bool (*take)(const Value* stack, Value* result);   // false: not the plain case, nothing was done
  std::atomic<bool> on{false};
  void call(Value* stack) {
    Value result;
    if (on.load(std::memory_order_relaxed) && take(stack, &result)) {
      taken.fetch_add(1, std::memory_order_relaxed);
      release(stack, kinds);
      stack[0] = result;
    } else if (!spell_out(stack, kinds) || torch.torch_call_dispatcher(name, "choose", stack, kAbi)) {
      fail(name);
    }
  }
};

#define BITPORT_WEIGHT "TTOOSIIIIS"
Op ops[] = {
    {"bitport::linear", "T" BITPORT_WEIGHT "O", linear},
    {"bitport::dyn_linear", "T" BITPORT_WEIGHT "SOO", dyn_linear},
    {"bitport::linear_then", "T" BITPORT_WEIGHT "OSO", linear_then},
    {"bitport::dyn_linear_then", "T" BITPORT_WEIGHT "SOOSO", dyn_linear_then},
    {"bitport::grouped_linear", "TT" BITPORT_WEIGHT, grouped_linear},
    {"bitport::dyn_grouped_linear", "TT" BITPORT_WEIGHT "S", dyn_grouped_linear},
    {"bitport::embedding", "T" BITPORT_WEIGHT "I", embedding},
};
#undef BITPORT_WEIGHT

template <int at>
void call(Value* stack, uint64_t, uint64_t) { ops[at].call(stack); }

const Kernel kernels[] = {call<0>, call<1>, call<2>, call<3>, call<4>, call<5>, call<6>};

const char* enlist(const char* libtorch_cpu) {
  if (const char* reason = torch.load(libtorch_cpu)) return reason;
  LibraryHandle library = nullptr;   // lives as long as the process, as this code does
  if (torch.aoti_torch_library_init_impl("bitport", "CPU", "bitport/native/torch", 0, &library))
    return "torch refused a library of kernels at key CPU";
  for (size_t i = 0; i < sizeof(ops) / sizeof(ops[0]); ++i)
    if (torch.torch_library_impl(library, ops[i].name, kernels[i], kAbi)) return "torch refused a kernel of an op";
  bitport_use_pool(torch_pool);
  return nullptr;
}

}  // namespace
}  // namespace bitport

const char* bitport_register_torch(const char* libtorch_cpu) {
  static const char* const reason = bitport::enlist(libtorch_cpu);   // once: kernels cannot be registered again
  return reason;
}

int32_t bitport_take_calls(const char* op, int32_t on) {
  for (bitport::Op& known : bitport::ops)
    if (op && !std::strcmp(known.name, op)) { known.on = on != 0; return 0; }
  return 1;
}

void bitport_torch_isa(int32_t isa) { bitport::isa = isa; }
int64_t bitport_calls_taken(void) { return bitport::taken; }
