#include "names.h"
#include <deque>
#include <string>
#include <vector>
#include "bitport_torch.h"

namespace bitport {
namespace {

struct NamedType { std::string name; std::vector<float> table; NumberType type; };
struct NamedCode { std::string name; int32_t code; };

// Written while bitport is loaded, only read by calls afterwards.
std::deque<NamedType>& types() { static std::deque<NamedType> all; return all; }
std::deque<NamedCode>& roundings() { static std::deque<NamedCode> all; return all; }
std::deque<NamedCode>& activations() { static std::deque<NamedCode> all; return all; }

int32_t code_of(const std::deque<NamedCode>& all, std::string_view name) {
  for (const NamedCode& known : all)
    if (known.name == name) return known.code;
  return -1;
}

}  // namespace

const NumberType* number_type(std::string_view name) {
  for (const NamedType& known : types())
    if (known.name == name) return &known.type;
  return nullptr;
}

int32_t rounding(std::string_view name) { return code_of(roundings(), name); }
int32_t activation(std::string_view name) { return code_of(activations(), name); }

}  // namespace bitport

int32_t bitport_name_type(const char* name, int32_t bits, int32_t integer, const float* table) {
  using namespace bitport;
  if (!name || !table || bits < 1 || bits > 8) return 1;
  if (number_type(name)) return 0;   // tables are referenced by address, and number types do not change
  NamedType& added = types().emplace_back();
  added.name = name;
  added.table.assign(table, table + (size_t(1) << bits));
  added.type.bits = bits;
  added.type.integer = integer;
  added.type.table = added.table.data();
  return 0;
}

int32_t bitport_limit_rows(const char* name, int32_t whole_row, int64_t most) {
  using namespace bitport;
  for (NamedType& known : types())
    if (name && known.name == name) {
      known.type.most_rows[whole_row != 0] = most < 0 ? INT64_MAX : most;
      return 0;
    }
  return 1;
}

int32_t bitport_name_rounding(const char* name, int32_t act) {
  using namespace bitport;
  if (!name || act < BITPORT_AS_IS || act > BITPORT_FP8_128) return 1;
  if (rounding(name) < 0) roundings().push_back({name, act});
  return 0;
}

int32_t bitport_name_activation(const char* name, int32_t then) {
  using namespace bitport;
  if (!name || then < BITPORT_NOTHING || then > BITPORT_SILU) return 1;
  if (activation(name) < 0) activations().push_back({name, then});
  return 0;
}
