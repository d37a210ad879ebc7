// Rounds rows of x to float8 and float4, by blocks: amax, scale, nearest value with ties to even.
#include "round.h"
#include <atomic>
#include <cmath>
#include "buffer.h"
#include "number.h"
#include "share.h"

namespace bitport {
namespace {

#if defined(__GNUC__)
#define BITPORT_INLINE __attribute__((always_inline)) static inline
#else
#define BITPORT_INLINE static inline
#endif

constexpr uint32_t kInfinity = 0x7f800000u;

// Bits of the largest magnitude: as integers they are ordered like the numbers, with infinity and NaN above all.
BITPORT_INLINE uint32_t largest_of(const float* x, int64_t count) {
  uint32_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t size = bits_of_float(x[i]) & 0x7fffffffu;
    most = size > most ? size : most;
  }
  return most;
}

// The nearest number with Mantissa bits after the leading one, of magnitude at most `largest` and a multiple of `step`;
// ties to even. Adding and subtracting 1.5 * 2^23 * step rounds a small number to a multiple of step. Integers are compared
// and selected by masks: g++ vectorizes that for AVX2 too, but neither float comparisons nor float sums behind a branch,
// since they may trap.
template <int Mantissa>
BITPORT_INLINE float nearest(float x, float largest, float smallest_normal, float step) {
  const int32_t size = int32_t(bits_of_float(x) & 0x7fffffffu), most = int32_t(bits_of_float(largest));
  const int32_t clipped = size > most ? most : size;
  const float magic = 12582912.0f * step;
  const int32_t fine = int32_t(bits_of_float((float_of_bits(uint32_t(clipped)) + magic) - magic));
  constexpr int kCut = 23 - Mantissa;
  const int32_t coarse = (clipped + ((1 << (kCut - 1)) - 1) + (clipped >> kCut & 1)) & ~((1 << kCut) - 1);
  const int32_t small = -(clipped < int32_t(bits_of_float(smallest_normal))), nan = -(size > int32_t(kInfinity));
  const int32_t finite = (fine & small) | (coarse & ~small);
  return float_of_bits(uint32_t((size & nan) | (finite & ~nan)) | (bits_of_float(x) & 0x80000000u));
}

BITPORT_INLINE void e4m3_of(const float* x, int64_t count, float scale, float times, float* y) {
  for (int64_t i = 0; i < count; ++i) y[i] = nearest<3>(x[i] / scale, 448.0f, 0x1p-6f, 0x1p-9f) * times;
}

BITPORT_INLINE void e2m1_of(const float* x, int64_t count, float scale, float times, float* y) {
  for (int64_t i = 0; i < count; ++i) y[i] = nearest<1>(x[i] / scale, 6.0f, 1.0f, 0.5f) * times;
}

BITPORT_INLINE void halve(const float* x, int64_t count, uint16_t* y) {   // values are exact in bfloat16
  for (int64_t i = 0; i < count; ++i) y[i] = uint16_t(bits_of_float(x[i]) >> 16);
}

thread_local Buffer row_buffer;

struct Loops {
  uint32_t (*largest)(const float* x, int64_t count);
  void (*e4m3)(const float* x, int64_t count, float scale, float times, float* y);
  void (*e2m1)(const float* x, int64_t count, float scale, float times, float* y);
  void (*halve)(const float* x, int64_t count, uint16_t* y);
};

// The same loops, auto-vectorized for each register width.
#define BITPORT_LOOPS(name, attribute)                                                                             \
  namespace name {                                                                                                 \
  attribute uint32_t largest(const float* x, int64_t n) { return largest_of(x, n); }                               \
  attribute void e4m3(const float* x, int64_t n, float s, float t, float* y) { e4m3_of(x, n, s, t, y); }           \
  attribute void e2m1(const float* x, int64_t n, float s, float t, float* y) { e2m1_of(x, n, s, t, y); }           \
  attribute void halves(const float* x, int64_t n, uint16_t* y) { halve(x, n, y); }                                \
  constexpr Loops loops = {largest, e4m3, e2m1, halves};                                                           \
  }
BITPORT_LOOPS(plain, )
#if BITPORT_X86
BITPORT_LOOPS(avx2, __attribute__((target("avx2"))))
BITPORT_LOOPS(avx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))))
#endif

const Loops& loops_for(int32_t isa) {
#if BITPORT_X86
  if (isa >= BITPORT_AVX512_VNNI) return avx512::loops;
  if (isa == BITPORT_AVX2) return avx2::loops;
#endif
  (void)isa;
  return plain::loops;
}

// The float32 scale of a block of this type with this amax: see numerics/qparams.py.
float scale_in(int32_t type, uint32_t amax_bits) {
  if (amax_bits >= kInfinity) return NAN;
  if (amax_bits == 0) return 1.0f;
  const double most = type == BITPORT_F32 ? 0x1.fffffep127 : type == BITPORT_BF16 ? 0x1.fep127 : 65504.0;
  const float low = 0x1p-149f, high = float(most / 448.0 * (1 - 0x1p-23)), raw = float_of_bits(amax_bits) / 448.0f;
  return raw < low ? low : raw > high ? high : raw;
}

// A power of two, 2^(code - 127), with code = exponent of amax - emax. The exponent is incremented if the fraction
// exceeds `above` ("rceil") or reaches 2 when rounded to `mantissa` bits ("even").
float power_of_two(uint32_t amax_bits, bool even, int mantissa, uint32_t above, int emax) {
  if (amax_bits >= kInfinity) return NAN;
  const uint32_t position =
      amax_bits >= 0x800000u ? amax_bits : amax_bits > 0x400000u ? (amax_bits - 0x400000u) * 2 : 0;
  const uint32_t fraction = position & 0x7fffffu;
  int code = int(position >> 23);
  code += even ? int((fraction + (1u << (22 - mantissa))) >> 23) : fraction > above;
  code -= emax;
  return float_of_e8m0(uint8_t(code < 0 ? 0 : code > 254 - emax ? 254 - emax : code));
}

// A scale rounded to the nearest e4m3 between the smallest, 2^-9, and the largest.
float e4m3_scale(float raw) { return nearest<3>(raw < 0x1p-9f ? 0x1p-9f : raw, 448.0f, 0x1p-6f, 0x1p-9f); }

struct Rounding {
  const Product& product;
  const Loops& loops;
  int32_t act;
  float global;   // the scale of the tensor, or the global scale of nvfp4

  int64_t block() const {
    switch (act) {
      case BITPORT_MXFP8: case BITPORT_MXFP4: return 32;
      case BITPORT_NVFP4: return 16;
      case BITPORT_FP8_128: return kScaled;
      default: return product.weight.k;
    }
  }

  // Rounds in place. scales: the factor of the row, or with `apart` of each block, with a stride of m.
  void round(float* x, bool apart, float* scales) const {
    const int64_t k = product.weight.k, step = block();
    float of_row = act == BITPORT_NVFP4 ? global : 1.0f;
    for (int64_t i = 0; i < k; i += step) {
      const int64_t count = k - i < step ? k - i : step;
      const uint32_t amax = act == BITPORT_FP8_TENSOR ? 0 : loops.largest(x + i, count);
      float scale;
      switch (act) {
        case BITPORT_FP8_ROW: case BITPORT_FP8_TENSOR:
          of_row = act == BITPORT_FP8_ROW ? scale_in(product.x_type, amax) : global;
          loops.e4m3(x + i, count, of_row, 1.0f, x + i);
          break;
        case BITPORT_FP8_128:
          scale = scale_in(product.x_type, amax);
          loops.e4m3(x + i, count, scale, apart ? 1.0f : scale, x + i);
          if (apart) scales[i / step * product.m] = scale;
          break;
        case BITPORT_MXFP8:
          scale = power_of_two(amax, false, 0, 0x600000u, 8);   // 448 = 1.75 * 2^8
          loops.e4m3(x + i, count, scale, scale, x + i);
          break;
        case BITPORT_MXFP4:
          scale = power_of_two(amax, true, 1, 0, 2);
          loops.e2m1(x + i, count, scale, scale, x + i);
          break;
        default:
          scale = amax >= kInfinity ? NAN : amax == 0 ? 1.0f : e4m3_scale(float_of_bits(amax) / 6.0f / global);
          loops.e2m1(x + i, count, scale * global, scale, x + i);
      }
    }
    if (!apart) *scales = of_row;
  }
};

}  // namespace

bool round_rows(const Product& product, int32_t act, const float* act_scale, bool bf16, void* rows, float* row_scale) {
  const Loops& loops = loops_for(product.isa);
  const int64_t k = product.weight.k, m = product.m, width = product.x_type == BITPORT_F32 ? 4 : 2;
  const bool whole = act == BITPORT_FP8_TENSOR || act == BITPORT_NVFP4;
  const int32_t threads = m * k < (1 << 14) ? 1 : product.threads;
  const Engine& engine = engine_for(product.isa, BITPORT_F32, m);
  Rounding rounding{product, loops, act, 1.0f};
  const bool apart = bf16 && act == BITPORT_FP8_128;

  std::atomic<bool> failed{false};
  constexpr int64_t kPiece = 1024;
  const auto widen = [&](int64_t row, int64_t from, int64_t count, float* to) {
    engine.widen(static_cast<const char*>(product.x) + (row * k + from) * width, product.x_type, count, to);
  };
  if (whole && act_scale) rounding.global = *act_scale;
  if (whole && !act_scale) {
    std::atomic<uint32_t> most{0};
    share(m, threads, [&](int64_t row) {
      alignas(64) float piece[kPiece];
      uint32_t found = 0;
      for (int64_t from = 0; from < k; from += kPiece) {
        const int64_t count = k - from < kPiece ? k - from : kPiece;
        widen(row, from, count, piece);
        const int64_t step = act == BITPORT_NVFP4 ? 16 : count;
        for (int64_t i = 0; i < count; i += step) {
          const uint32_t amax = loops.largest(piece + i, count - i < step ? count - i : step);
          if (amax > found && (amax < kInfinity || act == BITPORT_FP8_TENSOR)) found = amax;
        }
      }
      for (uint32_t seen = most; found > seen && !most.compare_exchange_weak(seen, found);) {}
    });
    if (act == BITPORT_FP8_TENSOR) {
      rounding.global = scale_in(product.x_type, most);
    } else if (most) {   // see _global_scale in numerics/qparams.py
      const float low = 0x1p-140f, high = float(0x1.fffffep127 / 2688.0 * (1 - 0x1p-20));
      const float raw = float_of_bits(most) / 2688.0f;
      rounding.global = raw < low ? low : raw > high ? high : raw;
    }
  }
  share(m, threads, [&](int64_t row) {
    if (!bf16) {
      float* to = static_cast<float*>(rows) + row * k;
      widen(row, 0, k, to);
      rounding.round(to, false, row_scale + row);
      return;
    }
    uint16_t* to = static_cast<uint16_t*>(rows) + row * k;
    float* wide = reinterpret_cast<float*>(row_buffer.need(size_t(k) * 4));
    if (!wide) { failed = true; return; }
    widen(row, 0, k, wide);
    rounding.round(wide, apart, row_scale + row);
    loops.halve(wide, k, to);
  });
  return !failed;
}

}  // namespace bitport
