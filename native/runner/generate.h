// Greedy generation with a package of a causal language model (docs/deploy.md: methods prefill and decode).
#pragma once
#include <cstdint>
#include <vector>
#include "program.h"

namespace bitport::runner {

struct Generated {
  std::vector<int64_t> ids;   // the new tokens
  double prompt_ms = 0, tokens_ms = 0;
};

// Generates the most likely token until `count` tokens, an end-of-text token, or the end of the cache.
Generated generate(Program& program, const std::vector<int64_t>& prompt, int64_t count);

}  // namespace bitport::runner
