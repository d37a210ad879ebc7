#include "measure.h"
#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <set>

namespace bitport::runner {
namespace {

// "bf16[1,2048]" or "BF16[1, 2048]"
Tensor random_of(const std::string& text, uint64_t seed) {
  static const std::map<std::string, std::string> kShort = {{"f32", "F32"}, {"bf16", "BF16"}, {"f16", "F16"}, {"f64", "F64"},
                                                            {"i64", "I64"}, {"i32", "I32"},   {"u8", "U8"},   {"bool", "BOOL"}};
  const size_t open = text.find('[');
  if (open == text.npos || text.back() != ']') fail("--shape ", text, ": write a type and its sizes: bf16[1,2048]");
  const std::string name = text.substr(0, open);
  const Json sizes = Json::parse(text.substr(open), "--shape " + text);
  const auto known = kShort.find(name);
  return random_tensor(type_of(known == kShort.end() ? name : known->second), sizes.sizes("--shape " + text), seed);
}

// Copies, since a method may write into its inputs. Missing inputs of fixed sizes are zeros.
std::vector<Tensor> recorded_inputs(const Method& method, const Tensors& file, const std::string& where) {
  std::vector<Tensor> made;
  for (size_t i = 0; i < method.input_count(); ++i) {
    const std::string key = "input." + std::to_string(i);
    const auto found = file.find(key);
    const Argument* input = i < method.inputs().size() ? &method.inputs()[i] : nullptr;
    if (found != file.end()) made.push_back(copy_of(found->second));
    else if (input && input->has_fixed_sizes()) made.push_back(Tensor::zeros(*input->type, input->sizes({})));
    else fail(where, ": ", key, " is missing");
  }
  return made;
}

std::vector<Tensor> random_inputs(const Program& program, const Method& method, const RunOptions& options) {
  std::vector<Tensor> made;
  if (!options.shapes.empty() || !program.manifest()) {
    if (options.shapes.size() != method.input_count())
      fail(method.name(), " takes ", method.input_count(), " inputs: give --inputs FILE, or --shape TYPE[SIZES] for each");
    for (const std::string& shape : options.shapes) made.push_back(random_of(shape, made.size()));
    return made;
  }
  Named sizes = options.sizes;
  for (const auto& [name, range] : program.manifest()->ranges)
    sizes.emplace(name, range.most < std::numeric_limits<int32_t>::max() ? range.most : range.least);
  for (const Argument& input : method.inputs())
    made.push_back(input.mutated ? Tensor::zeros(*input.type, input.sizes(sizes))
                                 : random_tensor(*input.type, input.sizes(sizes), made.size()));
  return made;
}

// Rejects unknown names: a misspelt input would otherwise silently be replaced by zeros.
void check_names(const Method& method, const Tensors& file, const Tensors& results, const std::string& where) {
  std::set<std::string> known;
  for (const auto& [name, tensor] : results) known.insert(name);
  for (size_t i = 0; i < method.input_count(); ++i) known.insert("input." + std::to_string(i));
  for (const auto& [name, tensor] : file)
    if (!known.count(name)) fail(where, ": ", name, " is nothing that ", method.name(), " takes or gives, which is ", joined(known));
}

void check_sizes(const Program& program, const RunOptions& options) {
  const Ranges known = program.manifest() ? program.manifest()->ranges : Ranges();
  for (const auto& [name, size] : options.sizes)
    if (!known.count(name))
      fail("--size ", name, ": this package has ",
           known.empty() ? "no sizes with names" : "the sizes " + joined(known, [](const auto& each) { return each.first; }));
}

}  // namespace

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double Report::quantile(double share) const {
  if (times_ms.empty()) return NAN;
  const auto rank = size_t(std::ceil(share * double(times_ms.size())));
  return times_ms[std::max<size_t>(rank, 1) - 1];
}

Report measure(Program& program, const std::string& name, const RunOptions& options) {
  check_sizes(program, options);
  Report report;
  report.method = name;
  const double start = now_ms();
  const Method& method = program.load(name);
  report.load_ms = now_ms() - start;

  Tensors recorded;
  if (!options.inputs.empty()) recorded = read_tensors(options.inputs);
  else if (!options.random && options.shapes.empty()) recorded = program.example(name);
  const std::string where = options.inputs.empty() ? "the example of " + name : options.inputs;
  const bool drawn = options.inputs.empty() && recorded.empty();
  if (!drawn && !options.sizes.empty()) fail("--size is for random inputs: give --random too, or leave ", where, " its sizes");
  const std::vector<Tensor> inputs = drawn ? random_inputs(program, method, options) : recorded_inputs(method, recorded, where);
  for (const Tensor& input : inputs) report.inputs.push_back(text_of(*input.type, input.sizes));

  const double first = now_ms();
  std::vector<Tensor> outputs = method.run(inputs);
  report.first_ms = now_ms() - first;

  Tensors results;
  for (size_t i = 0; i < outputs.size(); ++i) results["output." + std::to_string(i)] = outputs[i];
  for (size_t i = 0; i < method.inputs().size(); ++i)
    if (method.inputs()[i].mutated) results["after." + std::to_string(i)] = inputs[i];
  if (!options.inputs.empty()) check_names(method, recorded, results, where);
  std::map<std::string, double> allowed;
  if (program.manifest() && program.manifest()->methods.at(name).example) allowed = program.manifest()->methods.at(name).example->allowed;
  for (const auto& [key, result] : results) {
    const auto want = recorded.find(key);
    if (want == recorded.end()) continue;
    const double absolute = options.absolute >= 0 ? options.absolute : allowed[key];
    const Difference difference = compare(result, want->second, options.relative, absolute);
    if (!report.check) report.check = Difference();
    report.check->alike &= difference.alike;
    report.check->beyond += difference.beyond;
    report.check->worst = std::max(report.check->worst, difference.worst);
  }
  if (!options.outputs.empty()) write_tensors(options.outputs, results);

  for (int64_t i = 0; i < options.repeat; ++i) {
    const double begin = now_ms();
    outputs = method.run(inputs);
    report.times_ms.push_back(now_ms() - begin);
  }
  std::sort(report.times_ms.begin(), report.times_ms.end());
  return report;
}

}  // namespace bitport::runner
