// The torch functions as resolved by the linker.
#include "../torch/api.h"

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

}  // namespace bitport
