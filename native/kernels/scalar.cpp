// The product in plain C++: the reference for every other variant, and what a machine without vectors we know runs.
#include "engine.h"
#include "number.h"
#include "tiles.h"

namespace bitport {
namespace {

void widen(const void* from, int32_t type, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = load_number(from, type, i);
}

// panel [count][32]
void decode(const BitportTiles& w, int64_t tile, int64_t k, int64_t count, void* panel) {
  float* to = static_cast<float*>(panel);
  for (int64_t column = k; column < k + count; ++column, to += 32) {
    const int64_t group = (tile * groups_of(w) + group_of(w, column)) * 32;
    for (int64_t row = 0; row < 32; ++row) {
      float value = w.table[read_code(tile_at(w, tile, column / 32), w.bits, row, column % 32)];
      if (w.zero) value -= load_number(w.zero, w.zero_type, group + row) - middle(w);
      to[row] = value * load_number(w.scale, w.scale_type, group + row);
    }
  }
}

void multiply(const Job& job, int64_t row, int64_t rows, int64_t k, int64_t count, const void* panel, float* sum) {
  const float* weights = static_cast<const float*>(panel);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t block = (row + r) / job.block, line = (row + r) % job.block;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = job.at(block, k, count) + (i / 32 * job.block + line) * 32 + i % 32;
      const float x = static_cast<const float*>(job.rows)[at];
      for (int64_t j = 0; j < 32; ++j) sum[r * 32 + j] += x * weights[i * 32 + j];
    }
  }
}

void store(const float* sum, int64_t count, const float* bias, void* y, int32_t type) {
  for (int64_t j = 0; j < count; ++j) store_number(bias ? sum[j] + bias[j] : sum[j], y, type, j);
}

}  // namespace

const Engine scalar_engine = {false, 256, widen, decode, nullptr, nullptr, multiply, nullptr, nullptr, store, nullptr, nullptr};

}  // namespace bitport
