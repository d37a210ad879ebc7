// Rows of tiles and dense rows: every instruction set must produce the bits of scalar code, for all types and groups,
// and for any scales and zeros, including infinite, NaN and subnormal ones.
#include "../kernels/rows.h"
#include "numbers.h"
#include "tests.h"

namespace {

constexpr int64_t kIds = 4;

// Half of them typical of a network, the others random bits, some all ones: a NaN that rounding up would turn into 0.
void draw(Numbers& numbers, Random& random, int low, int high) {
  uint8_t* const bytes = static_cast<uint8_t*>(numbers.data());
  const int64_t width = bytes_of(numbers.type);
  for (int64_t i = 0; i < numbers.count; ++i) {
    const bool ones = random() % 8 == 0;
    if (random() % 2) numbers.set_random(i, random, low, high);
    else for (int64_t b = i * width; b < (i + 1) * width; ++b) bytes[b] = uint8_t(ones ? 255 : random());
  }
}

bool is_nan(const Numbers& y, int64_t i) {
  const uint32_t infinity = y.type == BITPORT_F32 ? 0x7f800000u : y.type == BITPORT_BF16 ? 0x7f80 : 0x7c00;
  const uint32_t sign = y.type == BITPORT_F32 ? 0x80000000u : 0x8000;
  return (y.bits(i) & ~sign) > infinity;
}

// meaning: 0 integers, 1 a table of arbitrary numbers, 2 that of e2m1
void fill(Exact<float>& table, int32_t bits, int meaning, Random& random) {
  static const float e2m1[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  for (int i = 0; i < 1 << bits; ++i) {
    const float any = float(random() % 99991) / 99991 - 0.5f, small = i % 16 < 8 ? e2m1[i % 8] : -e2m1[i % 8];
    table[i] = meaning == 0 ? float(i - (1 << (bits - 1))) : meaning == 1 ? any : small;
  }
}

void try_weight(bool dense, int32_t bits, int64_t k, int64_t group, int meaning, int32_t scale_type, int32_t zero_type,
                Random& random) {
  const int64_t groups = group < k ? (k + group - 1) / group : 1;
  const int64_t rows = dense ? 5 : 37, filled = dense ? rows : 64;   // in tiles, the last rows are padding
  const int64_t bytes = dense ? rows * ((k * bits + 7) / 8) : filled * ((k + 31) / 32 * 32) * bits / 8;
  Exact<uint8_t> codes(bytes, some_place(random));
  for (size_t i = 0; i < codes.bytes(); ++i) codes[int64_t(i)] = uint8_t(random());
  Numbers scale(scale_type, filled * groups, some_place(random));
  Numbers zero(zero_type < 0 ? BITPORT_U8 : zero_type, filled * groups, some_place(random));
  draw(scale, random, -6, 3);
  draw(zero, random, 0, 4);
  Exact<float> table(int64_t(1) << bits, some_place(random)), scale2(1, some_place(random));
  fill(table, bits, meaning, random);
  scale2[0] = 0.4375f;
  Exact<int64_t> ids(kIds, some_place(random));
  for (int64_t i = 0; i < kIds; ++i) ids[i] = below(random, rows);
  ids[0] = rows - 1;   // ends where memory does
  const BitportTiles w{codes.data(), scale.data(), zero_type < 0 ? nullptr : zero.data(),
                       random() % 2 ? scale2.data() : nullptr, table.data(), rows, k, group, bits, meaning == 0,
                       scale_type, zero_type < 0 ? 0 : zero_type};
  for (int32_t type : {BITPORT_F32, BITPORT_BF16, BITPORT_F16}) {
    Numbers plain(type, kIds * k, some_place(random));
    EXPECT(bitport::rows_on(BITPORT_SCALAR, &w, dense, ids.data(), kIds, plain.data(), type, 1) == 0, "rows refused");
    for (int32_t isa : isas()) {
      Numbers y(type, kIds * k, some_place(random));
      EXPECT(bitport::rows_on(isa, &w, dense, ids.data(), kIds, y.data(), type, 1) == 0, "rows refused");
      for (int64_t i = 0; i < kIds * k; ++i)
        EXPECT(y.bits(i) == plain.bits(i) || (is_nan(y, i) && is_nan(plain, i)),
               "%s: column %lld is %x, should be %x (%s, %d bits, k %lld, group %lld, meaning %d, scale type %d, zero type %d, "
               "type %d)",
               bitport_isa_name(isa), (long long)(i % k), y.bits(i), plain.bits(i), dense ? "dense" : "tiles", bits, (long long)k, (long long)group,
               meaning, scale_type, zero_type, type);
      ++cases;
    }
  }
}

}  // namespace

void try_rows_alike() {
  static const struct { int64_t k, group; } shapes[] = {
      {32, 32}, {64, 32}, {96, 64}, {160, 160}, {544, 32}, {320, 128}, {2080, 32}, {2144, 1056}, {64, 70},
      {96, INT64_MAX}, {4160, 96}, {8224, 64},                    // the last two: more columns than are read at once
      {48, 16}, {72, 96}, {128, 48}, {51, 64}, {4147, 16}};       // steps are split, or not full: other code paths
  Random random(7);
  for (const auto& shape : shapes)
    for (bool dense : {false, true})
      for (int32_t bits = 1; bits <= 8; ++bits) {
        const auto attempt = [&](int meaning, int32_t scale_type, int32_t zero_type) {
          try_weight(dense, bits, shape.k, shape.group, meaning, scale_type, zero_type, random);
        };
        const bool all = shape.k < 4096 && (bits == 4 || bits == 8);   // else a few
        for (int32_t scale_type : {BITPORT_F32, BITPORT_BF16, BITPORT_F16, BITPORT_E8M0, BITPORT_E4M3}) {
          if (!all && below(random, 4)) continue;
          for (int32_t zero_type : {-1, +BITPORT_U8, +BITPORT_F32, +BITPORT_BF16, +BITPORT_F16})
            if (all || !below(random, 3)) attempt(0, scale_type, zero_type);
          if (bits <= 4 || bits == 6 || bits == 8)
            for (int meaning : {1, 2}) attempt(meaning, scale_type, -1);
        }
      }
}
