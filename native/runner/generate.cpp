#include "generate.h"
#include <algorithm>
#include <numeric>
#include "measure.h"
#include "numbers.h"

namespace bitport::runner {
namespace {

int64_t most_likely(const std::vector<Tensor>& outputs, const std::string& method) {
  if (outputs.empty() || !outputs[0].count()) fail(method, " gives no logits");
  const Tensor dense = outputs[0].dense();
  if (!value_at(dense, 0))
    fail(method, " gives logits of the type ", text_of(*dense.type, dense.sizes), ", whose numbers this runner does not read");
  int64_t best = 0;
  for (int64_t i = 1, count = dense.count(); i < count; ++i)
    if (*value_at(dense, i) > *value_at(dense, best)) best = i;
  return best;
}

// Generated code ends the process at an index beyond a table of floats. The logits have one number for each token.
void check_ids(const std::vector<int64_t>& prompt, const Method& method) {
  const Sizes logits = method.outputs().empty() ? Sizes() : method.outputs()[0].sizes({});
  const int64_t largest = *std::max_element(prompt.begin(), prompt.end());
  if (!logits.empty() && largest >= logits.back())
    fail("the prompt has the token ", largest, "; the model knows those from 0 to ", logits.back() - 1);
}

}  // namespace

Generated generate(Program& program, const std::vector<int64_t>& prompt, int64_t count) {
  if (!program.manifest() || program.manifest()->meta["kind"].is_null() || program.manifest()->meta["kind"].text("kind") != "causal-lm")
    fail("this package is no language model: export one with `bitport export`");
  if (prompt.empty()) fail("the prompt is empty");
  const Json& meta = program.manifest()->meta;
  const int64_t capacity = meta["capacity"].number("capacity");
  const Sizes ends = meta["eos"].is_list() ? meta["eos"].sizes("eos") : meta["eos"].is_null() ? Sizes() : Sizes{meta["eos"].number("eos")};
  const auto ended = [&](int64_t id) { return std::find(ends.begin(), ends.end(), id) != ends.end(); };
  const auto length = int64_t(prompt.size());
  if (length > capacity) fail("a prompt of ", length, " tokens; the cache holds ", capacity);

  const Method& decode = program.load("decode");
  check_ids(prompt, decode);
  std::vector<Tensor> inputs(2);   // ids, positions, caches
  for (size_t i = 2; i < decode.inputs().size(); ++i)
    inputs.push_back(Tensor::zeros(*decode.inputs()[i].type, decode.inputs()[i].sizes({})));
  const auto step = [&](const Method& method, const std::vector<int64_t>& ids, int64_t first) {
    std::vector<int64_t> positions(ids.size());
    std::iota(positions.begin(), positions.end(), first);
    inputs[0] = Tensor::of("I64", {1, int64_t(ids.size())}, ids);
    inputs[1] = Tensor::of("I64", {int64_t(ids.size())}, positions);
    return most_likely(method.run(inputs), method.name());
  };

  Generated made;
  if (count < 1) return made;
  double start = now_ms();
  made.ids.push_back(step(length > 1 ? program.load("prefill") : decode, prompt, 0));
  made.prompt_ms = now_ms() - start;
  start = now_ms();
  for (int64_t at = length; at < capacity && int64_t(made.ids.size()) < count && !ended(made.ids.back()); ++at)
    made.ids.push_back(step(decode, {made.ids.back()}, at));
  made.tokens_ms = now_ms() - start;
  return made;
}

}  // namespace bitport::runner
