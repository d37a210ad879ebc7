// The update of one block: moments are dequantized, updated and requantized while they are in L1, in loops that the
// compiler vectorizes for each register width.
#include "uncontracted.h"
#include <cfloat>
#include <cmath>
#include <cstring>
#include "engine.h"
#include "number.h"
#include "step.h"
#include "step_codes.h"
#if BITPORT_X86
#include <immintrin.h>
#elif BITPORT_ARM
#include <arm_neon.h>
#endif

namespace bitport {
namespace {

// The numbers of one block, zero-padded to whole vectors.
constexpr int64_t kWhole = 16;
struct alignas(64) Numbers { float at[kMostInBlock]; };

BITPORT_INLINE uint32_t mix(uint32_t x) {
  x = (x >> 16 ^ x) * 0x21f0aaadu;
  x = (x >> 15 ^ x) * 0x735a2d97u;
  return x >> 15 ^ x;
}

BITPORT_INLINE void load(const void* from, int32_t type, int64_t at, int64_t count, float* x) {
  if (type == BITPORT_F32) std::memcpy(x, static_cast<const float*>(from) + at, size_t(count) * 4);
  else {
    const uint16_t* h = static_cast<const uint16_t*>(from) + at;
    if (type == BITPORT_BF16)
      for (int64_t i = 0; i < count; ++i) x[i] = float_of_bf16(h[i]);
    else
      for (int64_t i = 0; i < count; ++i) x[i] = float_of_f16(h[i]);
  }
}

BITPORT_INLINE uint16_t bf16_by_chance(float f, uint32_t random) {
  const uint32_t bits = bits_of_float(f);
  return is_finite(bits) ? uint16_t((bits + (random & 0xffffu)) >> 16) : bf16_of_float(f);
}

// Below 2^-14, float16 numbers are multiples of 2^-24.
BITPORT_INLINE uint16_t f16_by_chance(float f, uint32_t random) {
  const uint32_t bits = bits_of_float(f), size = bits & 0x7fffffffu;
  if (!is_finite(bits)) return f16_of_float(f);
  if (size >= 0x38800000u) return f16_of_float(float_of_bits((bits + (random & 0x1fffu)) & ~0x1fffu));
  const float steps = float_of_bits(size) * 0x1p24f, whole = float(int32_t(steps));
  const bool up = float(random >> 8) * 0x1p-24f < steps - whole;
  return uint16_t((bits >> 16 & 0x8000u) + uint32_t(whole) + up);
}

BITPORT_INLINE void store(const float* x, int64_t count, void* to, int32_t type, int64_t at, bool by_chance, uint32_t key) {
  if (type == BITPORT_F32) {
    std::memcpy(static_cast<float*>(to) + at, x, size_t(count) * 4);
    return;
  }
  uint16_t* h = static_cast<uint16_t*>(to) + at;
  const uint32_t from = uint32_t(at);
  if (type == BITPORT_BF16 && by_chance)
    for (int64_t i = 0; i < count; ++i) h[i] = bf16_by_chance(x[i], mix((from + uint32_t(i)) ^ key));
  else if (type == BITPORT_BF16)
    for (int64_t i = 0; i < count; ++i) h[i] = bf16_of_float(x[i]);
  else if (by_chance)
    for (int64_t i = 0; i < count; ++i) h[i] = f16_by_chance(x[i], mix((from + uint32_t(i)) ^ key));
  else
    for (int64_t i = 0; i < count; ++i) h[i] = f16_of_float(x[i]);
}

BITPORT_INLINE void read(const BitportMap& map, const Place& place, int64_t count, float* x) {
  const float scale = *place.scale;
  if (map.bits == 8)
    for (int64_t i = 0; i < count; ++i) x[i] = map.values[place.codes[i]];
  else
    for (int64_t i = 0; i < count; ++i) x[i] = map.values[place.codes[i / 2] >> i % 2 * 4 & 15];
  for (int64_t i = 0; i < kMostInBlock; i += kWhole) {
    if (i >= count) break;
    for (int64_t j = i; j < i + kWhole; ++j) x[j] *= scale;
  }
}

BITPORT_INLINE void write(const BitportMap& map, const Place& place, int64_t count, int64_t whole, const float* x) {
  uint32_t amax = 0;
  for (int64_t i = 0; i < whole; ++i) {
    const uint32_t size = bits_of_float(x[i]) & 0x7fffffffu;
    amax = size > amax ? size : amax;
  }
  const float scale = *place.scale = scale_of(amax, map), inverse = 1 / scale;
  Numbers q;
  if (map.positive)   // tiny numbers stay above zero
    for (int64_t i = 0; i < whole; ++i) {
      const float least = x[i] < FLT_MIN ? x[i] : FLT_MIN, steps = x[i] * inverse;
      q.at[i] = steps < least ? least : steps;
    }
  else
    for (int64_t i = 0; i < whole; ++i) q.at[i] = x[i] * inverse;
  code_one_by_one(map, q.at, count, place.codes);
}

// Square roots, which compilers do not vectorize while sqrt may set errno.
struct Plain {
  static BITPORT_INLINE void roots(const float* x, int64_t whole, float* y) {
    for (int64_t i = 0; i < whole; ++i) y[i] = std::sqrt(x[i]);
  }
};
#if BITPORT_X86
struct Avx2 {
  __attribute__((target("avx2"))) static void roots(const float* x, int64_t whole, float* y) {
    for (int64_t i = 0; i < whole; i += 8) _mm256_store_ps(y + i, _mm256_sqrt_ps(_mm256_load_ps(x + i)));
  }
};
struct Avx512 {
  __attribute__((target("avx512f"))) static void roots(const float* x, int64_t whole, float* y) {
    for (int64_t i = 0; i < whole; i += 16) _mm512_store_ps(y + i, _mm512_sqrt_ps(_mm512_load_ps(x + i)));
  }
};
#elif BITPORT_ARM
struct Neon {
  static BITPORT_INLINE void roots(const float* x, int64_t whole, float* y) {
    for (int64_t i = 0; i < whole; i += 4) vst1q_f32(y + i, vsqrtq_f32(vld1q_f32(x + i)));
  }
};
#endif

// NaN if x is not finite.
BITPORT_INLINE float sign_of(float x) { return float(x > 0) - float(x < 0) + 0 * x; }

template <class Isa>
BITPORT_INLINE void move(int32_t rule, const BitportStep& s, int64_t whole, float* __restrict p, float* __restrict g,
                         float* __restrict m, float* __restrict v) {
  if (s.sign != 1)
    for (int64_t i = 0; i < whole; ++i) g[i] = -g[i];
  if (s.l2 != 0)
    for (int64_t i = 0; i < whole; ++i) g[i] = g[i] + p[i] * s.l2;
  if (s.decay != 1)
    for (int64_t i = 0; i < whole; ++i) p[i] = p[i] * s.decay;
  const float beta1 = s.beta1, rest1 = s.rest1, beta2 = s.beta2, rest2 = s.rest2, rate = s.rate;
  if (rule == BITPORT_ADAM) {
    const float correction = s.correction, eps = s.eps;
    for (int64_t i = 0; i < whole; ++i) {
      m[i] = m[i] * beta1 + g[i] * rest1;
      v[i] = v[i] * beta2 + g[i] * g[i] * rest2;
    }
    Isa::roots(v, whole, g);
    for (int64_t i = 0; i < whole; ++i) p[i] = p[i] - m[i] / (g[i] * correction + eps) * rate;
  } else if (rule == BITPORT_LION) {
    for (int64_t i = 0; i < whole; ++i) {
      p[i] = p[i] - sign_of(m[i] * beta1 + g[i] * rest1) * rate;
      m[i] = m[i] * beta2 + g[i] * rest2;
    }
  } else if (s.count == 0) {
    for (int64_t i = 0; i < whole; ++i) p[i] = p[i] - g[i] * rate;
  } else {
    for (int64_t i = 0; i < whole; ++i) m[i] = m[i] * beta1 + g[i] * rest1;
    if (s.nesterov != 0)
      for (int64_t i = 0; i < whole; ++i) p[i] = p[i] - (g[i] + m[i] * beta1) * rate;
    else
      for (int64_t i = 0; i < whole; ++i) p[i] = p[i] - m[i] * rate;
  }
}

template <class Isa>
BITPORT_INLINE void step_block(int32_t rule, const BitportStep& s, int64_t row, int64_t begin, int64_t count) {
  const int64_t at = row * s.k + begin, whole = (count + kWhole - 1) / kWhole * kWhole;
  Numbers p, g, moments[2];
  for (int64_t i = count; i < whole; ++i) p.at[i] = g.at[i] = moments[0].at[i] = moments[1].at[i] = 0;
  load(s.param, s.type, at, count, p.at);
  load(s.grad, s.grad_type, at, count, g.at);
  for (int32_t i = 0; i < s.count; ++i) {
    const BitportMoment& m = s.moments[i];
    if (m.map) read(*m.map, place_of(m, s.k, row, begin), count, moments[i].at);
    else load(m.data, m.type, at, count, moments[i].at);
  }
  move<Isa>(rule, s, whole, p.at, g.at, moments[0].at, moments[1].at);
  store(p.at, count, s.param, s.type, at, s.by_chance, s.key);
  for (int32_t i = 0; i < s.count; ++i) {
    const BitportMoment& m = s.moments[i];
    if (m.map) write(*m.map, place_of(m, s.k, row, begin), count, whole, moments[i].at);
    else store(moments[i].at, count, m.data, m.type, at, s.by_chance, m.key);
  }
}

#define BITPORT_STEP(name, isa, attribute)                                                                            \
  template <int32_t Rule>                                                                                             \
  attribute void name(const BitportStep& s, int64_t row, int64_t begin, int64_t count) {                              \
    step_block<isa>(Rule, s, row, begin, count);                                                                      \
  }                                                                                                                   \
  constexpr StepBlock name##s[] = {name<BITPORT_ADAM>, name<BITPORT_LION>, name<BITPORT_SGD>};
BITPORT_STEP(plain_block, Plain, )
#if BITPORT_X86
BITPORT_STEP(avx2_block, Avx2, __attribute__((target("avx2"))))
BITPORT_STEP(avx512_block, Avx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq" BITPORT_LONG_VECTORS))))
#elif BITPORT_ARM
BITPORT_STEP(neon_block, Neon, )
#endif

}  // namespace

StepBlock step_in_loops(int32_t isa, int32_t rule) {
#if BITPORT_X86
  if (isa >= BITPORT_AVX512_VNNI) return avx512_blocks[rule];
  if (isa == BITPORT_AVX2) return avx2_blocks[rule];
#elif BITPORT_ARM
  if (isa >= BITPORT_NEON) return neon_blocks[rule];
#endif
  (void)isa;
  return plain_blocks[rule];
}

}  // namespace bitport
