#include "api.h"
#if defined(_WIN32)
#include <windows.h>
#include <cstring>
#else
#include <dlfcn.h>
#endif

namespace bitport {

namespace {

#if defined(_WIN32)
HMODULE loaded(const char* path) {
  const char* name = std::strrchr(path, '\\');   // alone, for the folder may have characters that "A" functions lack
  return GetModuleHandleA(name ? name + 1 : path);
}
FARPROC find(HMODULE library, const char* name) { return GetProcAddress(library, name); }
#else
void* loaded(const char* path) { return dlopen(path, RTLD_NOW | RTLD_NOLOAD); }
void* find(void* library, const char* name) { return dlsym(library, name); }
#endif

}  // namespace

const char* Api::load(const char* libtorch_cpu) {
  auto* library = loaded(libtorch_cpu);
  if (!library) return "libtorch_cpu is not loaded in this process from the path given";
#define BITPORT_FIND(name, result, arguments) \
  name = reinterpret_cast<result(*) arguments>(find(library, #name));
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
