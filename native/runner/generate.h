// Greedy generation with a package of a causal language model (docs/deploy.md: methods prefill and decode).
#pragma once
#include <cstdint>
#include <vector>
#include "program.h"

namespace bitport::runner {

struct Generated {
  std::vector<int64_t> ids;   // the new ones
  double prompt_ms = 0, tokens_ms = 0;
};

// The most likely token again and again, until `count` tokens, the end of the text, or the end of the cache.
Generated generate(Program& program, const std::vector<int64_t>& prompt, int64_t count);

}  // namespace bitport::runner
