// What went wrong, in words for the user: what was given, what is allowed, what to do.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

namespace bitport::runner {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The parts, one after another.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Failure(text.str());
}

}  // namespace bitport::runner
