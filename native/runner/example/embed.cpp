// Uses a package in your own program: creates inputs, runs a method, reads its outputs. See ../README.md for building.
#include <cstdio>
#include "runner/program.h"

using namespace bitport::runner;

int main(int count, char** values) {
  if (count != 3) return std::fprintf(stderr, "usage: embed PACKAGE.pt2 METHOD\n"), 1;
  try {
    Program program(values[1]);
    const Method& method = program.load(values[2]);
    std::vector<Tensor> inputs;
    for (const Argument& input : method.inputs()) {
      Named sizes;   // the smallest allowed values of named sizes
      for (const auto& [name, range] : program.manifest()->ranges) sizes[name] = range.least;
      inputs.push_back(Tensor::zeros(*input.type, input.sizes(sizes)));   // fill with your values: inputs.back().mutable_data()
    }
    for (const Tensor& output : method.run(inputs)) {
      const Tensor dense = output.dense();   // dense.data(): contiguous values
      std::printf("%s: %lld values\n", text_of(*dense.type, dense.sizes).c_str(), static_cast<long long>(dense.count()));
    }
    return 0;
  } catch (const Failure& failure) {
    std::fprintf(stderr, "embed: %s\n", failure.what());
    return 1;
  }
}
