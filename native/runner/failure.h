// Error messages for the user: what was given, what is allowed, what to do.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

namespace bitport::runner {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Throws a Failure whose message is the concatenation of the parts.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Failure(text.str());
}

// The results of `text` for each value, separated by commas.
template <typename Values, typename Text>
std::string joined(const Values& values, const Text& text) {
  std::string made;
  for (const auto& value : values) made += std::string(made.empty() ? "" : ", ") + text(value);
  return made;
}

template <typename Strings>
std::string joined(const Strings& strings) {
  return joined(strings, [](const auto& each) -> const auto& { return each; });
}

// Runs `work`, prefixing the message of a Failure with `what`.
template <typename Work>
auto about(const std::string& what, const Work& work) {
  try {
    return work();
  } catch (const Failure& failure) {
    fail(what, ": ", failure.what());
  }
}

}  // namespace bitport::runner
