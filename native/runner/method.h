// One method of a package, ready to run: its library, and its constants, which lie where the weight file is mapped.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>
#include "manifest.h"

namespace bitport::runner {

// What a method is made of; checked before.
struct MethodSource {
  std::string name;
  Bytes code;                                       // a shared library
  std::map<std::string, Tensor> constants;          // as the code names them; empty: the code brings its own
  std::vector<Argument> inputs, outputs;            // empty: not known, nothing is checked
  Ranges ranges;
};

// Loads torch's library, which the first method does otherwise.
void load_torch(const std::string& folder);

class Method {
 public:
  explicit Method(MethodSource source, const std::string& torch_folder = "");

  const std::string& name() const;
  const std::vector<Argument>& inputs() const;
  const std::vector<Argument>& outputs() const;
  size_t input_count() const;

  // Inputs must fit (a Failure says what does not) and be dense. An output may share memory with an input or a constant, and
  // keeps it. Calls from several threads take turns.
  std::vector<Tensor> run(const std::vector<Tensor>& inputs) const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

}  // namespace bitport::runner
