// Runs a method on a tensor of a file where it lies, without the copy that bitport-run makes.
//
//   skewed PACKAGE.pt2 METHOD FILE.safetensors TENSOR FOLDER-OF-TORCH
#include <cstdio>
#include "../program.h"

using namespace bitport::runner;

int main(int count, char** values) {
  if (count != 6) return std::fprintf(stderr, "usage: skewed PACKAGE.pt2 METHOD FILE.safetensors TENSOR FOLDER-OF-TORCH\n"), 1;
  try {
    load_torch(values[5]);
    Program(values[1]).load(values[2]).run({read_tensors(values[3]).at(values[4])});
    return 0;
  } catch (const Failure& failure) {
    return std::fprintf(stderr, "%s\n", failure.what()), 1;
  }
}
