// Validation of a shared library before it is passed to the dynamic loader, which trusts its input.
#pragma once
#include <set>
#include <string>
#include "bytes.h"

namespace bitport::runner {

struct Library {
  std::set<std::string> offers, wants;   // defined and undefined symbols
};

// Checks that the file is a library for this machine whose parts are within the file; throws Failure.
Library library_of(Bytes file, const std::string& where);

}  // namespace bitport::runner
