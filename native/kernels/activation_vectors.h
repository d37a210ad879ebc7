// activation.h in vectors. A file that includes this says before what F, a vector of kWidth floats, is, INLINE, and
//   all(number)  madd(a, b, c)  smaller(limit, x)  larger(limit, x)   a NaN of x stays one
//   size(x)      whole(x)       power(n)           over_one(x)        |x|, to the nearest whole number, 2^n, 1 / x
//   load_part(numbers, type, i, count)                                 kWidth numbers from i on, 0 past the last

namespace bitport {
namespace {

// exp(-x) for 0 <= x <= 85: 2^n exp(r), |r| <= ln(2) / 2, the polynomial within 2^-23. ln(2) is taken off in two parts:
// n times the first is exact.
INLINE F falling(F x) {
  const F n = whole(x * all(-1.44269504f));
  const F r = madd(n, all(2.12194440e-4f), madd(n, all(-0.693359375f), all(0.0f) - x));
  F p = madd(r, all(0.00831253f), all(0.04189012f));
  p = madd(p, r, all(0.16667114f));
  p = madd(p, r, all(0.49999232f));
  return (madd(p, r * r, r) + all(1.0f)) * power(n);
}

// Phi(-a) = exp(-a^2 / 2) P(t), t = 1 / (1 + 0.3 a): P, a polynomial of degree 8 without a constant, within 2^-23 for a <= 13.
INLINE F normal_tail(F a) {
  const F t = over_one(madd(a, all(0.3f), all(1.0f)));
  F p = madd(t, all(0.0361948f), all(-0.15937807f));
  p = madd(p, t, all(0.210118f));
  p = madd(p, t, all(-0.057167f));
  p = madd(p, t, all(0.13041627f));
  p = madd(p, t, all(0.09934718f));
  p = madd(p, t, all(0.12084552f));
  p = madd(p, t, all(0.11962327f));
  return p * t * falling(a * a * all(0.5f));
}

INLINE F sigmoid_tail(F e) {
  const F part = falling(e);
  return part * over_one(part + all(1.0f));
}

template <int32_t Then>
INLINE F activated(F z) {
  const F a = smaller(all(Then == BITPORT_GELU ? 12.6f : Then == BITPORT_SILU ? 80.0f : 9.6f), size(z));
  F tail;
  if constexpr (Then == BITPORT_GELU) tail = normal_tail(a);
  if constexpr (Then == BITPORT_SILU) tail = sigmoid_tail(a);
  if constexpr (Then == BITPORT_GELU_TANH) tail = sigmoid_tail(a * madd(a * a, all(0.0713548163f), all(1.59576912f)));
  return larger(all(0.0f), z) - a * tail;
}

template <int32_t Then>
INLINE void activate_as(float* sum, const float* bias, const void* times, int32_t type, int64_t count) {
  F* at = reinterpret_cast<F*>(sum);
  for (int64_t j = 0; j < count; j += kWidth, ++at) {
    F z = *at;
    if (bias) z = z + load_part(bias, BITPORT_F32, j, count);
    z = activated<Then>(z);
    if (times) z = z * load_part(times, type, j, count);
    *at = z;
  }
}

INLINE void activate(int32_t then, float* sum, const float* bias, const void* times, int32_t type, int64_t count) {
  if (then == BITPORT_GELU) activate_as<BITPORT_GELU>(sum, bias, times, type, count);
  else if (then == BITPORT_GELU_TANH) activate_as<BITPORT_GELU_TANH>(sum, bias, times, type, count);
  else activate_as<BITPORT_SILU>(sum, bias, times, type, count);
}

}  // namespace
}  // namespace bitport
