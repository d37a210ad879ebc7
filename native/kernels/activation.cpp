// The functions after a product in plain C++, by the formula in double: the reference for the vector code.
#include "activation.h"
#include <cmath>
#include "number.h"

namespace bitport {
namespace {

double activated(int32_t then, double z) {
  if (z != z) return z;
  const double a = std::fmin(std::fabs(z), 80.0);
  const double tail = then == BITPORT_GELU ? 0.5 * std::erfc(a * 0.70710678118654752)
                      : then == BITPORT_SILU ? 1 / (1 + std::exp(a))
                                             : 1 / (1 + std::exp(1.5957691216057308 * (a + 0.044715 * a * a * a)));
  return std::fmax(z, 0.0) - a * tail;
}

}  // namespace

void scalar_activate(const Following& f, float* sum, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r, sum += 32)
    for (int64_t j = 0; j < f.count; ++j) {
      const double y = activated(f.then, f.bias ? sum[j] + f.bias[j] : sum[j]);
      sum[j] = float(f.times ? y * load_number(f.times, f.type, r * f.next + j) : y);
    }
}

}  // namespace bitport
