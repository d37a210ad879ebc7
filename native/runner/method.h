// A method of a package, ready to run: its library, and its constants, which are in the mapped weight file.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>
#include "manifest.h"

namespace bitport::runner {

// The validated parts of a method.
struct MethodSource {
  std::string name;
  Bytes code;                                       // a shared library
  std::map<std::string, Tensor> constants;          // by the names in the code; empty: embedded in the code
  std::vector<Argument> inputs, outputs;            // empty: unknown, not checked
  Ranges ranges;
};

// Loads torch's library; otherwise loading the first method does.
void load_torch(const std::string& folder);

class Method {
 public:
  explicit Method(MethodSource source, const std::string& torch_folder = "");

  const std::string& name() const;
  const std::vector<Argument>& inputs() const;
  const std::vector<Argument>& outputs() const;
  size_t input_count() const;

  // Inputs must match (a Failure says what does not), be contiguous, and begin at a multiple of the size of an element.
  // An output may share memory with an input or a constant, and keeps it alive. Concurrent calls are serialized.
  std::vector<Tensor> run(const std::vector<Tensor>& inputs) const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

}  // namespace bitport::runner
