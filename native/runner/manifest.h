// The manifest of a package, extra/bitport.json (docs/deploy.md): its target, methods, their inputs and outputs.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>
#include "json.h"
#include "tensor.h"

namespace bitport::runner {

// The limits of a named size.
struct Range {
  int64_t least = 0, most = 0;
};
using Ranges = std::map<std::string, Range>;
using Named = std::map<std::string, int64_t>;

struct Argument {
  std::string name;
  const Type* type = nullptr;
  std::vector<std::string> shape;   // per dimension a number, the name of a size, or an expression of names
  bool mutated = false;             // written by a call: the caller keeps the tensor from call to call

  // Throws a Failure unless a tensor of this type and sizes fits; binds names that are not yet in `named`.
  void check(const Type& given, const Sizes& sizes, const Ranges& ranges, Named& named) const;
  bool has_fixed_sizes() const;
  // The sizes with names replaced by values.
  Sizes sizes(const Named& named) const;
};

// An entry of the package, with its expected size and checksum.
struct Part {
  std::string entry;
  uint64_t size = 0;
  uint32_t crc = 0;
};

struct Example {
  std::string entry;
  std::map<std::string, double> allowed;   // tolerances of "output.0", ..; 0 if not listed
};

// A tensor that the code needs, and its offset in the weight file.
struct Constant {
  const Type* type = nullptr;
  Sizes sizes;
  uint64_t at = 0;
};
using Constants = std::map<std::string, Constant>;   // by the name used in the code

Constants read_constants(std::string_view text, const std::string& where);

struct MethodManifest {
  Part code;
  std::string constants;       // the entry with the list of constants
  uint64_t constant_count = 0;
  std::vector<Argument> inputs, outputs;
  std::optional<Example> example;
};

struct Manifest {
  std::string torch, machine, level;
  Part weights;               // entry is empty without weights, or if they are in a separate file
  Part header;                // the header of the weight file, which lists the tensors and their offsets
  std::string weights_file;   // next to the package
  std::map<std::string, MethodManifest> methods;
  Ranges ranges;
  Json meta;

  static Manifest parse(std::string_view text, const std::string& where);
  // Throws a Failure unless this machine can run the code.
  void check_machine() const;
};

}  // namespace bitport::runner
