#include "api.h"
#include <dlfcn.h>

namespace bitport {

const char* Api::load(const char* libtorch_cpu) {
  void* library = dlopen(libtorch_cpu, RTLD_NOW | RTLD_NOLOAD);
  if (!library) return "libtorch_cpu is not loaded in this process from the path given";
#define BITPORT_FIND(name, result, arguments) \
  name = reinterpret_cast<result(*) arguments>(dlsym(library, #name));
#define BITPORT_NEED(name, result, arguments) \
  BITPORT_FIND(name, result, arguments) \
  if (!name) return "this torch has no " #name ": torch 2.11 or later has it";
  BITPORT_TENSOR_FUNCTIONS(BITPORT_NEED)
  BITPORT_LIBRARY_FUNCTIONS(BITPORT_NEED)
  BITPORT_TORCH_NEWER_FUNCTIONS(BITPORT_FIND)
#undef BITPORT_NEED
#undef BITPORT_FIND
  ask();
  return nullptr;
}

}  // namespace bitport
