// The arguments of a boxed kernel: borrowed while it runs, released afterwards.
#pragma once
#include <cstring>
#include <string_view>
#include "api.h"

namespace bitport {

inline TensorHandle tensor(Value value) { return reinterpret_cast<TensorHandle>(value); }

// A Tensor? argument: null for None.
inline TensorHandle optional(Value value) {
  const Value* held = reinterpret_cast<const Value*>(value);
  return held ? tensor(*held) : nullptr;
}

// A float? argument, or `otherwise`.
inline double number(Value value, double otherwise) {
  const Value* held = reinterpret_cast<const Value*>(value);
  if (held) std::memcpy(&otherwise, held, sizeof(otherwise));
  return otherwise;
}

inline std::string_view text(Value value) {
  const StringHandle handle = reinterpret_cast<StringHandle>(value);
  size_t length = 0;
  const char* characters = nullptr;
  if (torch.torch_string_length(handle, &length) || torch.torch_string_c_str(handle, &characters)) return {};
  return {characters, length};
}

// Releases the arguments. kinds has a letter for each: T tensor, O optional tensor, S str, I a plain value, N an optional
// one.
inline void release(const Value* stack, const char* kinds) {
  for (; *kinds; ++kinds, ++stack) {
    if (*kinds == 'T') torch.aoti_torch_delete_tensor_object(reinterpret_cast<TensorHandle>(*stack));
    if (*kinds == 'S') torch.torch_delete_string(reinterpret_cast<StringHandle>(*stack));
    if ((*kinds == 'O' || *kinds == 'N') && *stack) {
      Value* held = reinterpret_cast<Value*>(*stack);
      if (*kinds == 'O') torch.aoti_torch_delete_tensor_object(reinterpret_cast<TensorHandle>(*held));
      // before torch 2.13 it is allocated with operator new, and the receiver deletes it
      if (torch.torch_delete_stable_ivalue) torch.torch_delete_stable_ivalue(held);
      else delete held;
    }
  }
}

// Replaces every str argument by the int[] of its bytes, in place: torch leaks each str that is passed to it.
inline bool spell_out(Value* stack, const char* kinds) {
  for (; *kinds; ++kinds, ++stack) {
    if (*kinds != 'S') continue;
    const std::string_view characters = text(*stack);
    ListHandle bytes = nullptr;
    if (torch.torch_new_list_reserve_size(characters.size(), &bytes)) return false;
    for (const char one : characters)
      if (torch.torch_list_push_back(bytes, Value(uint8_t(one)))) return false;
    torch.torch_delete_string(reinterpret_cast<StringHandle>(*stack));
    *stack = reinterpret_cast<Value>(bytes);
  }
  return true;
}

}  // namespace bitport
