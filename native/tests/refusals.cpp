// Invalid arguments are refused with the right code before anything is written; and empty work succeeds.
#include <functional>
#include "../kernels/status.h"
#include "../kernels/tiles.h"
#include "tests.h"
#include "weight.h"

using namespace bitport;

namespace {

struct Call {   // valid arguments of every entry point
  BitportTiles tiles;
  const BitportTiles* w = &tiles;
  const void* x;
  void* y;
  const float* act_scale = nullptr;
  const int64_t* ids;
  const void* times = nullptr;
  int64_t m = 3, count = 2;
  int32_t type = BITPORT_F32, act = BITPORT_AS_IS, isa = -1, then = BITPORT_NOTHING;
};

struct Refusal {
  const char* what;
  int32_t code;
  std::function<void(Call&)> spoil;
};

#if defined(__aarch64__)
constexpr int32_t kElsewhere = BITPORT_AVX2, kHere[] = {BITPORT_SCALAR, BITPORT_NEON, BITPORT_NEON_DOT, BITPORT_NEON_MATRIX};
#else
constexpr int32_t kElsewhere = BITPORT_NEON,
                  kHere[] = {BITPORT_SCALAR, BITPORT_AVX2, BITPORT_AVX512_VNNI, BITPORT_AVX512_BF16, BITPORT_AMX};
#endif

// Refused by all of linear, rows and distance.
const Refusal kOfWeights[] = {
    {"no weight", kNullPointer, [](Call& c) { c.w = nullptr; }},
    {"no codes", kNullPointer, [](Call& c) { c.tiles.codes = nullptr; }},
    {"no scale", kNullPointer, [](Call& c) { c.tiles.scale = nullptr; }},
    {"no table", kNullPointer, [](Call& c) { c.tiles.table = nullptr; }},
    {"no y", kNullPointer, [](Call& c) { c.y = nullptr; }},
    {"n < 0", kBadShape, [](Call& c) { c.tiles.n = -1; }},
    {"n at its end", kBadShape, [](Call& c) { c.tiles.n = INT64_MIN; }},
    {"k = 0", kBadShape, [](Call& c) { c.tiles.k = 0; }},
    {"k < 0", kBadShape, [](Call& c) { c.tiles.k = -32; }},
    {"0 bits", kBadShape, [](Call& c) { c.tiles.bits = 0; }},
    {"9 bits", kBadShape, [](Call& c) { c.tiles.bits = 9; }},
    {"-4 bits", kBadShape, [](Call& c) { c.tiles.bits = -4; }},
    {"group 0", kBadGroup, [](Call& c) { c.tiles.group = 0; }},
    {"group < 0", kBadGroup, [](Call& c) { c.tiles.group = -16; }},
    {"group 24", kBadGroup, [](Call& c) { c.tiles.group = 24; }},
    {"scale of a type that is none", kBadType, [](Call& c) { c.tiles.scale_type = 6; }},
    {"scale of bytes", kBadType, [](Call& c) { c.tiles.scale_type = BITPORT_U8; }},
    {"scale of type -1", kBadType, [](Call& c) { c.tiles.scale_type = -1; }},
    {"zero of e8m0", kBadType, [](Call& c) { c.tiles.zero_type = BITPORT_E8M0; }},
    {"zero of type -1", kBadType, [](Call& c) { c.tiles.zero_type = -1; }},
    {"zero of floats", kBadType, [](Call& c) { c.tiles.integer = 0; }},
    {"y of bytes", kBadType, [](Call& c) { c.type = BITPORT_U8; }},
    {"y of type -1", kBadType, [](Call& c) { c.type = -1; }},
};

const Refusal kOfProducts[] = {
    {"no x", kNullPointer, [](Call& c) { c.x = nullptr; }},
    {"m < 0", kBadShape, [](Call& c) { c.m = -1; }},
    {"act -1", kBadAct, [](Call& c) { c.act = -1; }},
    {"act 10", kBadAct, [](Call& c) { c.act = 10; }},
    {"int8 x with floats", kBadAct,
     [](Call& c) { c.act = BITPORT_INT8_ROW; c.tiles.zero = nullptr; c.tiles.integer = 0; }},
    {"a scale for rows that have their own", kBadAct,
     [](Call& c) { c.act = BITPORT_FP8_ROW; c.act_scale = c.tiles.table; }},
    {"then -1", kBadThen, [](Call& c) { c.then = -1; }},
    {"then 4", kBadThen, [](Call& c) { c.then = 4; }},
    {"a factor and nothing before it", kBadThen, [](Call& c) { c.times = c.x; }},
    {"an isa that is none", kNoIsa, [](Call& c) { c.isa = BITPORT_ISAS; }},
    {"an isa of another architecture", kNoIsa, [](Call& c) { c.isa = kElsewhere; }},
};

const int64_t kPast[] = {0, 40}, kNegative[] = {0, -1}, kFar[] = {INT64_MAX, 0};
const Refusal kOfRows[] = {
    {"no ids", kNullPointer, [](Call& c) { c.ids = nullptr; }},
    {"id n", kBadRow, [](Call& c) { c.ids = kPast; }},
    {"id -1", kBadRow, [](Call& c) { c.ids = kNegative; }},
    {"id at the end", kBadRow, [](Call& c) { c.ids = kFar; }},
};

int32_t linear(const Call& c) {
  return bitport_linear(c.w, c.x, c.type, c.m, nullptr, c.then, c.times, c.y, 1, c.isa);
}
int32_t dyn_linear(const Call& c) {
  return bitport_dyn_linear(c.w, c.x, c.type, c.m, c.act, c.act_scale, nullptr, c.then, c.times, c.y, 1, c.isa);
}
int32_t rows(const Call& c) { return bitport_rows(c.w, c.ids, c.count, c.y, c.type, 1); }
int32_t distance(const Call& c) {
  return bitport_distance(c.w, c.x, c.type, static_cast<double*>(c.y), 1);
}
int32_t dense_rows(const Call& c) { return bitport_dense_rows(c.w, c.ids, c.count, c.y, c.type, 1); }

}  // namespace

void try_refusals() {
  Random random(1);
  const Weight w({40, 48, 16, 4, 1, BITPORT_F32, BITPORT_U8}, random);
  const int64_t ids[] = {39, 0};
  Exact<float> x(3 * 48, Place::heap), y(40 * 48, Place::heap);
  for (int64_t i = 0; i < 3 * 48; ++i) x[i] = 1;
  const std::vector<char> untouched(y.bytes(), char(0xff));
  const auto refused = [&](const char* by, int32_t (*entry)(const Call&), const Refusal& r) {
    Call call;
    call.tiles = w.view;
    call.x = x.data();
    call.y = y.data();
    call.ids = ids;
    r.spoil(call);
    const int32_t code = entry(call);
    EXPECT(code == r.code, "%s, %s: \"%s\" instead of \"%s\"", by, r.what, bitport_error(code), bitport_error(r.code));
    EXPECT(std::memcmp(y.data(), untouched.data(), y.bytes()) == 0, "%s, %s: y was written", by, r.what);
    ++cases;
  };
  for (const Refusal& r : kOfWeights) {
    refused("linear", linear, r);
    refused("dyn_linear", dyn_linear, r);
    refused("rows", rows, r);
    refused("dense rows", dense_rows, r);
    refused("distance", distance, r);
  }
  for (const Refusal& r : kOfProducts) {
    refused("dyn_linear", dyn_linear, r);
    if (r.code != kBadAct) refused("linear", linear, r);
  }
  for (const Refusal& r : kOfRows) {
    refused("rows", rows, r);
    refused("dense rows", dense_rows, r);
  }

  uint8_t byte = 0x5a;
  const struct { int32_t bits; int64_t n, k; bool null; int32_t code; } packings[] = {
      {0, 1, 1, false, kBadShape}, {9, 1, 1, false, kBadShape},   {4, -1, 1, false, kBadShape},
      {4, 1, 0, false, kBadShape}, {4, 1, -32, false, kBadShape}, {4, 1, 1, true, kNullPointer},
      {4, 0, 1, true, kOk},        {4, kMost + 1, 1, true, kBadShape}, {4, 1, kMost + 1, true, kBadShape},
      {8, INT64_MAX, INT64_MAX, false, kBadShape}};
  for (const auto& p : packings) {
    EXPECT(bitport_pack(p.null ? nullptr : &byte, p.bits, p.n, p.k, &byte, 1) == p.code, "pack: %d bits", p.bits);
    EXPECT(bitport_unpack(&byte, p.bits, p.n, p.k, p.null ? nullptr : &byte, 1) == p.code, "unpack: %d bits", p.bits);
    EXPECT(byte == 0x5a, "packing wrote");
    cases += 2;
  }

  // No rows of x, no rows of the weight, no ids: succeeds without any memory, for any number of threads.
  BitportTiles none = w.view;
  none.n = 0;
  none.codes = nullptr;
  none.scale = nullptr;
  none.table = nullptr;
  std::vector<int32_t> any = isas();
  any.push_back(-1);
  for (int32_t act = BITPORT_AS_IS; act <= BITPORT_FP8_128; ++act)
    for (int32_t isa : any) {
      const BitportTiles* some = &w.view;
      EXPECT(bitport_dyn_linear(some, nullptr, BITPORT_BF16, 0, act, nullptr, nullptr, 0, nullptr, nullptr, -7, isa) == kOk, "m = 0");
      EXPECT(bitport_dyn_linear(&none, nullptr, BITPORT_BF16, 3, act, nullptr, nullptr, 0, nullptr, nullptr, 0, isa) == kOk, "n = 0");
      cases += 2;
    }
  EXPECT(bitport_rows(&none, nullptr, 0, nullptr, BITPORT_F32, -7) == kOk, "no ids");
  double sums[] = {1, 1};
  EXPECT(bitport_distance(&none, nullptr, BITPORT_F32, sums, -7) == kOk && !sums[0] && !sums[1], "no rows");
  for (int32_t code : {-1, 10, INT32_MAX, INT32_MIN}) EXPECT(bitport_error(code), "no text");
  for (int32_t isa : {-1, int32_t(BITPORT_ISAS), INT32_MAX, INT32_MIN})
    EXPECT(!bitport_has_isa(isa) && bitport_isa_name(isa), "isa %d", isa);
  cases += 4;

  // Each includes those before it, up to the best; none of another architecture is available.
  bool above = false;
  int64_t count = 0;
  for (int32_t isa : kHere) {
    EXPECT(bitport_has_isa(isa) == !above, "isa %d", isa);
    count += !above;
    above |= isa == bitport_best_isa();
    ++cases;
  }
  EXPECT(above && int64_t(isas().size()) == count, "the best isa is %d", bitport_best_isa());
}
