// The command line arguments.
#pragma once
#include <string>
#include <vector>
#include "measure.h"

namespace bitport::runner {

struct Arguments {
  std::string package;
  std::vector<std::string> methods;
  Options options;
  RunOptions run;
  std::vector<int64_t> prompt;
  int64_t tokens = 32;
  int64_t threads = 0;   // 0: the default of OpenMP
  bool help = false, list = false, check = false, json = false;
};

extern const char kHelp[];
Arguments arguments_of(int count, char** values);

}  // namespace bitport::runner
