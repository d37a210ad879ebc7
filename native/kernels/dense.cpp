// The whole weight as numbers, for a product of another library.
#include "engine.h"
#include "share.h"
#include "status.h"
#include "tiles.h"

namespace bitport {
namespace {

constexpr int64_t kColumns = 128;   // 16 KiB of float32: what is transposed lies in L1

void write_tile(const BitportTiles& w, const Engine& engine, int64_t tile, void* y, int32_t type) {
  alignas(64) float panel[kColumns * 32], rows[32 * kColumns];
  const float scale2 = w.scale2 ? *w.scale2 : 1.0f;
  const int64_t columns = steps_of(w) * 32, width = type == BITPORT_F32 ? 4 : 2;
  for (int64_t k = 0; k < columns; k += kColumns) {
    const int64_t count = columns - k < kColumns ? columns - k : kColumns, left = w.k - k < count ? w.k - k : count;
    engine.decode(w, {tile, k, count, panel});
    for (int64_t i = 0; i < count; ++i)
      for (int64_t row = 0; row < 32; ++row) rows[row * kColumns + i] = panel[i * 32 + row] * scale2;
    for (int64_t row = 0; row < 32 && tile * 32 + row < w.n; ++row)
      engine.store(rows + row * kColumns, left, nullptr, static_cast<char*>(y) + ((tile * 32 + row) * w.k + k) * width,
                   type);
  }
}

}  // namespace
}  // namespace bitport

int32_t bitport_dense(const BitportTiles* w, void* y, int32_t y_type, int32_t threads) {
  using namespace bitport;
  if (const int32_t code = check_weight(w)) return code;
  if (y_type < BITPORT_F32 || y_type > BITPORT_F16) return kBadType;
  if (w->n && !y) return kNullPointer;
  const Engine& engine = engine_for(bitport_best_isa(), BITPORT_F32, w->n);
  share(tiles_of(*w), threads, [&](int64_t tile) { write_tile(*w, engine, tile, y, y_type); });
  return kOk;
}
