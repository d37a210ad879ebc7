#include "error.h"
#include <cstdio>

namespace bitport {
namespace {

thread_local char text[512] = "";

}  // namespace

AOTITorchError failed(AOTITorchError code, const char* function, const char* what) noexcept {
  std::snprintf(text, sizeof text, "%s: %s", function, what);
  std::fprintf(stderr, "bitport: %s\n", text);
  return code;
}

}  // namespace bitport

const char* bitport_shim_error(void) { return bitport::text; }
