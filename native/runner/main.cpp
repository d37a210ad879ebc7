// bitport-run: runs the methods of a package, compares them with recorded outputs, and times them.
#include <cstdlib>
#include <iostream>
#include "arguments.h"
#include "report.h"

using namespace bitport::runner;

namespace {

constexpr int kFailed = 1, kDiffers = 2;

int run(const Arguments& given) {
  const auto say = [&](const std::string& text, const std::string& json) { std::cout << (given.json ? json : text); };
  if (given.help) return say(kHelp, json_text(kHelp) + "\n"), 0;
  if (given.threads)
    for (const char* name : {"OMP_NUM_THREADS", "MKL_NUM_THREADS"})   // read when torch is loaded
      setenv(name, std::to_string(given.threads).c_str(), 1);
  Summary summary;
  double start = now_ms();
  Program program(given.package, given.options);
  summary.program_ms = now_ms() - start;
  if (!program.manifest()) setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", 0);   // the code then rejects mismatched inputs itself
  if (given.check) program.check();
  if (given.check || given.list) {
    std::string lines;
    for (const std::string& name : program.methods()) lines += name + "\n";
    return say(lines, "{\"methods\": " + json_list(program.methods()) + "}\n"), 0;
  }
  start = now_ms();
  load_torch(given.options.torch);
  summary.torch_ms = now_ms() - start;
  if (!given.prompt.empty()) {
    const Generated made = generate(program, given.prompt, given.tokens);
    return say(text_of(made), json_of(made)), 0;
  }
  const std::vector<std::string> methods = given.methods.empty() ? program.methods() : given.methods;
  if (methods.size() != 1 && (!given.run.inputs.empty() || !given.run.outputs.empty() || !given.run.shapes.empty()))
    fail("name one method for --inputs, --outputs or --shape; the package has ", json_list(program.methods()));
  bool ok = true;
  for (const std::string& name : methods) {
    const Report report = measure(program, name, given.run);
    ok &= !report.check || report.check->ok();
    summary.methods.push_back(report);
  }
  say(text_of(summary), json_of(summary));
  return ok ? 0 : kDiffers;
}

}  // namespace

int main(int count, char** values) {
  try {
    return run(arguments_of(count, values));
  } catch (const std::exception& failure) {   // the outermost handler: std::bad_alloc has a message, too
    std::cerr << "bitport-run: " << failure.what() << "\n";
    return kFailed;
  }
}
