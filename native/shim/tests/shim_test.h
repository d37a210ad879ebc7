// The tests that shim_test runs, and the checks for a refusal.
#pragma once
#include <cmath>
#include <random>
#include <string>
#include "../../kernels/number.h"
#include "../../tests/check.h"
#include "host.h"

using Random = std::mt19937_64;

void try_tinygemm(Random& random);
void refuse_tinygemm();
void try_ops(Random& random);
void refuse_ops();
void try_attention(Random& random);
void refuse_attention();

// Checks that `code` is InvalidArgument, the message mentions `about`, the result was not written and nothing leaked.
inline void expect_refused(const char* what, AOTITorchError code, AtenTensorHandle result, AtenTensorHandle before,
                           const char* about) {
  EXPECT(code == BITPORT_INVALID_ARGUMENT, "%s: code %d", what, code);
  EXPECT(std::string(bitport_shim_error()).find(about) != std::string::npos, "%s: '%s' does not speak of %s", what,
         bitport_shim_error(), about);
  EXPECT(result == before, "%s: the result was written", what);
  EXPECT(host::alive == 0, "%s: a tensor was left behind", what);
  ++cases;
}

inline double uniform(Random& random, double low, double high) {
  return std::uniform_real_distribution<double>(low, high)(random);
}
