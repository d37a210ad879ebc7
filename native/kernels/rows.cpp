// Single rows of a weight as numbers: what an embedding looks up.
#include "number.h"
#include "share.h"
#include "status.h"
#include "tiles.h"

namespace bitport {
namespace {

void write_row(const BitportTiles& w, int64_t row, void* y, int32_t type, int64_t at) {
  const int64_t tile = row / 32, groups = groups_of(w);
  for (int64_t column = 0; column < w.k;) {
    const int64_t group = (tile * groups + group_of(w, column)) * 32 + row % 32;
    const float scale = load_number(w.scale, w.scale_type, group) * (w.scale2 ? *w.scale2 : 1.0f);
    const float shift = w.zero ? load_number(w.zero, w.zero_type, group) - middle(w) : 0.0f;
    const int64_t end = column + w.group < w.k ? column + w.group : w.k;
    for (; column < end; ++column) {
      const uint32_t code = read_code(tile_at(w, tile, column / 32), w.bits, row % 32, column % 32);
      store_number((w.table[code] - shift) * scale, y, type, at + column);
    }
  }
}

}  // namespace
}  // namespace bitport

int32_t bitport_rows(const BitportTiles* w, const int64_t* ids, int64_t count, void* y, int32_t y_type, int32_t threads) {
  using namespace bitport;
  if (const int32_t code = check_weight(w)) return code;
  if (y_type < BITPORT_F32 || y_type > BITPORT_F16) return kBadType;
  if (count < 0 || count > kMost) return kBadShape;
  if (count > 0 && (!ids || !y)) return kNullPointer;
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= w->n) return kBadRow;
  constexpr int64_t kGrain = 1 << 14;   // numbers for which a second thread pays
  share(count, count * w->k < kGrain ? 1 : threads, [&](int64_t i) { write_row(*w, ids[i], y, y_type, i * w->k); });
  return kOk;
}
