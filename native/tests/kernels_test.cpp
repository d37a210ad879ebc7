// The kernels in every instruction set of this machine, to be run under sanitizers: make sanitize.
//   kernels_test [weights [seed]]
#include "../kernels/bitport_kernels.h"
#include "check.h"
#include "tests.h"

int main(int argc, char** argv) {
  const long long weights = argc > 1 ? std::atoll(argv[1]) : 500;
  const unsigned long long seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  try_refusals();
  try_attention_refusals();
  try_scales_that_are_none();
  try_rows_that_are_not_there();
  try_moments_that_are_none();
  try_rows_alike();
  try_threads(seed);
  try_crc32(seed);
  for (long long i = 0; i < weights; ++i) {
    try_weight(i, seed);
    try_quantize(i, seed);
    try_attention(i, seed);
    if ((i + 1) % 100 == 0) std::fprintf(stderr, "%lld weights\n", i + 1);
  }
  std::printf("%lld cases, %lld random weights, seed %llu, up to %s: no fault\n", cases, weights, seed,
              bitport_isa_name(bitport_best_isa()));
}
