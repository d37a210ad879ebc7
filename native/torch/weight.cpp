#include "weight.h"
#include "../kernels/number.h"
#include "../kernels/tiles.h"

namespace bitport {
namespace {

// a < 0: a matrix [b, c].
bool is_of(const View& part, int64_t experts, int64_t a, int64_t b, int64_t c) {
  if (a < 0) return part.ok && part.has_shape(b, c);
  return part.ok && (experts < 0 ? part.has_shape(a, b, c) : part.has_shape(experts, a, b, c));
}

}  // namespace

const char* Weight::read(const Parts& given, bool batched) { return read(given, batched, false); }

const char* Weight::read_rows(const Parts& given) {
  dense = View(given.data).dim == 2;
  return read(given, false, dense);
}

const char* Weight::read(const Parts& given, bool batched, bool as_rows) {
  const int64_t n = given.n, k = given.k, group = given.group;
  if (n < 1 || n > kMost || k < 1 || k > kMost || group < 1) return "a size of the weight is out of range";
  if (group % 16 && group < k) return "a group of the weight is not a multiple of 16 columns";
  const NumberType& number = given.number;
  if (number.bits < 1 || number.bits > 8 || !number.table) return "a weight has 1 to 8 bits and a table";

  const View data(given.data), scale(given.scale);
  if (!data.ok || (batched && data.dim != 4)) return "the weight's data are not contiguous on the CPU";
  experts = batched ? data.sizes[0] : -1;
  if (experts > kMost) return "too many experts";
  tiles.n = n;
  tiles.k = k;
  tiles.group = group;
  const int64_t rows = tiles_of(tiles), steps = steps_of(tiles), groups = groups_of(tiles);
  const auto scaled = [&](const View& part) {
    return as_rows ? is_of(part, -1, -1, n, groups) : is_of(part, experts, rows, groups, 32);
  };
  const bool coded = as_rows ? is_of(data, -1, -1, n, ceil_div(k * number.bits, 8))
                             : is_of(data, experts, rows, steps, 128 * number.bits);
  if (data.type() != BITPORT_U8 || !coded)
    return as_rows ? "the weight's data are not uint8 [n, k * bits / 8]" : "the weight's data are not uint8 [n/32, k/32, 128 * bits]";
  if (!scaled(scale)) return as_rows ? "the weight's scale is not contiguous [n, k/group]" : "the weight's scale is not contiguous [n/32, k/group, 32]";
  tiles.scale_type = scale.type();
  if (tiles.scale_type < 0 || tiles.scale_type == BITPORT_U8) return "the weight's scale has no dtype of scales";

  tiles.zero_type = BITPORT_U8;
  if (given.zero) {
    const View zero(given.zero);
    if (!scaled(zero)) return as_rows ? "the weight's zero is not contiguous [n, k/group]" : "the weight's zero is not contiguous [n/32, k/group, 32]";
    if (!number.integer || width_of(tiles.scale_type) == 1) return "a zero goes with integers and a scale of 16 or 32 bits";
    tiles.zero_type = zero.type();
    if (tiles.zero_type < 0 || tiles.zero_type > BITPORT_U8) return "the weight's zero has no dtype of zeros";
    tiles.zero = zero.data;
  }
  if (given.scale2) {
    const View second(given.scale2);
    const bool shaped = batched ? second.has_shape(experts, 1, 1) : second.has_shape(1, 1);
    if (!second.ok || !shaped || second.type() != BITPORT_F32 || tiles.scale_type != BITPORT_E4M3)
      return "the weight's scale2 is not float32 [1, 1] beside scales of float8_e4m3fn";
    tiles.scale2 = static_cast<const float*>(second.data);
  }
  most_rows = number.most_rows[group >= k];
  tiles.codes = static_cast<const uint8_t*>(data.data);
  tiles.scale = scale.data;
  tiles.table = number.table;
  tiles.bits = number.bits;
  tiles.integer = number.integer;
  // Of the largest weight 2^26 * 2^26 * 128 * 8 = 2^62: no overflow, even where no expert takes memory.
  code_bytes_ = rows * steps * 128 * number.bits;
  scale_bytes_ = rows * groups * 32 * width_of(tiles.scale_type);
  zero_bytes_ = rows * groups * 32 * width_of(tiles.zero_type);
  return nullptr;
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
