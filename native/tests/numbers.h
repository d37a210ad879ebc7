// Numbers of every type in the interface: as float64, and random. Nothing is shared with the kernels.
#pragma once
#include <cmath>
#include <random>
#include <vector>
#include "../kernels/bitport_kernels.h"
#include "memory.h"

using Random = std::mt19937_64;

inline int64_t below(Random& random, int64_t end) { return int64_t(random() % uint64_t(end)); }

template <size_t N, class T>
T one_of(Random& random, const T (&choices)[N]) { return choices[below(random, int64_t(N))]; }

inline Place some_place(Random& random) { return one_of(random, {Place::heap, Place::skewed, Place::fenced}); }

// The instruction sets that this machine has, scalar code first.
inline std::vector<int32_t> isas() {
  std::vector<int32_t> all;
  for (int32_t isa = 0; isa < BITPORT_ISAS; ++isa)
    if (bitport_has_isa(isa)) all.push_back(isa);
  return all;
}

inline int64_t bytes_of(int32_t type) {
  return type == BITPORT_F32 ? 4 : type == BITPORT_BF16 || type == BITPORT_F16 ? 2 : 1;
}

// A float with fields of these widths; all exponents are treated as finite.
inline double small_float(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = int(bits >> mantissa_bits & ((1u << exponent_bits) - 1));
  const double fraction = std::ldexp(double(bits & ((1u << mantissa_bits) - 1)), -mantissa_bits);
  const double size = std::ldexp(exponent ? 1 + fraction : fraction, (exponent ? exponent : 1) - bias);
  return bits >> (exponent_bits + mantissa_bits) & 1 ? -size : size;
}

// An array of a type in exact memory.
class Numbers {
 public:
  Numbers(int32_t type, int64_t count, Place place)
      : type(type), count(count), of4(type == BITPORT_F32 ? count : 0, place),
        of2(bytes_of(type) == 2 ? count : 0, place), of1(bytes_of(type) == 1 ? count : 0, place) {}

  void* data() {
    if (bytes_of(type) == 4) return of4.data();
    if (bytes_of(type) == 2) return of2.data();
    return of1.data();
  }
  size_t bytes() const { return size_t(count * bytes_of(type)); }

  uint32_t bits(int64_t i) const {
    if (bytes_of(type) == 2) return of2[i];
    if (bytes_of(type) == 1) return of1[i];
    uint32_t bits;
    std::memcpy(&bits, &of4[i], 4);
    return bits;
  }

  // Infinity reads as the power of two after the largest number.
  double operator[](int64_t i) const {
    switch (type) {
      case BITPORT_F32: return of4[i];
      case BITPORT_BF16: return (bits(i) & 0x7fff) > 0x7f80 ? NAN : small_float(bits(i), 8, 7);
      case BITPORT_F16: return (bits(i) & 0x7fff) > 0x7c00 ? NAN : small_float(bits(i), 5, 10);
      case BITPORT_E8M0: return bits(i) == 255 ? NAN : std::ldexp(1.0, int(bits(i)) - 127);
      case BITPORT_E4M3: return (bits(i) & 127) == 127 ? NAN : small_float(bits(i), 4, 3);
      default: return bits(i);
    }
  }

  void set_zero(int64_t i) { set(i, 0); }

  // Either sign if the type has one, 2^low <= magnitude < 2^high; any byte for U8.
  void set_random(int64_t i, Random& random, int low, int high) {
    const uint32_t any = uint32_t(random()), sign = any >> 31, exponent = uint32_t(low + below(random, high - low));
    switch (type) {
      case BITPORT_F32: set(i, sign << 31 | (exponent + 127) << 23 | (any & 0x7fffff)); break;
      case BITPORT_BF16: set(i, sign << 15 | (exponent + 127) << 7 | (any & 0x7f)); break;
      case BITPORT_F16: set(i, sign << 15 | (exponent + 15) << 10 | (any & 0x3ff)); break;
      case BITPORT_E4M3: set(i, sign << 7 | (exponent + 7) << 3 | (any & 7)); break;
      case BITPORT_E8M0: set(i, exponent + 127); break;
      default: set(i, any & 255);
    }
  }

  const int32_t type;
  const int64_t count;

 private:
  void set(int64_t i, uint32_t bits) {
    if (type == BITPORT_F32) std::memcpy(&of4[i], &bits, 4);
    else if (bytes_of(type) == 2) of2[i] = uint16_t(bits);
    else of1[i] = uint8_t(bits);
  }
  Exact<float> of4;
  Exact<uint16_t> of2;
  Exact<uint8_t> of1;
};

// The largest relative error of rounding to this type.
inline double half_ulp(int32_t type) { return type == BITPORT_F32 ? 0x1p-24 : type == BITPORT_BF16 ? 0x1p-8 : 0x1p-11; }

// The error bound of a stored number relative to `exact`, if it was rounded from a number with an error of at most
// `error`.
inline double rounded_error(int32_t type, double exact, double error) {
  return error + half_ulp(type) * (std::abs(exact) + error) + (type == BITPORT_F16 ? 0x1p-25 : 0x1p-120);
}
