// A random weight: the arguments of the kernels, and its values in float64.
#pragma once
#include <memory>
#include <vector>
#include "numbers.h"

inline int64_t up(int64_t a, int64_t b) { return a / b + (a % b != 0); }

struct Shape {
  int64_t n, k, group;
  int32_t bits, integer, scale_type, zero_type;   // zero_type < 0: none
};

struct Weight {
  Shape shape;
  int64_t groups;
  std::vector<uint8_t> code;                 // [n][k]
  Exact<uint8_t> dense, tiles;
  Numbers scale;
  std::unique_ptr<Numbers> zero;
  Exact<float> table, scale2;
  bool has_scale2;
  BitportTiles view;
  std::vector<double> value, size;           // [n][k]; size: sum of the magnitudes of the terms of a value

  Weight(const Shape& s, Random& random)
      : shape(s), groups(up(s.k, s.group)), code(size_t(s.n * s.k)),
        dense(s.n * up(s.k * s.bits, 8), some_place(random)),
        tiles(up(s.n, 32) * up(s.k, 32) * 128 * s.bits, some_place(random)),
        scale(s.scale_type, up(s.n, 32) * groups * 32, some_place(random)),
        table(1 << s.bits, some_place(random)), scale2(1, some_place(random)),
        has_scale2(s.scale_type == BITPORT_E4M3 || random() % 4 == 0), value(code.size()), size(code.size()) {
    draw_codes(random);
    draw_scales(random);
    draw_table(random);
    EXPECT(bitport_pack(dense.data(), s.bits, s.n, s.k, tiles.data(), 1) == 0, "pack refused");
    view = {tiles.data(), scale.data(), zero ? zero->data() : nullptr, has_scale2 ? scale2.data() : nullptr,
            table.data(), s.n, s.k, s.group, s.bits, s.integer, s.scale_type, zero ? s.zero_type : 0};
    for (int64_t row = 0; row < s.n; ++row)
      for (int64_t column = 0; column < s.k; ++column) {
        const int64_t at = row * s.k + column, group = place(row, column / s.group);
        const double entry = table[code[size_t(at)]], shift = zero ? (*zero)[group] + double(table[0]) : 0;
        const double times = scale[group] * (has_scale2 ? scale2[0] : 1.0);
        value[size_t(at)] = (entry - shift) * times;
        size[size_t(at)] = (std::abs(entry) + std::abs(shift) + (s.bits == 1)) * std::abs(times);
      }
  }

  int64_t place(int64_t row, int64_t group) const { return (row / 32 * groups + group) * 32 + row % 32; }

 private:
  void draw_codes(Random& random) {
    const int64_t row_bytes = up(shape.k * shape.bits, 8), spare = row_bytes * 8 - shape.k * shape.bits;
    const uint32_t all = (1u << shape.bits) - 1;
    const int64_t kind = below(random, 8);   // all at one end, all at the other, or random
    for (uint8_t& c : code) c = uint8_t(kind == 0 ? 0 : kind == 1 ? all : random() & all);
    for (int64_t row = 0; row < shape.n; ++row) {
      uint8_t* line = dense.data() + row * row_bytes;
      std::memset(line, 0, size_t(row_bytes));
      for (int64_t bit = 0; bit < shape.k * shape.bits; ++bit)
        line[bit / 8] |= uint8_t((code[size_t(row * shape.k + bit / shape.bits)] >> bit % shape.bits & 1) << bit % 8);
      if (spare) line[row_bytes - 1] |= uint8_t(random() << (8 - spare));   // padding may hold anything
    }
  }

  void draw_scales(Random& random) {
    const bool e4m3 = shape.scale_type == BITPORT_E4M3;
    scale2[0] = float(std::ldexp(1.0 + double(random() % 64) / 64, e4m3 ? -10 : -1));
    if (shape.zero_type >= 0) zero = std::make_unique<Numbers>(shape.zero_type, scale.count, some_place(random));
    for (int64_t i = 0; i < scale.count; ++i) {
      const bool filled_up = i / (32 * groups) * 32 + i % 32 >= shape.n;
      if (filled_up) scale.set_zero(i);
      else scale.set_random(i, random, e4m3 ? -5 : -8, e4m3 ? 4 : -5);
      if (!zero) continue;
      if (filled_up) zero->set_zero(i);
      else zero->set_random(i, random, -2, shape.bits);
    }
  }

  // e4m3 or e5m2; non-finite codes read as the largest number, so that sums can be compared.
  static float float8(int64_t code, bool e5m2) {
    const int mantissa = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7;
    const int64_t largest = e5m2 ? 0x7b : 0x7e, size = (code & 0x7f) < largest ? code & 0x7f : largest;
    const int64_t exponent = size >> mantissa, fraction = size & ((1 << mantissa) - 1);
    const double value = exponent ? std::ldexp(double(fraction + (1 << mantissa)), int(exponent) - bias - mantissa)
                                  : std::ldexp(double(fraction), 1 - bias - mantissa);
    return float(code & 0x80 ? -value : value);
  }

  // 4 bits: any values, as in nf4; 6: values exact in bfloat16; 8: float8.
  void draw_table(Random& random) {
    const bool e5m2 = random() % 2;
    const int64_t count = int64_t(1) << shape.bits, half = count / 2;
    for (int64_t i = 0; i < count; ++i) {
      const double any = double(random() % (shape.bits == 4 ? 99991 : 255) + 1) / 64 * (random() % 2 ? 1 : -1);
      if (shape.integer) table[i] = shape.bits == 1 ? float(i) - 0.5f : float(i - half);
      else if (shape.bits == 8) table[i] = float8(i, e5m2);
      else table[i] = float(shape.bits == 4 ? any / 999 : any);
    }
  }
};
