#include "manifest.h"
#include <algorithm>
#include <limits>

namespace bitport::runner {
namespace {

constexpr int64_t kVersion = 3;

#if defined(__x86_64__)
constexpr char kMachine[] = "x86_64";
bool has_level(const std::string& level) {
  __builtin_cpu_init();
  if (level == "x86-64" || level.empty()) return true;
  if (level == "x86-64-v2") return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt");
  const bool third = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  if (level == "x86-64-v3") return third;
  if (level != "x86-64-v4") fail("the code is of the unknown level ", level, "; a newer runner may know it");
  return third && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#else
constexpr char kMachine[] = "aarch64";
bool has_level(const std::string&) { return true; }
#endif

bool is_number(const std::string& size) { return size.find_first_not_of("0123456789") == size.npos; }

Part part_of(const Json& from) {
  const uint64_t crc = from["crc32"].size("crc32");
  if (crc > std::numeric_limits<uint32_t>::max()) fail("crc32 has more than 32 bits");
  return {from["entry"].is_null() ? "" : from["entry"].text("entry"), from["size"].size("size"), uint32_t(crc)};
}

Argument argument_of(const Json& from, const Ranges& ranges, bool given) {
  Argument made;
  made.name = from["name"].text("name");
  return about(made.name, [&] {
    made.type = &type_of(from["dtype"].text("dtype"));
    for (const Json& size : from["shape"].array("shape")) {
      const std::string text = size.is_text() ? size.text("a size") : std::to_string(size.size("a size"));
      if (size.is_text() && (is_number(text) || (given && !ranges.count(text))))
        fail("the size '", text, "' is neither a number nor in dims");
      made.shape.push_back(text);
    }
    Sizes sizes;
    for (const std::string& size : made.shape) sizes.push_back(is_number(size) ? std::stoll(size) : 1);
    count_of(sizes, made.type->bytes);
    made.mutated = !from["mutated"].is_null() && from["mutated"].truth("mutated");
    return std::move(made);
  });
}

MethodManifest method_of(const Json& from, const Ranges& ranges) {
  MethodManifest made;
  made.code = about("code", [&] { return part_of(from["code"]); });
  made.constants = from["constants"]["entry"].text("constants: entry");
  made.constant_count = from["constants"]["count"].size("constants: count");
  for (const Json& each : from["inputs"].array("inputs")) made.inputs.push_back(argument_of(each, ranges, true));
  for (const Json& each : from["outputs"].array("outputs")) made.outputs.push_back(argument_of(each, ranges, false));
  if (const Json& example = from["example"]; !example.is_null()) {
    made.example = {example["entry"].text("example"), {}};
    for (const auto& [output, allowed] : example["atol"].object("atol"))
      made.example->allowed[output] = allowed.real("atol of " + output);
  }
  return made;
}

}  // namespace

Constants read_constants(std::string_view text, const std::string& where) {
  Constants made;
  const Json json = Json::parse(text, where);
  for (const auto& [name, wanted] : json.object(where))
    about(name, [&, &name = name, &wanted = wanted] {
      made[name] = {&type_of(wanted["dtype"].text("dtype")), wanted["shape"].sizes("shape"), wanted["at"].size("at")};
    });
  return made;
}

Manifest Manifest::parse(std::string_view text, const std::string& where) {
  const Json json = Json::parse(text, where);
  return about(where, [&] {
    if (json["format"].text("format") != "bitport-package") fail("the format is not bitport-package");
    if (const int64_t version = json["version"].number("version"); version != kVersion)
      fail("version ", version, " of the format; this runner reads version ", kVersion, ": use the runner of the bitport that exported it");
    Manifest made;
    made.torch = json["torch"].text("torch");
    if (const std::string device = json["target"]["device"].text("device"); device != "cpu")
      fail("made for the device ", device, "; this runner runs cpu");
    made.machine = json["target"]["machine"].text("machine");
    made.level = json["target"]["level"].is_null() ? "" : json["target"]["level"].text("level");
    if (const Json& weights = json["weights"]; !weights.is_null()) {
      made.weights = about("weights", [&] { return part_of(weights); });
      made.header = about("weights: header", [&] { return part_of(weights["header"]); });
      made.weights_file = weights["file"].is_null() ? "" : weights["file"].text("weights: file");
      if (made.weights_file.empty() == made.weights.entry.empty()) fail("weights: either entry or file must stand there");
      if (made.weights_file.find('/') != made.weights_file.npos) fail("weights: file must be a name without a folder");
    }
    for (const auto& [name, range] : json["dims"].object("dims")) {
      const Sizes least_most = {range.array(name).size() == 2 ? int64_t(range.array(name)[0].size(name)) : -1,
                                range.array(name).size() == 2 && !range.array(name)[1].is_null()
                                    ? int64_t(range.array(name)[1].size(name))
                                    : std::numeric_limits<int32_t>::max()};
      if (least_most[0] < 0 || least_most[1] < least_most[0]) fail("dims: ", name, " must be [least, most]");
      made.ranges[name] = {least_most[0], least_most[1]};
    }
    for (const auto& [name, method] : json["methods"].object("methods"))
      made.methods.emplace(name, about(name, [&, &method = method] { return method_of(method, made.ranges); }));
    made.meta = json["meta"];
    return made;
  });
}

void Manifest::check_machine() const {
  if (machine != kMachine) fail("compiled for ", machine, "; this machine is ", kMachine, ": export the model for it");
  if (!has_level(level))
    fail("compiled for processors of the level ", level, ", which this one is not: export the model for a lower level");
}

void Argument::check(const Type& given, const Sizes& given_sizes, const Ranges& ranges, Named& named) const {
  const std::string wanted = std::string(type->name) + "[" + joined(shape);
  const auto refuse = [&](const std::string& why) { fail(name, ": ", text_of(given, given_sizes), " was given, ", wanted, "] is wanted", why); };
  if (&given != type || given_sizes.size() != shape.size()) refuse("");
  for (size_t i = 0; i < shape.size(); ++i) {
    if (is_number(shape[i])) {
      if (given_sizes[i] != std::stoll(shape[i])) refuse("");
      continue;
    }
    const auto range = ranges.find(shape[i]);
    if (range == ranges.end()) continue;   // an expression of an output
    const auto [met, first] = named.emplace(shape[i], given_sizes[i]);
    if (met->second != given_sizes[i]) refuse(", " + shape[i] + " is " + std::to_string(met->second) + " elsewhere");
    if (first && (given_sizes[i] < range->second.least || given_sizes[i] > range->second.most))
      refuse(", " + shape[i] + " from " + std::to_string(range->second.least) + " to " + std::to_string(range->second.most));
  }
}

bool Argument::has_fixed_sizes() const { return std::all_of(shape.begin(), shape.end(), is_number); }

Sizes Argument::sizes(const Named& named) const {
  Sizes made;
  for (const std::string& size : shape) {
    const auto found = named.find(size);
    if (found == named.end() && !is_number(size)) fail(name, ": the size ", size, " is not given");
    made.push_back(found != named.end() ? found->second : std::stoll(size));
  }
  return made;
}

}  // namespace bitport::runner
