// Random weights in random formats, in exact memory: every instruction set and number of threads must write the same
// bytes, and integers without a zero point must be within half a step unless clipped.
#include <vector>
#include "../kernels/status.h"
#include "numbers.h"
#include "tests.h"

using namespace bitport;

namespace {

constexpr int32_t kFloats[] = {BITPORT_F32, BITPORT_BF16, BITPORT_F16};
const float kThresholds[] = {-0.85f, -0.6f, -0.45f, -0.34f, -0.23f, -0.14f, -0.05f, 0.04f,
                             0.12f,  0.2f,  0.29f,  0.39f,  0.5f,   0.64f,  0.86f};
const struct { int32_t bits, mantissa, nan_code; float largest; } kSmallFloats[] = {
    {8, 3, 127, 448}, {8, 2, 127, 57344}, {6, 3, 0, 7.5f}, {6, 2, 0, 28}, {4, 1, 0, 6}};

BitportFormat some_format(Random& random) {
  BitportFormat f{};
  f.block_n = one_of(random, {1, 1, 1, 3, 16, 1000});
  f.block_k = one_of(random, {1, 7, 16, 32, 48, 64, 128, 4000});
  f.kind = int32_t(below(random, 3));
  f.zero_type = -1;
  f.scale_type = one_of(random, kFloats);
  if (f.kind == BITPORT_INTEGER) {
    f.bits = int32_t(1 + below(random, 8));
    f.largest = f.bits > 1 ? float((1 << (f.bits - 1)) - 1) : 0.5f;
    if (random() % 2) f.zero_type = random() % 2 ? int32_t(BITPORT_U8) : f.scale_type;
  } else if (f.kind == BITPORT_FLOAT) {
    const auto small = one_of(random, kSmallFloats);
    f.bits = small.bits;
    f.mantissa = small.mantissa;
    f.nan_code = small.nan_code;
    f.largest = small.largest;
  } else {
    f.bits = 4;
    f.nan_code = 7;
    f.largest = 1;
    f.thresholds = kThresholds;
  }
  f.has_zero = f.zero_type >= 0 || random() % 4 != 0;
  if (f.zero_type < 0 && random() % 2) {
    f.scale_type = random() % 2 ? BITPORT_E8M0 : BITPORT_E4M3;
    f.rule = int32_t(below(random, 4));
    f.global = f.scale_type == BITPORT_E4M3 && random() % 2;
  }
  return f;
}

struct Result {
  Exact<uint8_t> codes;
  Numbers scale, zero;
  Exact<float> scale2;
  BitportPlaces places;

  Result(const BitportFormat& f, int64_t n, int64_t k, Random& random)
      : codes(n * ((k * f.bits + 7) / 8), some_place(random)), scale(f.scale_type, blocks(f, n, k), some_place(random)),
        zero(f.zero_type < 0 ? int32_t(BITPORT_U8) : f.zero_type, f.zero_type < 0 ? 0 : blocks(f, n, k), some_place(random)),
        scale2(f.global ? 1 : 0, some_place(random)),
        places{codes.data(), scale.data(), zero.data(), scale2.data(), 0, 0, 0} {}

  static int64_t blocks(const BitportFormat& f, int64_t n, int64_t k) {
    return ((n + f.block_n - 1) / f.block_n) * ((k + f.block_k - 1) / f.block_k);
  }
  bool operator==(const Result& other) const {
    return std::memcmp(codes.data(), other.codes.data(), codes.bytes()) == 0 && same(scale, other.scale) &&
           same(zero, other.zero) && std::memcmp(scale2.data(), other.scale2.data(), scale2.bytes()) == 0;
  }
  static bool same(const Numbers& a, const Numbers& b) {
    for (int64_t i = 0; i < a.count; ++i)
      if (a.bits(i) != b.bits(i)) return false;
    return true;
  }
};

// Ordinary numbers, some very large and small ones, zeros, and occasionally NaN (the initial content of exact memory).
void draw(Numbers& x, int64_t n, int64_t k, Random& random) {
  const int least = x.type == BITPORT_F16 ? -14 : -126, most = x.type == BITPORT_F16 ? 15 : 127;
  const bool wild = random() % 4 == 0, bad = random() % 4 == 0;
  for (int64_t i = 0; i < n * k; ++i) {
    if (bad && i % 301 == 0) continue;
    if (random() % 16 == 0) x.set_zero(i);
    else if (wild) x.set_random(i, random, least, most);
    else x.set_random(i, random, -6, 2);
  }
}

void expect_near(const BitportFormat& f, const Numbers& x, const Result& y, int64_t n, int64_t k) {
  const int64_t columns = (k + f.block_k - 1) / f.block_k, row_bytes = (k * f.bits + 7) / 8;
  for (int64_t row = 0; row < n; ++row)
    for (int64_t i = 0; i < k; ++i) {
      double scale = y.scale[row / f.block_n * columns + i / f.block_k];
      if (f.global) scale *= double(y.scale2[0]);
      if (!(scale > 0x1p-100)) continue;   // no scale, or steps that float32 rounds
      uint32_t code = 0;
      for (int64_t bit = 0; bit < f.bits; ++bit)
        code |= uint32_t(y.codes[row * row_bytes + (i * f.bits + bit) / 8] >> (i * f.bits + bit) % 8 & 1) << bit;
      const double exact = x[row * k + i], value = (double(code) - double(1 << (f.bits - 1))) * scale;
      const double clipped = std::abs(exact) - double(f.largest) * scale;
      const double allowed = scale * (0.5 + 0x1p-15) + (clipped > 0 ? clipped : 0);
      EXPECT(std::abs(value - exact) <= allowed, "row %lld column %lld: %.9g became %.9g, scale %.9g, bits %d",
             (long long)row, (long long)i, exact, value, scale, f.bits);
    }
}

void try_refused(Random& random) {
  BitportFormat right = some_format(random);
  right.kind = BITPORT_INTEGER;
  right.bits = 4;
  right.largest = 7;
  right.scale_type = right.zero_type = BITPORT_F32;
  right.global = 0;
  const float x[8] = {1};
  float scale[8] = {5}, zero[8];
  uint8_t codes[8] = {0x5a};
  const BitportPlaces to{codes, scale, zero, nullptr, 0, 0, 0};
  const auto refused = [&](const char* what, int32_t expected, auto spoil, int64_t n = 1, int64_t k = 8, bool x_null = false) {
    BitportFormat f = right;
    spoil(f);
    const int32_t code = bitport_quantize(&f, x_null ? nullptr : x, BITPORT_F32, 1, n, k, &to, 1, -1);
    EXPECT(code == expected, "%s: \"%s\"", what, bitport_error(code));
    EXPECT(codes[0] == 0x5a && scale[0] == 5, "%s: something was written", what);
    ++cases;
  };
  const auto nothing = [](BitportFormat&) {};
  refused("k = 0", kBadShape, nothing, 1, 0);
  refused("n < 0", kBadShape, nothing, -1);
  refused("no x", kNullPointer, nothing, 1, 8, true);
  refused("n = 0", kOk, nothing, 0, 8, true);
  refused("9 bits", kBadShape, [](BitportFormat& f) { f.bits = 9; });
  refused("block of 0 rows", kBadGroup, [](BitportFormat& f) { f.block_n = 0; });
  refused("block of -1 columns", kBadGroup, [](BitportFormat& f) { f.block_k = -1; });
  refused("scale of bytes", kBadType, [](BitportFormat& f) { f.scale_type = BITPORT_U8; });
  refused("zero of another type", kBadType, [](BitportFormat& f) { f.zero_type = BITPORT_BF16; });
  refused("zero of a float", kBadType, [](BitportFormat& f) { f.kind = BITPORT_FLOAT; });
  refused("a float of 5 bits", kBadType, [](BitportFormat& f) { f.kind = BITPORT_FLOAT; f.bits = 5; f.zero_type = -1; });
  refused("a codebook of 3 bits", kBadType, [](BitportFormat& f) { f.kind = BITPORT_CODEBOOK; f.bits = 3; f.zero_type = -1; });
  refused("kind 3", kBadType, [](BitportFormat& f) { f.kind = 3; });
  refused("rule 4", kBadType, [](BitportFormat& f) { f.rule = 4; });
  refused("largest NaN", kBadType, [](BitportFormat& f) { f.largest = NAN; });
  refused("a global scale above float32", kBadType, [](BitportFormat& f) { f.global = 1; });
  const auto call = [&](const BitportFormat* f, int64_t count, const BitportPlaces* places, int32_t isa) {
    ++cases;
    return bitport_quantize(f, x, BITPORT_F32, count, 1, 8, places, 1, isa);
  };
  BitportPlaces spoiled = to;
  EXPECT(call(nullptr, 1, &to, -1) == kNullPointer, "no format");
  EXPECT(call(&right, 1, nullptr, -1) == kNullPointer, "no places");
  EXPECT(call(&right, 1, &to, BITPORT_ISAS) == kNoIsa, "an isa that is none");
  EXPECT(call(&right, -1, &to, -1) == kBadShape, "-1 matrices");
  EXPECT(call(&right, INT64_MAX, &to, -1) == kBadShape, "matrices beyond all");
  EXPECT(call(&right, 0, &to, -1) == kOk, "no matrix");
  spoiled.zero = nullptr;
  EXPECT(call(&right, 1, &spoiled, -1) == kNullPointer, "no zero");
  spoiled = to;
  spoiled.scale_apart = -4;
  EXPECT(call(&right, 1, &spoiled, -1) == kBadShape, "scales before each other");
  EXPECT(codes[0] == 0x5a && scale[0] == 5, "something was written");
}

// The halves of the range are rounded separately: for subnormal numbers, a sum that is rounded once would differ.
void try_halves() {
  constexpr float kStep = 0x1p-149f;
  const float x[] = {float((1 << 23) + 1) * kStep, -float((1 << 23) + 2) * kStep};
  const float halves[] = {float(1 << 22) * kStep, float((1 << 22) + 1) * kStep};
  BitportFormat f{};
  f.block_n = 1;
  f.block_k = 2;
  f.bits = 1;
  f.largest = 0.5f;
  f.scale_type = f.zero_type = BITPORT_F32;
  uint8_t codes;
  float scale, zero;
  const BitportPlaces to{&codes, &scale, &zero, nullptr, 0, 0, 0};
  EXPECT(bitport_quantize(&f, x, BITPORT_F32, 1, 1, 2, &to, 1, -1) == kOk, "refused");
  EXPECT(scale == 2 * (halves[0] + halves[1]), "%a", double(scale));
  ++cases;
}

// Several matrices, each as by itself, with unused bytes between them that stay as they are.
void try_several(const BitportFormat& f, Random& random) {
  const int64_t count = 1 + below(random, 40), n = 1 + below(random, 4), k = 1 + below(random, 300);
  Numbers x(one_of(random, kFloats), count * n * k, some_place(random));
  draw(x, count * n, k, random);
  const Result one(f, n, k, random);
  const int64_t room = 4 * below(random, 5);   // bytes; places of scales stay aligned
  const int64_t codes_apart = int64_t(one.codes.bytes()) + room, scale_apart = int64_t(one.scale.bytes()) + room;
  const int64_t zero_apart = int64_t(one.zero.bytes()) + room;
  std::vector<uint8_t> codes(size_t(count * codes_apart), 0xa5), scale(size_t(count * scale_apart), 0xa5);
  std::vector<uint8_t> zero(size_t(count * zero_apart), 0xa5);
  std::vector<float> scale2(static_cast<size_t>(count));
  const BitportPlaces to{codes.data(), scale.data(), f.zero_type < 0 ? nullptr : zero.data(),
                         f.global ? scale2.data() : nullptr, codes_apart, scale_apart, zero_apart};
  const std::vector<int32_t> known = isas();
  const int32_t isa = known[size_t(below(random, int64_t(known.size())))], threads = int32_t(1 + below(random, 3));
  EXPECT(bitport_quantize(&f, x.data(), x.type, count, n, k, &to, threads, isa) == kOk, "refused");
  for (int64_t at = 0; at < count; ++at) {
    Result own(f, n, k, random);
    const auto* from = static_cast<const uint8_t*>(x.data()) + at * n * k * bytes_of(x.type);
    EXPECT(bitport_quantize(&f, from, x.type, 1, n, k, &own.places, 1, BITPORT_SCALAR) == kOk, "refused");
    const auto expect_same = [&](const char* what, const uint8_t* all, int64_t apart, const void* alone, size_t bytes) {
      const uint8_t* here = all + at * apart;
      EXPECT(bytes == 0 || std::memcmp(here, alone, bytes) == 0, "%s of matrix %lld of %lld", what, (long long)at, (long long)count);
      for (int64_t i = int64_t(bytes); i < apart; ++i) EXPECT(here[i] == 0xa5, "%s: wrote beyond its end", what);
    };
    expect_same("codes", codes.data(), codes_apart, own.codes.data(), own.codes.bytes());
    expect_same("scale", scale.data(), scale_apart, own.scale.data(), own.scale.bytes());
    expect_same("zero", zero.data(), zero_apart, own.zero.data(), f.zero_type < 0 ? 0 : own.zero.bytes());
    EXPECT(!f.global || std::memcmp(&scale2[size_t(at)], own.scale2.data(), 4) == 0, "scale2 of matrix %lld", (long long)at);
    ++cases;
  }
}

}  // namespace

void try_quantize(int64_t number, uint64_t seed) {
  Random random(seed * 0x9e3779b97f4a7c15u + uint64_t(number));
  if (number == 0) {
    try_refused(random);
    try_halves();
  }
  const BitportFormat f = some_format(random);
  const int64_t n = 1 + below(random, 40), k = 1 + below(random, random() % 4 ? 300 : 2400);
  Numbers x(one_of(random, kFloats), n * k, some_place(random));
  draw(x, n, k, random);
  const auto run = [&](Result& y, int32_t threads, int32_t isa) {
    const int32_t code = bitport_quantize(&f, x.data(), x.type, 1, n, k, &y.places, threads, isa);
    EXPECT(code == kOk, "%s: %s", bitport_isa_name(isa), bitport_error(code));
    ++cases;
  };
  Result first(f, n, k, random);
  run(first, 1, BITPORT_SCALAR);
  if (f.kind == BITPORT_INTEGER && f.zero_type < 0 && f.bits > 1) expect_near(f, x, first, n, k);
  for (int32_t isa : isas()) {
    Result other(f, n, k, random);
    run(other, int32_t(1 + below(random, 3)), isa);
    EXPECT(first == other, "%s differs from scalar: kind %d, bits %d, block %lld x %lld, scale type %d, zero type %d, x %d",
           bitport_isa_name(isa), f.kind, f.bits, (long long)f.block_n, (long long)f.block_k, f.scale_type, f.zero_type,
           x.type);
  }
  if (number % 4 == 0) try_several(f, random);
}
