// Rounds rows of x to float8 and float4, by blocks: amax, scale, nearest value with ties to even.
#include "round.h"
#include <atomic>
#include <cmath>
#include "buffer.h"
#include "number.h"
#include "share.h"

namespace bitport {
namespace {

constexpr uint32_t kInfinity = 0x7f800000u;

// x is float32, or bfloat16, which holds every rounded value too.
BITPORT_INLINE float value_of(float x) { return x; }
BITPORT_INLINE float value_of(uint16_t x) { return float_of_bf16(x); }
BITPORT_INLINE void put(float value, float* y) { *y = value; }
BITPORT_INLINE void put(float value, uint16_t* y) { *y = uint16_t(bits_of_float(value) >> 16); }

// Bits of the largest magnitude as float32: as integers they are ordered like the numbers, with infinity and NaN above all.
BITPORT_INLINE uint32_t largest_of(const float* x, int64_t count) {
  uint32_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t size = bits_of_float(x[i]) & 0x7fffffffu;
    most = size > most ? size : most;
  }
  return most;
}

BITPORT_INLINE uint32_t largest_of(const uint16_t* x, int64_t count) {
  uint16_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t size = x[i] & 0x7fff;
    most = size > most ? size : most;
  }
  return uint32_t(most) << 16;
}

// The nearest number with Mantissa bits after the leading one, of magnitude at most `largest`, where numbers below
// `smallest_normal` are as far apart as those from it on; ties to even. Adding and subtracting 1.5 * 2^23 * step rounds to
// a multiple of step, the distance of the numbers around x. Integers are compared and selected by masks: g++ vectorizes
// that for AVX2 too, but not float comparisons, since they may trap.
template <int Mantissa>
BITPORT_INLINE float nearest(float x, float largest, float smallest_normal) {
  const int32_t size = int32_t(bits_of_float(x) & 0x7fffffffu), most = int32_t(bits_of_float(largest));
  const int32_t clipped = size > most ? most : size;
  const int32_t power = clipped & int32_t(kInfinity), least = int32_t(bits_of_float(smallest_normal));
  const float magic = float_of_bits(uint32_t((power > least ? power : least) + ((23 - Mantissa) << 23) + 0x400000));
  const int32_t finite = int32_t(bits_of_float((float_of_bits(uint32_t(clipped)) + magic) - magic));
  const int32_t nan = -(size > int32_t(kInfinity));
  return float_of_bits(uint32_t((size & nan) | (finite & ~nan)) | (bits_of_float(x) & 0x80000000u));
}

BITPORT_INLINE float nearest_e4m3(float x) { return nearest<3>(x, 448.0f, 0x1p-6f); }
BITPORT_INLINE float nearest_e2m1(float x) { return nearest<1>(x, 6.0f, 1.0f); }

// y = round(x / scale) * times. y is not x, whose loops would not be vectorized.
template <class Number>
BITPORT_INLINE void e4m3_of(const Number* x, int64_t count, float scale, float times, Number* y) {
  for (int64_t i = 0; i < count; ++i) put(nearest_e4m3(value_of(x[i]) / scale) * times, y + i);
}

template <class Number>
BITPORT_INLINE void e2m1_of(const Number* x, int64_t count, float scale, float times, Number* y) {
  for (int64_t i = 0; i < count; ++i) put(nearest_e2m1(value_of(x[i]) / scale) * times, y + i);
}

// The float32 scale of a block of this type with this amax: see numerics/qparams.py.
BITPORT_INLINE float scale_in(int32_t type, uint32_t amax_bits) {
  if (amax_bits >= kInfinity) return NAN;
  if (amax_bits == 0) return 1.0f;
  const float low = 0x1p-149f, high = highest_scale(BITPORT_F32, type, 448), raw = float_of_bits(amax_bits) / 448.0f;
  return raw < low ? low : raw > high ? high : raw;
}

// A power of two, 2^(code - 127), with code = exponent of amax - emax. The exponent is incremented if the fraction
// exceeds `above` ("rceil") or reaches 2 when rounded to `mantissa` bits ("even").
BITPORT_INLINE float power_of_two(uint32_t amax_bits, bool even, int mantissa, uint32_t above, int emax) {
  if (amax_bits >= kInfinity) return NAN;
  const uint32_t position = uint32_t(e8m0_position(int32_t(amax_bits))), fraction = position & 0x7fffffu;
  int code = int(position >> 23);
  code += even ? int((fraction + (1u << (22 - mantissa))) >> 23) : fraction > above;
  code -= emax;
  return float_of_e8m0(uint8_t(code < 0 ? 0 : code > 254 - emax ? 254 - emax : code));
}

// A scale rounded to the nearest e4m3 between the smallest, 2^-9, and the largest.
BITPORT_INLINE float e4m3_scale(float raw) { return nearest_e4m3(raw < 0x1p-9f ? 0x1p-9f : raw); }

thread_local Buffer row_buffer;

// Rounds a block, whose numbers share a scale of their own; `factor` receives it if it is not multiplied in.
template <int32_t Act, class Number>
BITPORT_INLINE void round_block(const RoundedRows& rounded, const Number* x, int64_t count, float* factor, Number* y) {
  const uint32_t amax = largest_of(x, count);
  if (Act == BITPORT_FP8_128) {
    const float scale = scale_in(rounded.product.x_type, amax);
    e4m3_of(x, count, scale, rounded.in_blocks ? 1.0f : scale, y);
    if (rounded.in_blocks) *factor = scale;
  } else if (Act == BITPORT_MXFP8) {
    const float scale = power_of_two(amax, false, 0, 0x600000u, 8);   // 448 = 1.75 * 2^8
    e4m3_of(x, count, scale, scale, y);
  } else if (Act == BITPORT_MXFP4) {
    const float scale = power_of_two(amax, true, 1, 0, 2);
    e2m1_of(x, count, scale, scale, y);
  } else {
    const float global = rounded.global;
    const float scale = amax >= kInfinity ? NAN : amax == 0 ? 1.0f : e4m3_scale(float_of_bits(amax) / 6.0f / global);
    e2m1_of(x, count, scale * global, scale, y);
  }
}

template <int32_t Act, int64_t Columns, class Number>
BITPORT_INLINE void round_blocks(const RoundedRows& rounded, const Number* x, float* factor, Number* y) {
  const int64_t k = rounded.product.weight.k;
  const int64_t next = rounded.in_blocks ? rounded.product.m : 0;
  int64_t i = 0;
  for (; i + Columns <= k; i += Columns, factor += next) round_block<Act>(rounded, x + i, Columns, factor, y + i);
  if (i < k) round_block<Act>(rounded, x + i, k - i, factor, y + i);
}

template <class Number>
BITPORT_INLINE void round_row(const RoundedRows& rounded, int64_t row, const Number* x, Number* y) {
  const int64_t k = rounded.product.weight.k;
  float* const factor = rounded.factors + row;
  if (!rounded.in_blocks) *factor = rounded.global;
  switch (rounded.act) {
    case BITPORT_FP8_ROW:
      *factor = scale_in(rounded.product.x_type, largest_of(x, k));
      return e4m3_of(x, k, *factor, 1.0f, y);
    case BITPORT_FP8_TENSOR: return e4m3_of(x, k, rounded.global, 1.0f, y);
    case BITPORT_FP8_128: return round_blocks<BITPORT_FP8_128, kScaled>(rounded, x, factor, y);
    case BITPORT_MXFP8: return round_blocks<BITPORT_MXFP8, 32>(rounded, x, factor, y);
    case BITPORT_MXFP4: return round_blocks<BITPORT_MXFP4, 32>(rounded, x, factor, y);
    default: return round_blocks<BITPORT_NVFP4, 16>(rounded, x, factor, y);
  }
}

struct Loops {
  uint32_t (*largest)(const float* x, int64_t count);
  void (*floats)(const RoundedRows& rounded, int64_t row, const float* x, float* y);
  void (*halves)(const RoundedRows& rounded, int64_t row, const uint16_t* x, uint16_t* y);
};

// The same loops, auto-vectorized for each register width.
#define BITPORT_LOOPS(name, attribute)                                                                                          \
  namespace name {                                                                                                              \
  attribute uint32_t largest(const float* x, int64_t n) { return largest_of(x, n); }                                            \
  attribute void floats(const RoundedRows& r, int64_t row, const float* x, float* y) { round_row(r, row, x, y); }               \
  attribute void halves(const RoundedRows& r, int64_t row, const uint16_t* x, uint16_t* y) { round_row(r, row, x, y); }         \
  constexpr Loops loops = {largest, floats, halves};                                                                            \
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

// Columns [from, from + count) of a row as float32.
void widen(const Product& product, int64_t row, int64_t from, int64_t count, float* to) {
  const int64_t width = width_of(product.x_type), k = product.weight.k;
  const Engine& engine = engine_for(product.isa, BITPORT_F32, product.m);
  engine.widen(static_cast<const char*>(product.x) + (row * k + from) * width, product.x_type, count, to);
}

}  // namespace

float global_scale(const Product& product, int32_t act, const float* act_scale) {
  if (act != BITPORT_FP8_TENSOR && act != BITPORT_NVFP4) return 1.0f;
  if (act_scale) return *act_scale;
  const Loops& loops = loops_for(product.isa);
  const int64_t k = product.weight.k, m = product.m;
  constexpr int64_t kPiece = 1024;
  std::atomic<uint32_t> most{0};
  share(m, m * k < kFewNumbers ? 1 : product.threads, [&](int64_t row) {
    alignas(64) float piece[kPiece];
    uint32_t found = 0;
    for (int64_t from = 0; from < k; from += kPiece) {
      const int64_t count = k - from < kPiece ? k - from : kPiece;
      widen(product, row, from, count, piece);
      const int64_t step = act == BITPORT_NVFP4 ? 16 : count;
      for (int64_t i = 0; i < count; i += step) {
        const uint32_t amax = loops.largest(piece + i, count - i < step ? count - i : step);
        if (amax > found && (amax < kInfinity || act == BITPORT_FP8_TENSOR)) found = amax;
      }
    }
    for (uint32_t seen = most; found > seen && !most.compare_exchange_weak(seen, found);) {}
  });
  if (act == BITPORT_FP8_TENSOR) return scale_in(product.x_type, most);
  if (!most) return 1.0f;
  const float low = 0x1p-140f, high = float(kLimits[BITPORT_F32].largest / 2688.0 * (1 - 0x1p-20));   // _global_scale in numerics/qparams.py
  const float raw = float_of_bits(most) / 2688.0f;
  return raw < low ? low : raw > high ? high : raw;
}

const void* RoundedRows::row(int64_t row) const {
  const int64_t k = product.weight.k;
  const size_t bytes = aligned(size_t(k) * (bf16 ? 2 : 4));
  char* const memory = row_buffer.need(bf16 ? bytes : 2 * bytes);
  if (!memory) return nullptr;
  if (!bf16) {
    float* const wide = reinterpret_cast<float*>(memory);
    const bool is_wide = product.x_type == BITPORT_F32;
    if (!is_wide) widen(product, row, 0, k, wide);
    float* const to = reinterpret_cast<float*>(memory + bytes);
    loops_for(product.isa).floats(*this, row, is_wide ? static_cast<const float*>(product.x) + row * k : wide, to);
    return to;
  }
  uint16_t* const half = reinterpret_cast<uint16_t*>(memory);   // x is bfloat16 too
  if (!rounds_to_floats(act)) return round_row_to_int8(product, act, row, half, factors + row) ? half : nullptr;
  loops_for(product.isa).halves(*this, row, static_cast<const uint16_t*>(product.x) + row * k, half);
  return half;
}

}  // namespace bitport
