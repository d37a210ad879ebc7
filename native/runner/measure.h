// Runs and times a method: its inputs, the comparison with recorded outputs, and timings.
#pragma once
#include <optional>
#include <string>
#include <vector>
#include "numbers.h"
#include "program.h"

namespace bitport::runner {

struct RunOptions {
  std::string inputs;                  // a file of inputs and expected outputs
  std::string outputs;                 // a file to write
  std::vector<std::string> shapes;     // random inputs, for packages without a manifest: "bf16[1,2048]"
  Named sizes;                         // values of named sizes
  bool random = false;                 // random inputs even if there are recorded ones
  int64_t repeat = 20;
  double relative = 0, absolute = -1;  // tolerances of outputs; negative: as recorded
};

struct Report {
  std::string method;
  std::vector<std::string> inputs;
  double load_ms = 0, first_ms = 0;
  std::vector<double> times_ms;        // sorted
  std::optional<Difference> check;     // empty: nothing was recorded

  // A quantile of times_ms by rank: at least this share of the runs took no longer.
  double quantile(double share) const;
};

Report measure(Program& program, const std::string& method, const RunOptions& options);
double now_ms();

}  // namespace bitport::runner
