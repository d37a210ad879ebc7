// The expected product in float64: x rounded as the interface says, times the values of the weight, and the error bound
// of the kernels.
#pragma once
#include <algorithm>
#include <vector>
#include "weight.h"

// x after rounding; size: magnitudes, with zero points counted as separate terms.
struct Rounded { std::vector<double> value, size; };

// The nearest number with `mantissa` bits after the leading one and no exponent below `lowest`, ties to even.
inline double nearest(double v, int mantissa, int lowest, double largest) {
  v = std::clamp(v, -largest, largest);
  const double step = std::ldexp(1.0, std::max(v == 0 ? lowest : std::ilogb(v), lowest) - mantissa);
  return std::nearbyint(v / step) * step;
}
inline double e4m3(double v) { return nearest(v, 3, -6, 448); }
inline double e2m1(double v) { return nearest(v, 1, 0, 6); }

// Quotients that determine a code are float32, as in the code that chose the scale.
inline float over(double a, double b) { return float(a) / float(b); }

inline Rounded rounded(const Numbers& x, int64_t m, int64_t k, int32_t act, const float* given) {
  Rounded to{std::vector<double>(size_t(m * k)), std::vector<double>(size_t(m * k))};
  const auto largest = [&](int64_t begin, int64_t end) {
    double most = 0;
    for (int64_t i = begin; i < end; ++i) most = std::max(most, std::abs(x[i]));
    return most;
  };
  const auto scale_of = [](double amax, double code) { return amax ? over(amax, code) : 1.0f; };
  const bool of_all = act == BITPORT_INT8_TENSOR || act == BITPORT_FP8_TENSOR || act == BITPORT_NVFP4;
  const double code = act == BITPORT_INT8_TENSOR ? 127 : act == BITPORT_NVFP4 ? 2688 : 448;
  const float all = given ? *given : of_all ? scale_of(largest(0, m * k), code) : 0;
  const int64_t block = act == BITPORT_NVFP4   ? 16
                        : act == BITPORT_FP8_128 ? 128
                        : act == BITPORT_MXFP8 || act == BITPORT_MXFP4 ? 32 : k;
  for (int64_t row = 0; row < m; ++row)
    for (int64_t first = 0; first < k; first += block) {
      const int64_t begin = row * k + first, end = row * k + std::min(k, first + block);
      const double amax = largest(begin, end);
      double low = 0, high = 0;
      for (int64_t i = begin; i < end; ++i) low = std::min(low, x[i]), high = std::max(high, x[i]);
      float scale = all, zero = 0;
      if (act == BITPORT_INT8_ROW) scale = scale_of(amax, 127);
      if (act == BITPORT_INT8_ROW_ASYM) {
        scale = amax ? over(float(high) / 2 - float(low) / 2, 127.5) : 1.0f;
        zero = std::nearbyint(over(-low, scale)) - 128;
      }
      if (act == BITPORT_FP8_ROW || act == BITPORT_FP8_128) scale = scale_of(amax, 448);
      if (act == BITPORT_MXFP8) {   // the smallest power of two that scales amax to at most the largest number
        scale = 0x1p-60f;
        while (448.0 * scale < amax) scale *= 2;
      }
      if (act == BITPORT_MXFP4) {   // the exponent of amax, rounded to one more bit, minus that of 4
        const int exponent = amax ? std::ilogb(amax) : 0;
        scale = float(std::ldexp(1.0, exponent - 2 + (amax >= std::ldexp(1.75, exponent))));
      }
      if (act == BITPORT_NVFP4) scale = amax ? float(e4m3(std::max(over(over(amax, 6), all), 0x1p-9f))) : 1.0f;
      for (int64_t i = begin; i < end; ++i) {
        double v = x[i], size = std::abs(x[i]);
        switch (act) {
          case BITPORT_AS_IS: break;
          case BITPORT_INT8_ROW: case BITPORT_INT8_ROW_ASYM: case BITPORT_INT8_TENSOR:
            v = (std::clamp(std::nearbyint(over(v, scale)) + zero, -128.0f, 127.0f) - zero) * double(scale);
            size = std::abs(v) + 2 * std::abs(zero) * double(scale);
            break;
          case BITPORT_FP8_ROW: case BITPORT_FP8_TENSOR: case BITPORT_FP8_128: case BITPORT_MXFP8:
            size = std::abs(v = e4m3(over(v, scale)) * double(scale));
            break;
          case BITPORT_MXFP4: size = std::abs(v = e2m1(over(v, scale)) * double(scale)); break;
          default: size = std::abs(v = e2m1(over(v, scale * all)) * double(scale) * double(all));
        }
        to.value[size_t(i)] = v;
        to.size[size_t(i)] = size;
      }
    }
  return to;
}

struct Product { std::vector<double> value, size; };   // [m][n]; size: sum of the magnitudes of all terms

inline Product product(const Weight& w, const Rounded& x, int64_t m, const Numbers* bias) {
  const int64_t n = w.shape.n, k = w.shape.k;
  Product y{std::vector<double>(size_t(m * n)), std::vector<double>(size_t(m * n))};
  for (int64_t row = 0; row < m; ++row)
    for (int64_t j = 0; j < n; ++j) {
      const double *xv = &x.value[size_t(row * k)], *xs = &x.size[size_t(row * k)];
      const double *wv = &w.value[size_t(j * k)], *ws = &w.size[size_t(j * k)];
      double value = bias ? (*bias)[j] : 0, size = std::abs(value);
      for (int64_t i = 0; i < k; ++i) value += xv[i] * wv[i], size += xs[i] * ws[i];
      y.value[size_t(row * n + j)] = value;
      y.size[size_t(row * n + j)] = size;
    }
  return y;
}

constexpr double kPi = 3.14159265358979323846;   // M_PI is not in every math.h

// The function after a product, and the error bound of the kernels: the slope of each function is below 1.13; floats
// compute its parts, max(z, 0) and the rest, up to roundings and the error of an exponential exp(-e), which grows with
// e.
inline double followed(int32_t then, double z) {
  switch (then) {
    case BITPORT_GELU: return z * std::erfc(-z * std::sqrt(0.5)) / 2;
    case BITPORT_GELU_TANH: return z / (1 + std::exp(-std::sqrt(8 / kPi) * (z + 0.044715 * z * z * z)));
    case BITPORT_SILU: return z / (1 + std::exp(-z));
    default: return z;
  }
}
inline double followed_error(int32_t then, double z, double error_of_z) {
  if (then == BITPORT_NOTHING) return error_of_z;
  const double value = followed(then, z), a = std::abs(z);
  const double e = then == BITPORT_GELU ? a * a / 2 : then == BITPORT_SILU ? a : std::sqrt(8 / kPi) * (a + 0.044715 * a * a * a);
  return 1.13 * error_of_z + std::abs(value) * 0x1p-22 + (std::max(z, 0.0) - value) * (16 + 2 * e) * 0x1p-24 + (a > 5 ? 1e-12 : 0);
}

// A term is subject to fewer than k additions and 16 other roundings (conversions, zero, scales, bias) in float32, in
// whatever order, and one rounding to bfloat16 in the bfloat16 paths: (1 + 2^-24)^(k + 16) - 1 < (k + 16) 2^-23, times
// its size.
inline double relative_error(int64_t k, bool in_bf16) { return double(k + 16) * 0x1p-23 + (in_bf16 ? 0x1.01p-8 : 0); }
