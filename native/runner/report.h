// The results of a run, as text or as a JSON object.
#pragma once
#include <string>
#include <vector>
#include "generate.h"
#include "measure.h"

namespace bitport::runner {

struct Summary {
  double program_ms = 0, torch_ms = 0;
  std::vector<Report> methods;
};

std::string text_of(const Summary& summary);
std::string json_of(const Summary& summary);
std::string text_of(const Generated& made);
std::string json_of(const Generated& made);
std::string json_list(const std::vector<std::string>& texts);

}  // namespace bitport::runner
