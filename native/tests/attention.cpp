// Attention on random keys and values, against float64; and refusals before memory is touched.
#include <functional>
#include <memory>
#include "../kernels/status.h"
#include "numbers.h"
#include "tests.h"
#include "weight.h"

using namespace bitport;

namespace {

struct Sizes { int64_t batch, heads, groups, rows, quantized, dense, first; };

// Keys or values in exact memory, and their meaning: the values of each token, and the magnitudes of the terms they
// consist of.
struct Kept {
  BitportTokens view{};
  std::unique_ptr<Exact<uint8_t>> codes;
  std::unique_ptr<Numbers> scale, zero, dense;
  std::unique_ptr<Exact<float>> table;
  std::vector<double> value, size;   // [batch][groups][tokens][width], in sequence order

  Kept(const Sizes& s, int64_t width, int64_t block, int32_t q_type, Random& random) {
    const int64_t heads = s.batch * s.groups, last = s.first + s.quantized, tokens = s.quantized + s.dense;
    const bool e4m3 = below(random, 5) == 0;
    const int32_t bits = e4m3 ? 8 : one_of(random, {1, 2, 2, 3, 4, 4, 5, 8, 8, 8});
    const int64_t group = one_of(random, {int64_t(16), int64_t(32), int64_t(48), width, INT64_MAX});
    const int64_t groups = block > 1 ? width : group < width ? (width + group - 1) / group : 1;
    const int64_t blocks = (s.quantized + block - 1) / block, row = (width * bits + 7) / 8;
    const int32_t scale_type = one_of(random, {BITPORT_F32, BITPORT_BF16, BITPORT_F16, BITPORT_E8M0});
    const int32_t zero_type = e4m3 || below(random, 2) ? -1 : one_of(random, {BITPORT_F32, BITPORT_BF16, BITPORT_F16, bits == 8 ? BITPORT_U8 : BITPORT_F32});
    codes = std::make_unique<Exact<uint8_t>>(heads * s.quantized * row, some_place(random));
    scale = std::make_unique<Numbers>(scale_type, heads * blocks * groups, some_place(random));
    zero = std::make_unique<Numbers>(zero_type < 0 ? BITPORT_U8 : zero_type, heads * blocks * groups, some_place(random));
    dense = std::make_unique<Numbers>(q_type, heads * s.dense * width, some_place(random));
    table = std::make_unique<Exact<float>>(int64_t(1) << bits, some_place(random));
    for (int64_t i = 0; i < heads * s.quantized * row; ++i) {
      (*codes)[i] = uint8_t(random());
      if (e4m3 && ((*codes)[i] & 127) == 127) (*codes)[i] = 0;
    }
    const int top = e4m3 ? 8 : bits;
    for (int64_t i = 0; i < scale->count; ++i) scale->set_random(i, random, -top, 2 - top);
    for (int64_t i = 0; i < zero->count; ++i) zero->set_random(i, random, 0, bits);
    for (int64_t i = 0; i < dense->count; ++i) dense->set_random(i, random, -4, 1);
    for (int i = 0; i < 1 << bits; ++i)
      (*table)[i] = e4m3 ? float((i & 127) == 127 ? 0 : small_float(uint32_t(i), 4, 3)) : bits == 1 ? float(i) - 0.5f : float(i - (1 << (bits - 1)));
    view = {codes->data(), scale->data(), zero_type < 0 ? nullptr : zero->data(), table->data(),
            s.dense ? dense->data() : nullptr, width, group, block,
            {s.groups * s.quantized * row, s.quantized * row}, {s.groups * blocks * groups, blocks * groups},
            {s.groups * blocks * groups, blocks * groups}, {s.groups * s.dense * width, s.dense * width},
            bits, !e4m3, scale_type, zero_type < 0 ? 0 : zero_type};
    for (int64_t head = 0; head < heads; ++head)
      for (int64_t t = 0; t < tokens; ++t)
        for (int64_t i = 0; i < width; ++i) {
          const bool packed = t >= s.first && t < last;
          const int64_t at = packed ? t - s.first : t < s.first ? t : t - s.quantized;
          if (!packed) {
            value.push_back((*dense)[(head * s.dense + at) * width + i]);
            size.push_back(std::abs(value.back()));
            continue;
          }
          uint32_t code = 0;
          for (int64_t b = 0; b < bits; ++b)
            code |= ((*codes)[(head * s.quantized + at) * row + (i * bits + b) / 8] >> (i * bits + b) % 8 & 1u) << b;
          const int64_t place = (head * blocks + at / block) * groups + (block > 1 ? i : group < width ? i / group : 0);
          const double by = (*scale)[place], centre = e4m3 ? 0 : -(*table)[0];
          const double from = e4m3 ? (*table)[int64_t(code)] : double(code), less = zero_type < 0 ? centre : (*zero)[place];
          value.push_back((from - less) * by);
          size.push_back((std::abs(from) + std::abs(less)) * std::abs(by));
        }
  }
};

int64_t some_width(Random& random) { return one_of(random, {1, 16, 24, 32, 33, 48, 64, 80, 128, 160}); }

}  // namespace

void try_attention(int64_t number, uint64_t seed) {
  Random random(seed * 1000003 + uint64_t(number) + 77);
  Sizes s{1 + below(random, 2), 0, 1 + below(random, 2), 1 + below(random, 6), one_of(random, {0, 1, 5, 31, 64, 70, 2100}),
          one_of(random, {0, 0, 3, 40}), 0};
  if (s.quantized + s.dense < s.rows) s.dense = s.rows;
  s.first = below(random, s.dense + 1);
  s.heads = s.groups * (1 + below(random, 5));
  if (below(random, 12) == 0 && s.quantized < 100) s.rows = s.quantized + s.dense;   // more rows than are processed at once
  const int32_t type = one_of(random, {BITPORT_F32, BITPORT_BF16, BITPORT_F16});
  const int64_t width = some_width(random), out = some_width(random), tokens = s.quantized + s.dense;
  const Kept keys(s, width, one_of(random, {1, 1, 8, 32}), type, random), values(s, out, 1, type, random);
  Numbers q(type, s.batch * s.heads * s.rows * width, some_place(random));
  for (int64_t i = 0; i < q.count; ++i) q.set_random(i, random, -3, 1);
  const bool masked = below(random, 3) == 0, causal = below(random, 2) == 0;
  Exact<float> mask(s.rows * tokens, some_place(random));
  Exact<uint8_t> seen(s.rows * tokens, some_place(random));
  const bool of_bytes = below(random, 2) == 0;
  const int64_t shown = below(random, 2) ? below(random, tokens + 1) : tokens;   // the others are hidden from all rows
  for (int64_t i = 0; i < s.rows * tokens; ++i) {
    seen[i] = i % tokens < shown ? uint8_t(below(random, 3)) : 0;
    mask[i] = !seen[i] ? -INFINITY : of_bytes ? 0.0f : float(below(random, 16)) / 8 - 1;
  }
  const void* const given = of_bytes ? static_cast<const void*>(seen.data()) : mask.data();
  const float scale = 1 / std::sqrt(float(width));
  const int64_t count = s.batch * s.heads * s.rows * out;
  std::vector<double> wanted(size_t(count), 0), allowed(size_t(count), 0);
  for (int64_t row = 0; row < s.batch * s.heads * s.rows; ++row) {
    const int64_t i = row % s.rows, head = row / s.rows % s.heads, pair = row / s.rows / s.heads * s.groups + head / (s.heads / s.groups);
    std::vector<double> score(size_t(tokens), -INFINITY);
    double most = -INFINITY, off = 0, sum = 0;
    for (int64_t t = 0; t < tokens; ++t) {
      if (causal && t > tokens - s.rows + i) continue;
      double dot = 0, size = 0;
      for (int64_t c = 0; c < width; ++c) {
        const size_t at = size_t((pair * tokens + t) * width + c);
        dot += q[row * width + c] * keys.value[at] * scale;
        size += std::abs(q[row * width + c]) * keys.size[at] * scale;
      }
      const double added = masked ? mask[i * tokens + t] : 0;
      if (added == -INFINITY) continue;
      score[size_t(t)] = dot + added;
      most = std::max(most, dot + added);
      off = std::max(off, (size + std::abs(added)) * double(width + 16) * 0x1p-23);
    }
    for (double each : score) sum += most > -INFINITY ? std::exp(each - most) : 0;
    for (int64_t t = 0; t < tokens && sum > 0; ++t)
      for (int64_t c = 0; c < out; ++c) {
        const size_t at = size_t((pair * tokens + t) * out + c);
        const double weight = std::exp(score[size_t(t)] - most) / sum;
        // A weight is subject to the errors of its score and of the sum, both exponentiated; sums over `tokens` follow.
        wanted[size_t(row * out + c)] += weight * values.value[at];
        allowed[size_t(row * out + c)] += weight * values.size[at] * (std::expm1(2 * off) + double(2 * tokens + 64) * 0x1p-23);
      }
  }
  for (int32_t isa : isas())
    for (const int32_t threads : {1, 3}) {
      Numbers y(type, count, some_place(random));
      const BitportAttention a{keys.view, values.view, q.data(), y.data(), masked ? given : nullptr, {0, 0, tokens, 1},
                               s.batch, s.heads, s.groups, s.rows, s.first, s.quantized, s.dense, scale, causal, type,
                               of_bytes ? BITPORT_U8 : BITPORT_F32};
      EXPECT(bitport_attention(&a, threads, isa) == kOk, "attention refused");
      for (int64_t i = 0; i < count; ++i) {
        const double exact = wanted[size_t(i)], error = rounded_error(type, exact, allowed[size_t(i)]);
        EXPECT(std::abs(y[i] - exact) <= error,
               "%s, attention %lld: number %lld is %g, should be %g within %g (width %lld and %lld, rows %lld, tokens %lld + %lld, "
               "bits %d and %d, block %lld)",
               bitport_isa_name(isa), (long long)number, (long long)i, y[i], exact, error, (long long)width, (long long)out,
               (long long)s.rows, (long long)s.quantized, (long long)s.dense, keys.view.bits, values.view.bits,
               (long long)keys.view.block);
      }
      ++cases;
    }
}

void try_attention_refusals() {
  Random random(3);
  const Sizes s{1, 4, 2, 2, 40, 3, 1};
  const Kept keys(s, 32, 1, BITPORT_F32, random), values(s, 32, 1, BITPORT_F32, random);
  Exact<float> q(4 * 2 * 32, Place::heap), y(4 * 2 * 32, Place::heap);
  for (int64_t i = 0; i < 4 * 2 * 32; ++i) q[i] = 1;
  const BitportAttention right{keys.view, values.view, q.data(), y.data(), nullptr, {0, 0, 0, 0}, 1, 4, 2, 2, 1, 40, 3, 1, 0, BITPORT_F32,
                              BITPORT_F32};
  using Spoil = std::function<void(BitportAttention&)>;
  const struct { const char* what; int32_t code; Spoil spoil; } refusals[] = {
      {"no q", kNullPointer, [](auto& a) { a.q = nullptr; }},
      {"no y", kNullPointer, [](auto& a) { a.y = nullptr; }},
      {"no codes", kNullPointer, [](auto& a) { a.keys.codes = nullptr; }},
      {"no scale", kNullPointer, [](auto& a) { a.values.scale = nullptr; }},
      {"no table", kNullPointer, [](auto& a) { a.values.table = nullptr; }},
      {"no dense tokens", kNullPointer, [](auto& a) { a.keys.dense = nullptr; }},
      {"batch < 0", kBadShape, [](auto& a) { a.batch = -1; }},
      {"batch at its end", kBadShape, [](auto& a) { a.batch = INT64_MAX; }},
      {"rows beyond all", kBadShape, [](auto& a) { a.rows = int64_t(1) << 31; }},
      {"no groups", kBadShape, [](auto& a) { a.groups = 0; }},
      {"groups that divide nothing", kBadShape, [](auto& a) { a.groups = 3; }},
      {"first beyond the dense", kBadShape, [](auto& a) { a.first_dense = 4; }},
      {"no tokens", kBadShape, [](auto& a) { a.quantized = a.dense = a.first_dense = 0; }},
      {"tokens beyond all", kBadShape, [](auto& a) { a.quantized = INT64_MAX; }},
      {"width 0", kBadShape, [](auto& a) { a.keys.width = 0; }},
      {"width beyond all", kBadShape, [](auto& a) { a.values.width = int64_t(1) << 40; }},
      {"block 0", kBadShape, [](auto& a) { a.keys.block = 0; }},
      {"values in blocks", kBadShape, [](auto& a) { a.values.block = 8; }},
      {"a step back", kBadShape, [](auto& a) { a.keys.codes_step[0] = -1; }},
      {"9 bits", kBadShape, [](auto& a) { a.keys.bits = 9; }},
      {"group 24", kBadGroup, [](auto& a) { a.keys.group = 24; }},
      {"q of bytes", kBadType, [](auto& a) { a.type = BITPORT_U8; }},
      {"a mask of halves", kBadType, [&](auto& a) { a.mask = q.data(); a.mask_type = BITPORT_F16; }},
      {"a mask that steps back", kBadShape, [&](auto& a) { a.mask = q.data(); a.mask_step[3] = -1; }},
      {"scale of bytes", kBadType, [](auto& a) { a.keys.scale_type = BITPORT_U8; }},
      {"an isa that is none", kNoIsa, [](auto&) {}},
  };
  const std::vector<char> untouched(y.bytes(), char(0xff));
  for (const auto& r : refusals) {
    BitportAttention a = right;
    r.spoil(a);
    const int32_t code = bitport_attention(&a, 1, r.code == kNoIsa ? int32_t(BITPORT_ISAS) : -1);
    EXPECT(code == r.code, "attention, %s: \"%s\" instead of \"%s\"", r.what, bitport_error(code), bitport_error(r.code));
    EXPECT(std::memcmp(y.data(), untouched.data(), y.bytes()) == 0, "attention, %s: y was written", r.what);
    ++cases;
  }
  EXPECT(bitport_attention(nullptr, 1, -1) == kNullPointer, "no attention");
  BitportAttention none = right;
  none.batch = 0;
  none.q = none.y = nullptr;
  EXPECT(bitport_attention(&none, -7, -1) == kOk, "no queries");
  cases += 2;
}
