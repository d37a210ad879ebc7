#include "report.h"
#include <link.h>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include "json.h"

namespace bitport::runner {
namespace {

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", value);
  return std::isfinite(value) ? text : "null";
}

// The files of the shared libraries loaded in this process.
std::vector<std::string> libraries() {
  std::vector<std::string> names;
  dl_iterate_phdr([](dl_phdr_info* each, size_t, void* list) {
    if (*each->dlpi_name) static_cast<std::vector<std::string>*>(list)->push_back(each->dlpi_name);
    return 0;
  }, &names);
  return names;
}

// Private memory of this process in bytes, without mapped files.
int64_t own_memory() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.rfind("RssAnon:", 0) == 0) return std::strtoll(line.c_str() + 8, nullptr, 10) * 1024;
  return 0;
}

std::string about_process() {
  return "\"own_memory\": " + std::to_string(own_memory()) + ", \"libraries\": " + json_list(libraries());
}

std::string json_of(const Report& report) {
  std::string text = "{\"method\": " + json_text(report.method) + ", \"inputs\": " + json_list(report.inputs);
  text += ", \"load_ms\": " + number(report.load_ms) + ", \"first_ms\": " + number(report.first_ms);
  text += ", \"median_ms\": " + number(report.quantile(0.5)) + ", \"p99_ms\": " + number(report.quantile(0.99));
  text += ", \"runs\": " + std::to_string(report.times_ms.size());
  if (report.check)
    text += std::string(", \"check\": {\"ok\": ") + (report.check->ok() ? "true" : "false") + ", \"worst\": " +
            number(report.check->worst) + ", \"beyond\": " + std::to_string(report.check->beyond) + "}";
  return text + "}";
}

double token_ms(const Generated& made) { return made.ids.size() > 1 ? made.tokens_ms / double(made.ids.size() - 1) : NAN; }

}  // namespace

std::string json_list(const std::vector<std::string>& texts) { return "[" + joined(texts, json_text) + "]"; }

std::string text_of(const Summary& summary) {
  char line[256];
  std::snprintf(line, sizeof line, "program load %.3f ms, torch's library %.1f ms\n", summary.program_ms, summary.torch_ms);
  std::string text = line;
  for (const Report& report : summary.methods) {
    const auto milliseconds = [&](const char* name, double value) {
      std::snprintf(line, sizeof line, "  %s %10.3f ms", name, value);
      return std::string(std::isnan(value) ? "" : line);
    };
    text += report.method + std::string(report.method.size() < 16 ? 16 - report.method.size() : 0, ' ');
    text += milliseconds("load", report.load_ms) + milliseconds("first", report.first_ms) +
            milliseconds("median", report.quantile(0.5)) + milliseconds("p99", report.quantile(0.99));
    text += !report.check ? "  not compared" : report.check->ok() ? "  as recorded" : "  DIFFERS from what was recorded";
    if (report.check && !report.check->ok())
      text += report.check->alike ? ": " + std::to_string(report.check->beyond) + " elements, by up to " +
                                        (std::isfinite(report.check->worst) ? number(report.check->worst) : "infinity or NaN")
                                  : ": in type or sizes";
    text += "\n";
  }
  return text;
}

std::string json_of(const Summary& summary) {
  return "{\"program_ms\": " + number(summary.program_ms) + ", \"torch_ms\": " + number(summary.torch_ms) + ", \"methods\": [" +
         joined(summary.methods, [](const Report& report) { return json_of(report); }) + "], " + about_process() + "}\n";
}

std::string text_of(const Generated& made) {
  return joined(made.ids, [](int64_t id) { return std::to_string(id); }) + "\n";
}

std::string json_of(const Generated& made) {
  return "{\"ids\": [" + joined(made.ids, [](int64_t id) { return std::to_string(id); }) + "], \"prompt_ms\": " +
         number(made.prompt_ms) + ", \"token_ms\": " + number(token_ms(made)) + ", " + about_process() + "}\n";
}

}  // namespace bitport::runner
