// activation.h in vectors. A file that includes this defines V, a vector of kWidth floats, INLINE, and
//   all(number)  madd(a, b, c)  smaller(limit, x)  larger(limit, x)   a NaN in x is kept
//   size(x)      fraction(x)    scaled(v, x)       over_one(x)        |x|, x - floor(x), v 2^floor(x), 1 / x
//   load_part(numbers, type, i, end)                                   kWidth numbers from i on, 0 past the end

namespace bitport {
namespace {

constexpr int64_t kVectors = 32 / kWidth;

// A row of a tile: every step is done for all of its vectors, since a single one would be bound by latency.
struct F { V v[kVectors]; };
#define BITPORT_EACH(expression)                               \
  {                                                            \
    F y;                                                       \
    for (int64_t i = 0; i < kVectors; ++i) y.v[i] = expression; \
    return y;                                                  \
  }
INLINE F operator+(const F& a, const F& b) BITPORT_EACH(a.v[i] + b.v[i])
INLINE F operator+(const F& a, V b) BITPORT_EACH(a.v[i] + b)
INLINE F operator*(const F& a, V b) BITPORT_EACH(a.v[i] * b)
INLINE F operator*(const F& a, const F& b) BITPORT_EACH(a.v[i] * b.v[i])
INLINE F operator-(const F& a, const F& b) BITPORT_EACH(a.v[i] - b.v[i])
INLINE F madd(const F& a, const F& b, V c) BITPORT_EACH(madd(a.v[i], b.v[i], c))
INLINE F smaller(V limit, const F& x) BITPORT_EACH(smaller(limit, x.v[i]))
INLINE F larger(V limit, const F& x) BITPORT_EACH(larger(limit, x.v[i]))
INLINE F size(const F& x) BITPORT_EACH(size(x.v[i]))
INLINE F fraction(const F& x) BITPORT_EACH(fraction(x.v[i]))
INLINE F scaled(const F& v, const F& x) BITPORT_EACH(scaled(v.v[i], x.v[i]))
INLINE F over_one(const F& x) BITPORT_EACH(over_one(x.v[i]))
#undef BITPORT_EACH

// A polynomial, highest power first.
template <size_t N>
INLINE F polynomial(const float (&factors)[N], const F& x) {
  F p = x * all(factors[0]) + all(factors[1]);
  for (size_t i = 2; i < N; ++i) p = madd(p, x, all(factors[i]));
  return p;
}

// 2^x for -126 <= x: the polynomial is within 2^-23 of 2^f for 0 <= f < 1, and 1 for 0.
constexpr float kPower[] = {0.001867131912f, 0.009017026983f, 0.0557999164f, 0.240164444f, 0.6931512952f, 1.0f};
INLINE F power_of_two(const F& x) { return scaled(polynomial(kPower, fraction(x)), x); }

// log2(Phi(-a)) within 2^-23 for a <= 5.5; beyond, it decreases to -63.6 at a = 9.
constexpr float kNormal[] = {-2.043680070e-08f, 6.332544444e-07f, -8.431464266e-06f, 6.095763820e-05f, -2.236221044e-04f, -1.222959690e-04f,
                             0.007104698103f, -0.05255453289f, -0.4591809213f, -1.151109457f, -0.9999998808f};

INLINE F sigmoid(const F& x) {   // 1 / (1 + 2^-x), x <= 0
  const F part = power_of_two(x);
  return part * over_one(part + all(1.0f));
}

constexpr float kLog2E = 1.44269504f, kTanh = 1.59576912f * kLog2E;   // sqrt(8 / pi)

template <int32_t Then>
INLINE F activated(const F& z) {
  const F a = smaller(all(Then == BITPORT_SILU ? 80.0f : 9.0f), size(z));
  F tail;
  if constexpr (Then == BITPORT_GELU) tail = power_of_two(polynomial(kNormal, a));
  if constexpr (Then == BITPORT_SILU) tail = sigmoid(a * all(-kLog2E));
  if constexpr (Then == BITPORT_GELU_TANH) tail = sigmoid(a * (a * a * all(-0.044715f * kTanh) + all(-kTanh)));
  return larger(all(0.0f), z) - a * tail;
}

template <int32_t Then>
INLINE void activate_as(const Following& f, float* sum, int64_t rows) {
  F bias;
  for (int64_t i = 0; i < kVectors; ++i) bias.v[i] = f.bias ? load_part(f.bias, BITPORT_F32, i * kWidth, f.count) : all(0);
  const int64_t bytes = f.type == BITPORT_F32 ? 4 : 2;
  for (int64_t r = 0; r < rows; ++r, sum += 32) {
    F& at = *reinterpret_cast<F*>(sum);
    const F y = activated<Then>(at + bias);
    for (int64_t i = 0; i < kVectors; ++i)
      at.v[i] = f.times ? y.v[i] * load_part(f.times, f.type, r * f.next + i * kWidth, r * f.next + f.count) : y.v[i];
    // for the next tile; the access pattern defeats the hardware prefetcher
    if (f.times) __builtin_prefetch(static_cast<const char*>(f.times) + (r * f.next + 32) * bytes);
  }
}

INLINE void activate(const Following& f, float* sum, int64_t rows) {
  if (f.then == BITPORT_GELU) activate_as<BITPORT_GELU>(f, sum, rows);
  else if (f.then == BITPORT_GELU_TANH) activate_as<BITPORT_GELU_TANH>(f, sum, rows);
  else activate_as<BITPORT_SILU>(f, sum, rows);
}

}  // namespace
}  // namespace bitport
