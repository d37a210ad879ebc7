// The product with int8 inputs in plain C++: the reference for every other variant.
#include <cmath>
#include "int8.h"
#include "number.h"

namespace bitport {
namespace {

void range(const void* x, int32_t type, int64_t count, float* low, float* high) {
  float least = 0, most = 0;
  bool nan = false;
  for (int64_t i = 0; i < count; ++i) {
    const float value = load_number(x, type, i);
    if (value < least) least = value;
    if (value > most) most = value;
    nan |= value != value;
  }
  *low = nan ? float_of_bits(0x7fc00000u) : least;
  *high = nan ? float_of_bits(0x7fc00000u) : most;
}

int32_t round(const void* x, int32_t type, int64_t count, Rounding rounding, int8_t* to, int64_t from, int64_t next) {
  int32_t sum = 0;
  for (int64_t i = 0, at = from; i < ceil_div(count, 16) * 16; ++i, ++at) {
    int32_t code = 0;
    if (i < count) {
      const float steps = std::nearbyintf(load_number(x, type, i) / rounding.scale);
      const float shifted = (steps == steps ? steps : 0.0f) + rounding.zero;
      code = int32_t(shifted < -128 ? -128 : shifted > 127 ? 127 : shifted);
    }
    to[at / kInt8Step * next + at % kInt8Step] = int8_t(code);
    sum += code;
  }
  return sum;
}

bool fuses(const BitportTiles&, int64_t) { return true; }

void fused(const Int8Job& job, int64_t tile, void*, float* sum) {
  const BitportTiles& w = *job.weight;
  for (int64_t r = 0; r < job.m; ++r, sum += 32)
    for (int64_t row = 0; row < 32; ++row) {
      sum[row] = 0;
      for (Pieces piece(w, job.stretch, 0); piece.begin < w.k; piece.next()) {
        const int64_t group = (tile * groups_of(w) + piece.group) * 32 + row;
        int32_t whole = 0;
        for (int64_t k = piece.begin; k < piece.end; ++k) {
          const int32_t code = int32_t(read_code(tile_at(w, tile, k / 32), w.bits, row, k % 32));
          whole += (code - center(w)) * *codes_at(job, r, k);
        }
        float part = float(whole);
        if (has_shift(w)) {
          const float zero = w.zero ? load_number(w.zero, w.zero_type, group) : middle(w);
          part -= (zero - float(center(w))) * *sums_at(job, r, piece.index);
        }
        sum[row] += part * (load_number(w.scale, w.scale_type, group) * (w.scale2 ? *w.scale2 : 1.0f));
      }
    }
}

void finish(float* sum, const float* ones, Rounding rounding, int64_t count, const float* bias, void* y, int32_t type,
            bool) {
  for (int64_t j = 0; j < count; ++j) {
    const float value = (ones ? sum[j] - rounding.zero * ones[j] : sum[j]) * rounding.scale;
    store_number(bias ? value + bias[j] : value, y, type, j);
  }
}

}  // namespace

const Int8Engine scalar_int8_engine = {kInt32Columns, 1, 0, kUsualOfBytes, range, round, fuses, fused, nullptr, nullptr, nullptr, nullptr, nullptr,
                                       finish, false, nullptr, nullptr};

}  // namespace bitport
