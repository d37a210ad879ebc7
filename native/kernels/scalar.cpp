// The product in plain C++: the reference for every other variant, and the fallback on machines without supported
// vectors.
#include "engine.h"
#include "number.h"
#include "tiles.h"

namespace bitport {
namespace {

void widen(const void* from, int32_t type, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = load_number(from, type, i);
}

// panel [count][32]
void decode(const BitportTiles& w, const Panel& panel) {
  const auto [tile, k, count, data] = panel;
  float* to = static_cast<float*>(data);
  for (int64_t column = k; column < k + count; ++column, to += 32) {
    const int64_t group = (tile * groups_of(w) + group_of(w, column)) * 32;
    for (int64_t row = 0; row < 32; ++row) {
      float value = w.table[read_code(tile_at(w, tile, column / 32), w.bits, row, column % 32)];
      if (w.zero) value -= load_number(w.zero, w.zero_type, group + row) - middle(w);
      to[row] = value * load_number(w.scale, w.scale_type, group + row);
    }
  }
}

void multiply(const Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum) {
  if (panel.k == 0) std::memset(sum, 0, size_t(rows) * 128);
  const float* weights = static_cast<const float*>(panel.data);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < panel.count; ++i) {
      const float x = static_cast<const float*>(job.rows)[job.at(row + r, panel.k + i) + i % 32];
      for (int64_t j = 0; j < 32; ++j) sum[r * 32 + j] += x * weights[i * 32 + j];
    }
}

void store(const float* sum, int64_t count, const float* bias, void* y, int32_t type) {
  for (int64_t j = 0; j < count; ++j) store_number(bias ? sum[j] + bias[j] : sum[j], y, type, j);
}

}  // namespace

const Engine scalar_engine = {false, 256, 0, kUsual, widen, decode, nullptr, nullptr, multiply, nullptr, nullptr, nullptr, store, nullptr, nullptr, nullptr};

}  // namespace bitport
