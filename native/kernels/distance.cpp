// The error of a weight relative to the original floats, a few rows at a time: all of it as floats would take several
// times the memory of the weight.
#include "buffer.h"
#include "engine.h"
#include "machine.h"
#include "number.h"
#include "rows.h"
#include "share.h"
#include "status.h"

namespace bitport {
namespace {

constexpr int64_t kRows = 16;              // rows per work item
constexpr int64_t kLanes = 32;             // independent sums: g++ vectorizes a loop over them, but not one of 16
constexpr int64_t kPiece = 16 * kLanes;    // numbers whose squares may be summed in float32

struct Squares { double signal = 0, noise = 0; };

// Sums in the type Sum. In float32 those of a piece are off by at most 18 roundings of 2^-24: that of a difference, which
// counts twice in its square, that of the square, and those of 15 additions.
template <class Sum, class Number>
BITPORT_INLINE Squares squares(const Number* x, const float* y, int64_t count) {
  Sum signal[kLanes] = {}, noise[kLanes] = {};
  const auto add = [&](int64_t lane, int64_t i) {
    const Sum number = float(x[i]), error = number - Sum(y[i]);
    signal[lane] += number * number;
    noise[lane] += error * error;
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) add(lane, i + lane);
  for (int64_t lane = 0; i < count; ++lane, ++i) add(lane, i);
  Squares sums;
  for (int64_t lane = 0; lane < kLanes; ++lane) sums.signal += double(signal[lane]), sums.noise += double(noise[lane]);
  return sums;
}

// Pieces with squares that may be outside the range of float32 are summed again in float64.
template <class Number>
BITPORT_INLINE Squares row_squares(const void* numbers, const float* y, int64_t count) {
  const Number* const x = static_cast<const Number*>(numbers);
  const auto safe = [](double sum) { return sum > 0x1p-80 && sum < 0x1p120; };
  Squares sums;
  for (int64_t i = 0; i < count; i += kPiece) {
    const int64_t some = count - i < kPiece ? count - i : kPiece;
    Squares more = squares<float>(x + i, y + i, some);
    if (!safe(more.signal) || !safe(more.noise)) more = squares<double>(x + i, y + i, some);
    sums.signal += more.signal, sums.noise += more.noise;
  }
  return sums;
}

BITPORT_INLINE Squares any_squares(const void* x, int32_t type, const float* y, int64_t count) {
  return type == BITPORT_BF16 ? row_squares<BFloat16>(x, y, count) : row_squares<float>(x, y, count);
}

// x: a row of bfloat16 or float32, y: the same of the weight.
using Compare = Squares (*)(const void* x, int32_t type, const float* y, int64_t count);

Squares plainly(const void* x, int32_t type, const float* y, int64_t count) { return any_squares(x, type, y, count); }
#if BITPORT_X86
__attribute__((target("avx2,fma"))) Squares by_avx2(const void* x, int32_t type, const float* y, int64_t count) {
  return any_squares(x, type, y, count);
}
__attribute__((target("avx512f,avx512bw,avx512vl,fma" BITPORT_LONG_VECTORS)))
Squares by_avx512(const void* x, int32_t type, const float* y, int64_t count) {
  return any_squares(x, type, y, count);
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
    float* const weight = reinterpret_cast<float*>(own_buffer.need(size_t(2 * w->k) * sizeof(float)));
    if (!weight) { failed = true; return; }
    float* const wide = weight + w->k;
    Squares sum;
    for (int64_t row = first; row < first + rows; ++row) {
      const char* const numbers = static_cast<const char*>(x) + row * row_bytes;
      for (int64_t at = 0; at < row_bytes; at += 64) __builtin_prefetch(numbers + at);   // arrives while the weight is decoded
      write_rows(isa, *w, false, row, 1, w->k, weight);
      const bool is_half = x_type == BITPORT_F16;
      if (is_half) engine.widen(numbers, x_type, w->k, wide);
      const Squares more = is_half ? of_row(wide, BITPORT_F32, weight, w->k) : of_row(numbers, x_type, weight, w->k);
      sum.signal += more.signal, sum.noise += more.noise;
    }
    found[piece] = sum;
  });
  if (failed) return kNoMemory;
  sums[0] = sums[1] = 0;
  for (int64_t piece = 0; piece < pieces; ++piece) sums[0] += found[piece].signal, sums[1] += found[piece].noise;
  return kOk;
}
