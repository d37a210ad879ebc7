// Return codes of the library.
#pragma once
#include <cstdint>

namespace bitport {

enum Status : int32_t {
  kOk, kNullPointer, kBadShape, kBadGroup, kBadType, kBadAct, kBadRow, kNoIsa, kNoMemory, kBadThen, kBadStep
};

}  // namespace bitport
