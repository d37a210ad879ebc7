#include "digits.h"
#include <atomic>
#include <cmath>
#include "activation.h"
#include "buffer.h"
#include "number.h"
#include "share.h"
#include "status.h"
#include "tiles.h"

namespace bitport {
namespace {

constexpr int64_t kMostRows = 16;

thread_local Buffer digits_buffer;

// Null for scalar code, which does not use digits.
const Digits* digits_for(int32_t isa) {
#if BITPORT_X86
  if (isa >= BITPORT_AVX512_VNNI) return &avx512_digits;
  if (isa == BITPORT_AVX2) return &avx2_digits;
#elif BITPORT_ARM
  if (isa == BITPORT_NEON_MATRIX) return &neon_matrix_digits;
  if (isa == BITPORT_NEON_DOT) return &neon_dot_digits;
  if (isa == BITPORT_NEON) return &neon_digits;
#endif
  (void)isa;
  return nullptr;
}

// The power of two that scales the largest of k numbers below 2^15 - 128; 0 if one is not finite, or if the power and
// its inverse would not both be normal.
float unit_of(uint16_t largest) {
  if (largest == 0) return 1;
  const int exponent = (largest >> 7) - 127;
  if (exponent < -112 || exponent > 127) return 0;
  const int shift = (largest & 0x7f) == 0x7f ? 13 : 14;   // 255 * 2^7 + 128 would overflow the high digit
  return std::ldexp(1.0f, exponent - shift);
}

// Whether at least half of the nonzero numbers of a row are exact multiples of its unit, as those of 2^7 units and more
// are.
bool mostly_exact(const uint16_t* x, int64_t k, float unit) {
  const int16_t least = int16_t(bits_of_float(unit * 128) >> 16);
  uint32_t exact = 0, all = 0;   // k is at most 2^31
  for (int64_t i = 0; i < k; ++i) {
    const int16_t size = int16_t(x[i] & 0x7fff);
    exact += size >= least;
    all += size != 0;
  }
  return exact >= all - exact;
}

// The number of rows up to which digits are faster than the alternative of the instruction set: measured on x86,
// estimated on ARM from the instructions in the inner loops. Short groups cost digits twice.
int64_t most_rows(int32_t isa, const BitportTiles& w) {
  const bool wide = w.bits > 6, short_groups = w.group <= 32;
  switch (isa) {
    case BITPORT_SCALAR: return 0;
    case BITPORT_AVX2: return w.bits > 4 ? 1 : w.bits == 4 && !short_groups ? 4 : 2;
    case BITPORT_AVX512_VNNI: return short_groups ? 8 : kMostRows;
#if BITPORT_X86
    case BITPORT_AVX512_BF16: return !fast_bf16() ? 4 : wide ? 6 : 2;
#endif
    case BITPORT_NEON: return 1;
    case BITPORT_NEON_DOT: case BITPORT_NEON_MATRIX: return kMostRows;
    default: return wide || short_groups ? 4 : 2;   // codes of few bits become bfloat16 by a permutation
  }
}

}  // namespace

bool takes_digits(const Product& p) {
  return p.m <= most_rows(p.isa, p.weight) && p.weight.integer && p.x_type == BITPORT_BF16 && p.weight.k > 0;
}

int32_t linear_digits(const Product& p, bool* taken) {
  const BitportTiles& w = p.weight;
  const Digits& isa = *digits_for(p.isa);
  const uint16_t* x = static_cast<const uint16_t*>(p.x);
  float unit[kMostRows];
  for (int64_t row = 0; row < p.m; ++row) {
    const uint16_t* own = x + row * w.k;
    unit[row] = unit_of(isa.largest(own, w.k));
    *taken = unit[row] != 0 && mostly_exact(own, w.k, unit[row]);
    if (!*taken) return kOk;
  }
  const int64_t digits = 2 * p.m, pieces = pieces_of(w, isa.stretch);
  const size_t code_bytes = size_t(int8_steps(w) * digits * kInt8Step), sum_bytes = aligned(size_t(pieces * digits) * 4);
  char* memory = digits_buffer.need(code_bytes + sum_bytes + size_t(w.n) * 4);
  if (!memory) return kNoMemory;
  int8_t* codes = reinterpret_cast<int8_t*>(memory);
  float* sums = reinterpret_cast<float*>(memory + code_bytes);
  float* bias = p.bias ? reinterpret_cast<float*>(memory + code_bytes + sum_bytes) : nullptr;
  if (bias) isa.floats.widen(p.bias, p.y_type, w.n, bias);
  for (int64_t row = 0; row < p.m; ++row)
    for (Pieces piece(w, isa.stretch, 0); piece.begin < w.k; piece.next()) {
      float* high = sums + piece.index * digits + row * 2;
      isa.split(x + row * w.k, piece.begin, piece.end, unit[row], codes + row * 2 * kInt8Step, digits * kInt8Step, high,
                high + 1);
    }
  const Int8Job job{&w, codes, sums, digits, digits, isa.stretch};
  const Activate activate = activate_for(p.isa);
  std::atomic<bool> failed{false};
  share_ranges(tiles_of(w), p.threads, [&](int64_t tile, int64_t end) {
    char* panel = own_buffer.need(size_t(isa.panel_bytes));
    if (!panel) { failed = true; return; }
    alignas(64) float sum[kMostRows * 2 * 32];
    for (; tile < end; ++tile) {
      const int64_t n = tile * 32, count = w.n - n < 32 ? w.n - n : 32;
      isa.fused(job, tile, panel, sum);
      for (int64_t row = 0; row < p.m; ++row) {
        float* own = sum + row * 64;
        const int64_t at = row * w.n + n;
        const uint16_t* factor = p.times ? static_cast<const uint16_t*>(p.times) + at : nullptr;
        isa.join(own, unit[row]);
        if (p.then) activate({p.then, bias ? bias + n : nullptr, factor, BITPORT_BF16, w.n, count}, own, 1);
        isa.floats.store(own, count, bias && !p.then ? bias + n : nullptr, static_cast<uint16_t*>(p.y) + at, BITPORT_BF16);
      }
    }
  });
  return failed ? kNoMemory : kOk;
}

}  // namespace bitport
