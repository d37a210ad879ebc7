// Products, rows, whole weights and packing of random weights against float64, in exact memory.
#include <cfenv>
#include <thread>
#include "../kernels/rows.h"
#include "judge.h"
#include "tests.h"

namespace {

constexpr int32_t kFloats[] = {BITPORT_F32, BITPORT_BF16, BITPORT_F16};

// Rows as in a network, rows with a single nonzero number (which test every single code), zeros, and rows of one
// repeated number: rounded, all codes of x may be at the end of their range, as may be those of a weight.
void draw_rows(Numbers& x, int64_t m, int64_t k, Random& random) {
  for (int64_t row = 0; row < m; ++row) {
    const int64_t kind = below(random, 9), alone = below(random, k);
    const Random same = random;
    for (int64_t i = 0; i < k; ++i) {
      if (kind == 8) random = same;
      if (kind < 4 || kind == 8 || (kind < 7 && i == alone)) x.set_random(row * k + i, random, -6, 2);
      else x.set_zero(row * k + i);
    }
  }
}

void expect_close(const Numbers& y, int64_t i, double exact, double error, const char* what, const Shape& s,
                  int64_t m, int32_t act, int32_t then = BITPORT_NOTHING) {
  double allowed = rounded_error(y.type, exact, error);
  if (y.type == BITPORT_F16 && std::abs(exact) - error >= 65520) {   // it rounds to infinity, and no other result is allowed
    exact = std::copysign(0x1p16, exact);
    allowed = 0;
  }
  EXPECT(std::abs(y[i] - exact) <= allowed,
         "%s: y[%lld] is %.9g, should be %.9g +- %.3g (n %lld, k %lld, group %lld, bits %d, integer %d, scale type %d, "
         "zero type %d, m %lld, act %d, then %d, type %d)",
         what, (long long)i, y[i], exact, allowed, (long long)s.n, (long long)s.k, (long long)s.group, s.bits,
         s.integer, s.scale_type, s.zero_type, (long long)m, act, then, y.type);
}

void try_products(const Weight& w, int64_t m, int32_t type, int32_t act, Random& random) {
  const int64_t n = w.shape.n, k = w.shape.k;
  Numbers x(type, m * k, some_place(random)), bias_values(type, n, some_place(random));
  draw_rows(x, m, k, random);
  for (int64_t i = 0; i < n; ++i) bias_values.set_random(i, random, -3, 1);
  Numbers* bias = random() % 2 ? &bias_values : nullptr;
  Exact<float> scale(1, some_place(random));
  const int exponent = act == BITPORT_NVFP4 ? -10 : act == BITPORT_FP8_TENSOR ? -7 : -5;   // some of x is clipped
  scale[0] = float(std::ldexp(1.0 + double(random() % 64) / 64, exponent));
  const bool takes_scale = act == BITPORT_INT8_TENSOR || act == BITPORT_FP8_TENSOR || act == BITPORT_NVFP4;
  const float* given = takes_scale && random() % 2 ? scale.data() : nullptr;
  const Product exact = product(w, rounded(x, m, k, act, given), m, bias);
  const int32_t then = int32_t(below(random, 4));
  Numbers times(type, m * n, some_place(random));
  for (int64_t i = 0; i < m * n; ++i) times.set_random(i, random, -3, 2);
  const bool factor = then && random() % 2;
  const bool int8 = act >= BITPORT_INT8_ROW && act <= BITPORT_INT8_TENSOR;
  for (int32_t isa : isas()) {
    Numbers y(type, m * n, some_place(random));
    const int32_t code = bitport_dyn_linear(&w.view, x.data(), type, m, act, given, bias ? bias->data() : nullptr, then,
                                        factor ? times.data() : nullptr, y.data(), int32_t(1 + random() % 3), isa);
    EXPECT(code == 0, "%s: %s", bitport_isa_name(isa), bitport_error(code));
    const bool as_floats = isa == BITPORT_AMX && act != BITPORT_INT8_TENSOR && (w.shape.group % 32 || w.shape.group == 32);
    const bool multiplies_bf16 = isa == BITPORT_AVX512_BF16 || isa == BITPORT_AMX || isa == BITPORT_NEON_MATRIX;
    const bool in_bf16 = type == BITPORT_BF16 && multiplies_bf16 && (!int8 || as_floats);
    for (int64_t i = 0; i < m * n; ++i) {
      const double z = exact.value[size_t(i)], by = factor ? times[i] : 1;
      const double error = followed_error(then, z, exact.size[size_t(i)] * relative_error(k, in_bf16));
      expect_close(y, i, followed(then, z) * by, error * std::abs(by), bitport_isa_name(isa), w.shape, m, act, then);
    }
    ++cases;
  }
}

void try_rows(Weight& w, Random& random) {
  const int64_t n = w.shape.n, k = w.shape.k, count = below(random, 6);
  const int32_t type = one_of(random, kFloats);
  Exact<int64_t> ids(count, some_place(random));
  for (int64_t i = 0; i < count; ++i) ids[i] = below(random, n);
  Numbers rows(type, count * k, some_place(random)), whole(type, n * k, some_place(random));
  EXPECT(bitport_rows(&w.view, ids.data(), count, rows.data(), type, 2) == 0, "rows refused");
  Exact<uint8_t> codes(n * up(k * w.shape.bits, 8), some_place(random));
  std::memcpy(codes.data(), w.dense.data(), codes.bytes());
  Numbers scale(w.shape.scale_type, n * w.groups, some_place(random)), found(type, count * k, some_place(random));
  Numbers zero(w.zero ? w.shape.zero_type : BITPORT_U8, n * w.groups, some_place(random));
  const auto copy = [&](Numbers& to, int64_t at, Numbers& from, int64_t place) {
    const size_t bytes = size_t(bytes_of(to.type));
    std::memcpy(static_cast<char*>(to.data()) + size_t(at) * bytes, static_cast<char*>(from.data()) + size_t(place) * bytes, bytes);
  };
  for (int64_t at = 0; at < n * w.groups; ++at) {
    copy(scale, at, w.scale, w.place(at / w.groups, at % w.groups));
    if (w.zero) copy(zero, at, *w.zero, w.place(at / w.groups, at % w.groups));
  }
  BitportTiles by_row = w.view;
  by_row.codes = codes.data();
  by_row.scale = scale.data();
  by_row.zero = w.zero ? zero.data() : nullptr;
  EXPECT(bitport_dense_rows(&by_row, ids.data(), count, found.data(), type, 2) == 0, "dense rows refused");
  EXPECT(count == 0 || std::memcmp(rows.data(), found.data(), size_t(count * k * bytes_of(type))) == 0,
         "rows of tiles and dense ones differ");
  for (int32_t isa : isas())
    for (bool dense : {false, true}) {
      Numbers again(type, count * k, Place::fenced);
      const BitportTiles& weight = dense ? by_row : w.view;
      EXPECT(bitport::rows_on(isa, &weight, dense, ids.data(), count, again.data(), type, 2) == 0, "rows refused");
      EXPECT(count == 0 || std::memcmp(rows.data(), again.data(), rows.bytes()) == 0, "%s: other rows",
             bitport_isa_name(isa));
    }
  Exact<int64_t> all(n, some_place(random));
  for (int64_t i = 0; i < n; ++i) all[i] = i;
  EXPECT(bitport_rows(&w.view, all.data(), n, whole.data(), type, 2) == 0, "all rows refused");
  if (type == BITPORT_F32) {
    Numbers x(one_of(random, kFloats), n * k, some_place(random));
    for (int64_t i = 0; i < n * k; ++i) x.set_random(i, random, -3, 1);
    double sums[2], signal = 0, noise = 0;
    EXPECT(bitport_distance(&w.view, x.data(), x.type, sums, 2) == 0, "distance refused");
    for (int64_t i = 0; i < n * k; ++i) signal += x[i] * x[i], noise += (x[i] - whole[i]) * (x[i] - whole[i]);
    // Of each sum of n k terms, none negative, a rounding per term and a few in it: 2^-53 each, here and there. In the
    // kernel, differences, squares and sums of 16 of them are rounded to float32.
    const double error = double(n * k + 8) * 0x1p-52 + 18 * 0x1p-24;
    EXPECT(std::abs(sums[0] - signal) <= error * signal && std::abs(sums[1] - noise) <= error * noise,
           "distance: %g and %g, not %g and %g", sums[0], sums[1], signal, noise);
    ++cases;
  }
  const auto close = [&](const Numbers& y, int64_t i, int64_t from, const char* what) {
    expect_close(y, i, w.value[size_t(from)], w.size[size_t(from)] * relative_error(0, false), what, w.shape, count, 0);
  };
  for (int64_t i = 0; i < count * k; ++i) close(rows, i, ids[i / k] * k + i % k, "rows");
  for (int64_t i = 0; i < n * k; ++i) close(whole, i, i, "all rows");
  cases += 3;
}

void try_packing(const Weight& w, Random& random) {
  const Shape& s = w.shape;
  const int64_t row_bytes = up(s.k * s.bits, 8), spare = row_bytes * 8 - s.k * s.bits;
  Exact<uint8_t> dense(s.n * row_bytes, some_place(random)), tiles(int64_t(w.tiles.bytes()), some_place(random));
  EXPECT(bitport_unpack(w.tiles.data(), s.bits, s.n, s.k, dense.data(), 2) == 0, "unpack refused");
  for (int64_t i = 0; i < s.n * row_bytes; ++i) {
    const bool last = i % row_bytes == row_bytes - 1;
    EXPECT(dense[i] == (last ? w.dense[i] & (0xff >> spare) : w.dense[i]), "unpack: byte %lld", (long long)i);
  }
  EXPECT(bitport_pack(dense.data(), s.bits, s.n, s.k, tiles.data(), 2) == 0, "pack refused");
  EXPECT(std::memcmp(tiles.data(), w.tiles.data(), tiles.bytes()) == 0, "packed again, the tiles differ");
  cases += 2;
}

Shape some_shape(Random& random, int64_t number) {
  static const struct { int32_t bits, integer; } formats[] = {{1, 1}, {2, 1}, {3, 1}, {4, 1}, {5, 1}, {6, 1},
                                                              {7, 1}, {8, 1}, {4, 0}, {6, 0}, {8, 0}};
  const auto format = formats[number % 11];
  Shape s;
  s.bits = format.bits;
  s.integer = format.integer;
  s.scale_type = one_of(random, {BITPORT_F32, BITPORT_BF16, BITPORT_F16, BITPORT_E8M0, BITPORT_E4M3});
  const int32_t zero_types[] = {-1, -1, BITPORT_U8, BITPORT_U8, BITPORT_F32, BITPORT_BF16, BITPORT_F16};
  s.zero_type = s.integer ? one_of(random, zero_types) : -1;
  s.k = number % 53 == 7 ? 6300 : one_of(random, {1, 7, 16, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 100, 127, 160, 257, 300, 520, 1030});
  s.n = s.k > 300 ? 1 + below(random, 40) : one_of(random, {1, 2, 5, 16, 31, 32, 33, 40, 64, 65, 70});
  s.group = one_of(random, {int64_t(16), int64_t(32), int64_t(48), int64_t(64), int64_t(96), int64_t(128), s.k, s.k + 5,
                            INT64_MAX});
  return s;
}

}  // namespace

// All bits set are NaN in every scale type: what it scales must be NaN, and everything else unaffected.
void try_scales_that_are_none() {
  Random random(5);
  constexpr int64_t kLost = 37;   // row
  for (int32_t scale_type : {BITPORT_F32, BITPORT_BF16, BITPORT_F16, BITPORT_E8M0, BITPORT_E4M3}) {
    Weight w({40, 96, 32, 4, 1, scale_type, -1}, random);
    const int64_t bytes = bytes_of(scale_type);
    std::memset(static_cast<char*>(w.scale.data()) + w.place(kLost, 1) * bytes, 0xff, size_t(bytes));
    for (int32_t type : {BITPORT_F32, BITPORT_BF16})
      for (int64_t m : {1, 9})
        for (int32_t act : {BITPORT_AS_IS, BITPORT_INT8_ROW})
          for (int32_t isa : isas()) {
            Numbers x(type, m * 96, Place::heap), y(type, m * 40, Place::heap);
            for (int64_t i = 0; i < x.count; ++i) x.set_random(i, random, -2, 2);
            const int32_t code = bitport_dyn_linear(&w.view, x.data(), type, m, act, nullptr, nullptr, 0, nullptr,
                                                    y.data(), 1, isa);
            EXPECT(code == 0, "%s: %s", bitport_isa_name(isa), bitport_error(code));
            for (int64_t i = 0; i < y.count; ++i)
              EXPECT(std::isnan(y[i]) == (i % 40 == kLost),
                     "%s: y[%lld] is %g (scale type %d, m %lld, act %d, type %d)", bitport_isa_name(isa),
                     (long long)i, y[i], scale_type, (long long)m, act, type);
            ++cases;
          }
  }
}

// If x has fewer rows than a block, nothing may be computed for the missing ones: leftovers in their memory, large
// numbers under the sanitizer, would overflow, and subnormal ones would cost hundreds of cycles each.
void try_rows_that_are_not_there() {
  Random random(6);
  for (int64_t group : {64, 128, 256}) {
    const Weight w({40, 256, group, 4, 1, BITPORT_F32, BITPORT_U8}, random);
    for (int64_t m : {3, 5, 9, 17, 19})
      for (int32_t act : {BITPORT_AS_IS, BITPORT_INT8_ROW, BITPORT_FP8_128})
        for (int32_t isa : isas())
          std::thread([&] {   // without buffers of earlier calls
            Numbers x(BITPORT_BF16, m * 256, Place::heap), y(BITPORT_BF16, m * 40, Place::heap);
            for (int64_t i = 0; i < x.count; ++i) x.set_random(i, random, -2, 2);
            std::feclearexcept(FE_ALL_EXCEPT);
            const int32_t code = bitport_dyn_linear(&w.view, x.data(), BITPORT_BF16, m, act, nullptr, nullptr, 0, nullptr,
                                                    y.data(), 1, isa);
            const int raised = std::fetestexcept(FE_OVERFLOW | FE_INVALID);
            EXPECT(code == 0, "%s: %s", bitport_isa_name(isa), bitport_error(code));
            EXPECT(!raised, "%s: something overflows (group %lld, m %lld, act %d)", bitport_isa_name(isa),
                   (long long)group, (long long)m, act);
            ++cases;
          }).join();
  }
}

void try_weight(int64_t number, uint64_t seed) {
  Random random(seed * 1000003 + uint64_t(number));
  Weight w(some_shape(random, number), random);
  try_packing(w, random);
  try_rows(w, random);
  for (int32_t act = BITPORT_AS_IS; act <= BITPORT_FP8_128; ++act) {
    if (act >= BITPORT_INT8_ROW && act <= BITPORT_INT8_TENSOR && !w.shape.integer) continue;
    const int64_t m = number % 97 == 5 && act % 3 == 0 ? 530 : one_of(random, {1, 1, 2, 3, 4, 5, 8, 9, 17, 33, 70});
    const int32_t type = one_of(random, kFloats);
    // A new thread has no buffers kept from earlier calls: what it reads before writing is the sanitizer's fill
    // pattern, not numbers that could pass for right ones.
    if (random() % 2) std::thread([&] { try_products(w, m, type, act, random); }).join();
    else try_products(w, m, type, act, random);
  }
}
