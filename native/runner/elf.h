// What must hold of a shared library before the system's loader sees it, since that trusts its files.
#pragma once
#include <set>
#include <string>
#include "bytes.h"

namespace bitport::runner {

struct Library {
  std::set<std::string> offers, wants;   // the symbols that it defines, and those that others must bring
};

// A library for this machine whose parts lie within the file, or a Failure.
Library library_of(Bytes file, const std::string& where);

}  // namespace bitport::runner
