#include "arguments.h"
#include <algorithm>
#include <cerrno>
#include <cstdlib>

namespace bitport::runner {
namespace {

int64_t whole(const std::string& text, const std::string& option) {
  char* end = nullptr;
  errno = 0;
  const int64_t value = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end || errno || value < 0) fail(option, ": '", text, "' is no whole number");
  return value;
}

double real(const std::string& text, const std::string& option) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end || !(value >= 0)) fail(option, ": '", text, "' is no number from 0");
  return value;
}

}  // namespace

const char kHelp[] = R"(usage: bitport-run PACKAGE.pt2 [METHOD ...] [options]

Loads the methods (default: all), runs each, compares with recorded outputs, prints times. No Python.

  --list              what the package holds; nothing is loaded
  --check             whether it is whole; nothing is loaded
  --inputs FILE       safetensors with input.0, input.1, ..; output.0, .. in it are compared with
  --outputs FILE      write output.0, .. and what the method wrote into inputs (after.0, ..) there
  --random            random inputs even where recorded ones are: normal floats, zeros for whole numbers
  --size NAME=N       a size of random inputs that has a name (default: the largest)
  --shape TYPE[SIZES] a random input, for a package without a manifest: --shape 'bf16[1,2048]', once for each
  --rtol X, --atol X  by how much outputs may differ (default: as recorded)
  --repeat N          runs that are timed, after the first (default 20)
  --generate IDS      continue these tokens (1,2,3) with the most likely ones; --tokens N of them (default 32)
  --weights FILE      a weight file instead of the one that the package names
  --verify            the checksum of the weights too
  --resident          weights are read when a method is loaded, not when they are first used
  --threads N         (default: what OpenMP takes)
  --torch FOLDER      where libtorch_cpu.so is
  --json              one JSON object
Exit: 0; 1 something is wrong, as stderr says; 2 outputs differ from those recorded.
)";

Arguments arguments_of(int count, char** values) {
  Arguments made;
  for (int i = 1; i < count; ++i) {
    const std::string option = values[i];
    const auto value = [&]() -> std::string {
      if (i + 1 >= count) fail(option, " wants a value; see --help");
      return values[++i];
    };
    if (option == "--help") made.help = true;
    else if (option == "--list") made.list = true;
    else if (option == "--check") made.check = made.options.verify = true;
    else if (option == "--json") made.json = true;
    else if (option == "--random") made.run.random = true;
    else if (option == "--verify") made.options.verify = true;
    else if (option == "--resident") made.options.resident = true;
    else if (option == "--inputs") made.run.inputs = value();
    else if (option == "--outputs") made.run.outputs = value();
    else if (option == "--shape") made.run.shapes.push_back(value());
    else if (option == "--repeat") made.run.repeat = whole(value(), option);
    else if (option == "--rtol") made.run.relative = real(value(), option);
    else if (option == "--atol") made.run.absolute = real(value(), option);
    else if (option == "--tokens") made.tokens = whole(value(), option);
    else if (option == "--weights") made.options.weights = value();
    else if (option == "--torch") made.options.torch = value();
    else if (option == "--threads") made.threads = whole(value(), option);
    else if (option == "--size") {
      const std::string size = value();
      const size_t equals = std::min(size.find('='), size.size() - 1);
      made.run.sizes[size.substr(0, equals)] = whole(size.substr(equals + 1), option);
    } else if (option == "--generate") {
      std::stringstream ids(value());
      for (std::string id; std::getline(ids, id, ',');) made.prompt.push_back(whole(id, option));
    } else if (option.rfind("--", 0) == 0) fail("unknown option ", option, "; see --help");
    else if (made.package.empty()) made.package = option;
    else made.methods.push_back(option);
  }
  if (made.package.empty() && !made.help) fail("which package? see --help");
  return made;
}

}  // namespace bitport::runner
