// Runs a package made by `bitport export` or torch's AOTInductor, without Python:
//
//   bitport::runner::Program program("model.pt2");
//   const auto& method = program.load("decode");
//   std::vector<Tensor> outputs = method.run(inputs);
//
// Any error (a damaged file, code for another machine, inputs that do not match) is a Failure with an explanation. A
// package is a program and can do what a program can: only run packages you trust. The checks find damage, not malice.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>
#include "method.h"
#include "safetensors.h"
#include "zip.h"

namespace bitport::runner {

struct Options {
  std::string torch;       // the folder of libtorch_cpu.so; empty: the search path of the dynamic loader
  std::string weights;     // a file to use instead of the package's weights: the same tensors at the same offsets
  bool verify = false;     // verify the weights' checksum, which reads them all (that of the code is always verified)
  bool resident = false;   // load the weights of a method into memory with the method, not on first use
};

class Program {
 public:
  explicit Program(const std::string& path, Options options = {});

  std::vector<std::string> methods() const;
  // Checks everything that does not require loading: the code, constants and examples of every method, and their
  // checksums.
  void check();
  // Loads a method on the first call, and keeps it.
  const Method& load(const std::string& name);
  // Inputs and outputs recorded at export; empty if there are none.
  Tensors example(const std::string& name) const;
  // Empty for a package made by torch alone.
  const std::optional<Manifest>& manifest() const { return manifest_; }

 private:
  std::string entry(const std::string& below) const { return root_ + below; }
  void find_methods();
  void find_weights();
  Bytes code_of(const std::string& name) const;
  Tensors constants_of(const std::string& name) const;

  std::string path_;
  Options options_;
  std::shared_ptr<const MappedFile> file_;
  Zip zip_;
  std::string root_;   // the top-level folder in the archive, with its slash
  std::map<std::string, std::string> code_;   // method -> entry
  std::optional<Manifest> manifest_;
  struct Stored {
    std::shared_ptr<const MappedFile> file;
    Bytes bytes;
    std::string where;
  };
  std::optional<Stored> weights_;   // empty if the code contains its weights
  std::map<std::string, Method> loaded_;
};

}  // namespace bitport::runner
