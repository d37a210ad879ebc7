// The functions of torch as the linker finds them, and torch's threads.
#include "../torch/calls.h"
#include "error.h"

namespace bitport {

extern "C" {
#define BITPORT_DECLARE(name, result, arguments) result name arguments;
BITPORT_TENSOR_FUNCTIONS(BITPORT_DECLARE)
#undef BITPORT_DECLARE
}

void Api::link() {
#define BITPORT_TAKE(name, result, arguments) this->name = ::bitport::name;
  BITPORT_TENSOR_FUNCTIONS(BITPORT_TAKE)
#undef BITPORT_TAKE
  ask();
}

void link_once() {
  [[maybe_unused]] static const bool linked = [] {
    torch.link();
    bitport_use_pool(torch_pool);
    return true;
  }();
}

}  // namespace bitport
