// The C functions on tensors, without torch.   shim_test [rounds [seed]]
#include <cstdlib>
#include "shim_test.h"

int main(int count, char** arguments) {
  const long rounds = count > 1 ? std::atol(arguments[1]) : 20;
  Random random(count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1);
  std::fprintf(stderr, "Wrong arguments, which must be refused. Until the next line like this one each line is a refusal as wanted:\n");
  refuse_tinygemm();
  refuse_ops();
  refuse_attention();
  std::fprintf(stderr, "All %lld refusals were as wanted. From here on every line would be a fault.\n", cases);
  for (long round = 0; round < rounds; ++round) {
    try_tinygemm(random);
    try_ops(random);
    try_attention(random);
  }
  std::printf("%lld cases: no fault\n", cases);
  return 0;
}
