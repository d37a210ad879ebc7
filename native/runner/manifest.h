// What a package says of itself in extra/bitport.json (docs/deploy.md): its target, methods, their inputs and outputs.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>
#include "json.h"
#include "tensor.h"

namespace bitport::runner {

// Least and most of a size that has a name.
struct Range {
  int64_t least = 0, most = 0;
};
using Ranges = std::map<std::string, Range>;
using Named = std::map<std::string, int64_t>;

struct Argument {
  std::string name;
  const Type* type = nullptr;
  std::vector<std::string> shape;   // of each dimension the number, or the name of a size, or an expression of such
  bool mutated = false;             // written into by a call: the caller keeps it from call to call

  // A Failure unless a tensor of this type and these sizes fits; names met for the first time get their size.
  void check(const Type& given, const Sizes& sizes, const Ranges& ranges, Named& named) const;
  bool has_fixed_sizes() const;
  // The sizes with these for the names.
  Sizes sizes(const Named& named) const;
};

// A part of the package, and what it must be.
struct Part {
  std::string entry;
  uint64_t size = 0;
  uint32_t crc = 0;
};

struct Example {
  std::string entry;
  std::map<std::string, double> allowed;   // by how much "output.0", .. may differ; what is not named: not at all
};

// A tensor that the code wants, and where it lies in the weight file.
struct Constant {
  const Type* type = nullptr;
  Sizes sizes;
  uint64_t at = 0;
};
using Constants = std::map<std::string, Constant>;   // by what the code calls one

Constants read_constants(std::string_view text, const std::string& where);

struct MethodManifest {
  Part code;
  std::string constants;       // the entry of their list
  uint64_t constant_count = 0;
  std::vector<Argument> inputs, outputs;
  std::optional<Example> example;
};

struct Manifest {
  std::string torch, machine, level;
  Part weights;               // entry is empty where there are none, or where they are a file of their own
  Part header;                // how the weight file begins: what tensors lie where
  std::string weights_file;   // beside the package
  std::map<std::string, MethodManifest> methods;
  Ranges ranges;
  Json meta;

  static Manifest parse(std::string_view text, const std::string& where);
  // A Failure unless this machine can run the code.
  void check_machine() const;
};

}  // namespace bitport::runner
