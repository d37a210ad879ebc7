// The CPU kernels of the ops, as torch calls them. Each handles the plain case: a weight in cpu_tiles, with every part
// contiguous and of exactly the required size, or the tokens of a cache (attention.cpp). Everything else, including errors, is forwarded to the overload
// `choose`, which dispatches among all kernels of bitport.
#include <atomic>
#include <cstring>
#include <string>
#include "arguments.h"
#include "bitport_torch.h"
#include "calls.h"

namespace bitport {
namespace {

std::atomic<int32_t> isa{-1};
std::atomic<int64_t> taken{0};

// Reads the ten arguments of a weight, data .. layout. False for another layout or an unknown type.
bool read(const Value* arguments, Parts* parts) {
  const NumberType* number = text(arguments[9]) == "cpu_tiles" ? number_type(text(arguments[4])) : nullptr;
  if (!number || int64_t(arguments[7]) < 1) return false;
  *parts = {tensor(arguments[0]), tensor(arguments[1]), optional(arguments[2]), optional(arguments[3]), *number,
            int64_t(arguments[5]), int64_t(arguments[6]), int64_t(arguments[8])};
  return true;
}

int32_t variant() { return isa.load(std::memory_order_relaxed); }

// The same for keys or values.
bool read(const Value* arguments, Value dense, Tokens* tokens) {
  const NumberType* number = text(arguments[9]) == "plain" ? number_type(text(arguments[4])) : nullptr;
  if (!number) return false;
  tokens->parts = {tensor(arguments[0]), tensor(arguments[1]), optional(arguments[2]), optional(arguments[3]), *number,
                   int64_t(arguments[5]), int64_t(arguments[6]), int64_t(arguments[8])};
  tokens->block = int64_t(arguments[7]);
  tokens->dense = optional(dense);
  return true;
}

// Reads x and the weight, then runs the product with the rest of `call`.
bool multiply(const Value* stack, Product call, TensorHandle* y) {
  call.x = tensor(stack[0]);
  return read(stack + 1, &call.weight) && !bitport::dyn_linear(call, variant(), y);
}

bool linear(const Value* stack, TensorHandle* y) {
  Product call;
  call.bias = optional(stack[11]);
  return multiply(stack, call, y);
}

bool dyn_linear(const Value* stack, TensorHandle* y) {
  Product call;
  call.act = rounding(text(stack[11]));
  call.act_scale = optional(stack[12]);
  call.bias = optional(stack[13]);
  return call.act > BITPORT_AS_IS && multiply(stack, call, y);
}

bool linear_then(const Value* stack, TensorHandle* y) {
  Product call;
  call.bias = optional(stack[11]);
  call.then = activation(text(stack[12]));
  call.times = optional(stack[13]);
  return call.then > BITPORT_NOTHING && multiply(stack, call, y);
}

bool dyn_linear_then(const Value* stack, TensorHandle* y) {
  Product call;
  call.act = rounding(text(stack[11]));
  call.act_scale = optional(stack[12]);
  call.bias = optional(stack[13]);
  call.then = activation(text(stack[14]));
  call.times = optional(stack[15]);
  return call.act > BITPORT_AS_IS && call.then > BITPORT_NOTHING && multiply(stack, call, y);
}

bool grouped_linear(const Value* stack, TensorHandle* y) {
  Parts weight;
  return read(stack + 2, &weight) && !bitport::grouped_linear(tensor(stack[0]), tensor(stack[1]), weight, variant(), y);
}

bool dyn_grouped_linear(const Value* stack, TensorHandle* y) {
  Parts weight;
  const int32_t act = rounding(text(stack[12]));
  return act > BITPORT_AS_IS && read(stack + 2, &weight) &&
         !bitport::dyn_grouped_linear(tensor(stack[0]), tensor(stack[1]), weight, act, variant(), y);
}

// ids, ten arguments of the weight, and the dtype of the result.
bool rows(const Value* stack, TensorHandle* y) {
  Parts weight;
  return read(stack + 1, &weight) && !embedding(tensor(stack[0]), weight, false, int32_t(stack[11]), y);
}

bool attend(const Value* stack, TensorHandle* y) {
  Attention call;
  call.q = tensor(stack[0]);
  call.first = int64_t(stack[23]);
  call.mask = optional(stack[24]);
  call.causal = uint8_t(stack[25]);
  call.scale = number(stack[26], 0);
  if (stack[26] && !(call.scale > 0)) return false;   // 0 would mean the usual one
  return read(stack + 1, stack[21], &call.keys) && read(stack + 11, stack[22], &call.values) &&
         !attention(call, variant(), y);
}

// C functions preserve at most the message of an exception, and before torch 2.13 only print it; the Python traceback
// follows "At:". torch throws, since on Windows it could not catch what code of another compiler throws.
void fail(const char* op) {
  const auto what = torch.torch_exception_get_what_without_backtrace;
  const std::string text = what ? what() : "the kernel that was chosen failed; torch has printed why to stderr";
  const std::string said = std::string(op) + ": " + text.substr(0, text.find("\n\nAt:\n"));
  torch.aoti_torch_check(false, op, "bitport/native/torch", 0, said.c_str());
}

struct Op {
  const char* name;
  const char* kinds;   // as for release()
  bool (*take)(const Value* stack, TensorHandle* y);   // false: not the plain case, without side effects
  std::atomic<bool> on{false};
  void call(Value* stack) {
    TensorHandle y = nullptr;
    if (on.load(std::memory_order_relaxed) && take(stack, &y)) {
      taken.fetch_add(1, std::memory_order_relaxed);
      release(stack, kinds);
      stack[0] = reinterpret_cast<Value>(y);
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
    {"bitport::embedding", "T" BITPORT_WEIGHT "I", rows},
    {"bitport::attention", "T" BITPORT_WEIGHT BITPORT_WEIGHT "OOIOIN", attend},
};
#undef BITPORT_WEIGHT

template <int at>
void call(Value* stack, uint64_t, uint64_t) { ops[at].call(stack); }

const Kernel kernels[] = {call<0>, call<1>, call<2>, call<3>, call<4>, call<5>, call<6>, call<7>};

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
