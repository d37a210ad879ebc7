#include "weight.h"
#include <deque>
#include <string>
#include <vector>
#include "bitport_torch.h"

namespace bitport {
namespace {

struct NamedType { std::string name; std::vector<float> table; NumberType type; };
struct NamedCode { std::string name; int32_t code; };

// Written while bitport is loaded, read by every call after.
std::deque<NamedType>& types() { static std::deque<NamedType> all; return all; }
std::deque<NamedCode>& roundings() { static std::deque<NamedCode> all; return all; }
std::deque<NamedCode>& activations() { static std::deque<NamedCode> all; return all; }

int32_t code_of(const std::deque<NamedCode>& all, std::string_view name) {
  for (const NamedCode& known : all)
    if (known.name == name) return known.code;
  return -1;
}


constexpr int64_t kMost = int64_t(1) << 40;   // rows, columns, experts: products of sizes stay far below 2^63

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t width(int32_t type) { return type == BITPORT_F32 ? 4 : type == BITPORT_BF16 || type == BITPORT_F16 ? 2 : 1; }

bool is_of(const View& part, int64_t experts, int64_t a, int64_t b, int64_t c) {
  return part.ok && (experts < 0 ? part.has_shape(a, b, c) : part.has_shape(experts, a, b, c));
}

}  // namespace

const NumberType* number_type(std::string_view name) {
  for (const NamedType& known : types())
    if (known.name == name) return &known.type;
  return nullptr;
}

int32_t rounding(std::string_view name) { return code_of(roundings(), name); }
int32_t activation(std::string_view name) { return code_of(activations(), name); }

bool Weight::read(const Value* arguments, bool batched) {
  if (text(arguments[9]) != "cpu_tiles") return false;
  const int64_t n = int64_t(arguments[5]), k = int64_t(arguments[6]);
  const int64_t block_n = int64_t(arguments[7]), group = int64_t(arguments[8]);
  if (n < 1 || n > kMost || k < 1 || k > kMost || block_n < 1 || group < 1 || group > kMost) return false;
  if (group % 16 && group < k) return false;
  const NumberType* number = number_type(text(arguments[4]));
  if (!number) return false;

  const View data(arguments[0]), scale(arguments[1]);
  if (!data.ok || (batched && data.dim != 4)) return false;
  experts = batched ? data.sizes[0] : -1;
  if (experts > kMost) return false;
  const int64_t rows = ceil_div(n, 32), steps = ceil_div(k, 32), groups = ceil_div(k, group);
  if (data.type() != BITPORT_U8 || !is_of(data, experts, rows, steps, 128 * number->bits)) return false;
  if (!is_of(scale, experts, rows, groups, 32)) return false;
  tiles.scale_type = scale.type();
  if (tiles.scale_type < 0 || tiles.scale_type == BITPORT_U8) return false;

  tiles.zero_type = BITPORT_U8;
  if (const Value* given = optional(arguments[2])) {
    const View zero(*given);
    if (!is_of(zero, experts, rows, groups, 32) || !number->integer || width(tiles.scale_type) == 1) return false;
    tiles.zero_type = zero.type();
    if (tiles.zero_type < 0 || tiles.zero_type > BITPORT_U8) return false;
    tiles.zero = zero.data;
  }
  if (const Value* given = optional(arguments[3])) {
    const View second(*given);
    const bool shaped = batched ? second.has_shape(experts, 1, 1) : second.has_shape(1, 1);
    if (!second.ok || !shaped || second.type() != BITPORT_F32 || tiles.scale_type != BITPORT_E4M3) return false;
    tiles.scale2 = static_cast<const float*>(second.data);
  }
  most_rows = number->most_rows[group >= k];
  tiles.codes = static_cast<const uint8_t*>(data.data);
  tiles.scale = scale.data;
  tiles.table = number->table;
  tiles.n = n;
  tiles.k = k;
  tiles.group = group;
  tiles.bits = number->bits;
  tiles.integer = number->integer;
  code_bytes_ = rows * steps * 128 * number->bits;
  scale_bytes_ = rows * groups * 32 * width(tiles.scale_type);
  zero_bytes_ = rows * groups * 32 * width(tiles.zero_type);
  return true;
}

BitportTiles Weight::expert(int64_t at) const {
  BitportTiles one = tiles;
  one.codes += at * code_bytes_;
  one.scale = static_cast<const char*>(tiles.scale) + at * scale_bytes_;
  if (tiles.zero) one.zero = static_cast<const char*>(tiles.zero) + at * zero_bytes_;
  if (tiles.scale2) one.scale2 = tiles.scale2 + at;
  return one;
}

}  // namespace bitport

int32_t bitport_name_type(const char* name, int32_t bits, int32_t integer, const float* table) {
  using namespace bitport;
  if (!name || !table || bits < 1 || bits > 8) return 1;
  if (number_type(name)) return 0;   // tables are used by address, and number types do not change
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
