// The error of a weight relative to the original floats, a few rows at a time: all of it as floats would take several
// times the memory of the weight.
#include "buffer.h"
#include "engine.h"
#include "number.h"
#include "rows.h"
#include "share.h"
#include "status.h"

namespace bitport {
namespace {

constexpr int64_t kRows = 16;    // rows per work item
constexpr int64_t kLanes = 16;   // independent sums, for vectorization

struct Squares { double signal = 0, noise = 0; };

BITPORT_INLINE Squares squares(const float* x, const float* y, int64_t count) {
  double signal[kLanes] = {}, noise[kLanes] = {};
  const auto add = [&](int64_t lane, int64_t i) {
    const double number = x[i], error = number - double(y[i]);
    signal[lane] += number * number;
    noise[lane] += error * error;
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) add(lane, i + lane);
  for (; i < count; ++i) add(0, i);
  Squares sums;
  for (int64_t lane = 0; lane < kLanes; ++lane) sums.signal += signal[lane], sums.noise += noise[lane];
  return sums;
}

using Compare = Squares (*)(const float* x, const float* y, int64_t count);

Squares plainly(const float* x, const float* y, int64_t count) { return squares(x, y, count); }
#if BITPORT_X86
__attribute__((target("avx2,fma"))) Squares by_avx2(const float* x, const float* y, int64_t count) {
  return squares(x, y, count);
}
__attribute__((target("avx512f,fma" BITPORT_LONG_VECTORS)))
Squares by_avx512(const float* x, const float* y, int64_t count) {
  return squares(x, y, count);
}
#endif

Compare compare(int32_t isa) {
#if BITPORT_X86
  if (isa >= BITPORT_AVX512_VNNI) return by_avx512;
  if (isa >= BITPORT_AVX2) return by_avx2;
#endif
  (void)isa;
  return plainly;
}

}  // namespace
}  // namespace bitport

int32_t bitport_distance(const BitportTiles* w, const void* x, int32_t x_type, double* sums, int32_t threads) {
  using namespace bitport;
  if (const int32_t code = check_weight(w)) return code;
  if (!is_float(x_type)) return kBadType;
  if (!sums || (w->n && !x)) return kNullPointer;
  const int64_t pieces = ceil_div(w->n, kRows), row_bytes = w->k * width_of(x_type);
  const int32_t isa = bitport_best_isa();
  const Engine& engine = engine_for(isa, BITPORT_F32, 1);
  const Compare of_row = compare(isa);
  Buffer memory;
  Squares* const found = reinterpret_cast<Squares*>(memory.need(size_t(pieces) * sizeof(Squares)));
  if (!found) return kNoMemory;
  std::atomic<bool> failed{false};
  share(pieces, threads, [&](int64_t piece) {
    const int64_t first = piece * kRows, rows = smaller(kRows, w->n - first);
    float* const weight = reinterpret_cast<float*>(own_buffer.need(size_t((rows + 1) * w->k) * sizeof(float)));
    if (!weight) { failed = true; return; }
    write_rows(isa, *w, false, first, rows, w->k, weight);
    float* const wide = weight + rows * w->k;
    Squares sum;
    for (int64_t row = 0; row < rows; ++row) {
      const char* const numbers = static_cast<const char*>(x) + (first + row) * row_bytes;
      if (x_type != BITPORT_F32) engine.widen(numbers, x_type, w->k, wide);
      const float* const as_floats = x_type == BITPORT_F32 ? reinterpret_cast<const float*>(numbers) : wide;
      const Squares more = of_row(as_floats, weight + row * w->k, w->k);
      sum.signal += more.signal, sum.noise += more.noise;
    }
    found[piece] = sum;
  });
  if (failed) return kNoMemory;
  sums[0] = sums[1] = 0;
  for (int64_t piece = 0; piece < pieces; ++piece) sums[0] += found[piece].signal, sums[1] += found[piece].noise;
  return kOk;
}
