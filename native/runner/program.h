// A package that `bitport export` or torch's AOTInductor made, in a program without Python:
//
//   bitport::runner::Program program("model.pt2");
//   const auto& method = program.load("decode");
//   std::vector<Tensor> outputs = method.run(inputs);
//
// Whatever is wrong (a damaged file, another machine's code, inputs that do not fit) is a Failure that says so. A package
// is a program and can do what a program can: run those of people you trust. The checks find damage, not malice.
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
  std::string torch;       // the folder of libtorch_cpu.so; empty: where the system's loader finds it
  std::string weights;     // a file instead of the weights that the package names: the same tensors in the same places
  bool verify = false;     // the checksum of the weights too, which reads them all (that of the code is always checked)
  bool resident = false;   // a method's weights are in memory when it is loaded, not when they are first used
};

class Program {
 public:
  explicit Program(const std::string& path, Options options = {});

  std::vector<std::string> methods() const;
  // All that can be checked without loading anything: the code, constants and examples of every method, and their
  // checksums.
  void check();
  // Loaded at the first call, and kept.
  const Method& load(const std::string& name);
  // Inputs and outputs recorded at export; empty where there are none.
  TensorFile example(const std::string& name) const;
  // None where torch alone made the package.
  const std::optional<Manifest>& manifest() const { return manifest_; }

 private:
  std::string entry(const std::string& below) const { return root_ + below; }
  void find_methods();
  void find_weights();
  Bytes code_of(const std::string& name) const;
  std::map<std::string, Tensor> constants_of(const std::string& name) const;

  std::string path_;
  Options options_;
  std::shared_ptr<const MappedFile> file_;
  Zip zip_;
  std::string root_;   // the folder in the archive below which all lies, with its slash
  std::map<std::string, std::string> code_;   // method -> entry
  std::optional<Manifest> manifest_;
  struct Stored {
    std::shared_ptr<const MappedFile> file;
    Bytes bytes;
    std::string where;
  };
  std::optional<Stored> weights_;   // none where the code holds its own
  std::map<std::string, Method> loaded_;
};

}  // namespace bitport::runner
