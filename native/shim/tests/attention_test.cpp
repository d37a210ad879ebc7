#include <functional>
#include <limits>
#include "../../kernels/tiles.h"
#include "shim_test.h"

using namespace bitport;

extern "C" int32_t aoti_torch_delete_tensor_object(AtenTensorHandle);

namespace {

constexpr int64_t kHeads = 4, kGroups = 2, kRows = 3, kTokens = 37, kDense = 5, kWidth = 32, kOut = 48, kRoom = 64;

// Valid arguments: keys of int4 in groups with zeros, values of int8 with a scale per token, tokens of floats, a mask.
struct Call {
  int64_t n = kTokens, k = kWidth, block = 1, group = 16, bits = 4, integer = 1;
  int64_t v_n = kTokens, v_k = kOut, v_block = 1, v_group = kOut, v_bits = 8, first = 2, causal = 0;
  double scale = 0.25;
  AtenTensorOpaque q = host::tensor({1, kHeads, kRows, kWidth}, host::f32);
  AtenTensorOpaque k_data = host::tensor({1, kGroups, kTokens, kWidth / 2}, host::u8);
  AtenTensorOpaque k_scale = host::tensor({1, kGroups, kTokens, 2}, host::f32);
  AtenTensorOpaque k_zero = host::tensor({1, kGroups, kTokens, 2}, host::u8);
  AtenTensorOpaque k_dense = host::tensor({1, kGroups, kDense, kWidth}, host::f32);
  AtenTensorOpaque k_table = host::tensor({16}, host::f32);
  AtenTensorOpaque v_data = host::tensor({1, kGroups, kTokens, kOut}, host::u8);
  AtenTensorOpaque v_scale = host::tensor({1, kGroups, kTokens, 1}, host::f32);
  AtenTensorOpaque v_dense = host::tensor({1, kGroups, kDense, kOut}, host::f32);
  AtenTensorOpaque v_table = host::tensor({256}, host::f32);
  AtenTensorOpaque mask = host::tensor({1, 1, kRows, kTokens + kDense}, host::boolean);
  AtenTensorHandle pq = &q, p_data = &k_data, p_zero = &k_zero, p_dense = &k_dense, p_table = &k_table;
  AtenTensorHandle p_values = &v_data, p_dense_values = &v_dense, p_mask = &mask, y = nullptr;
  AtenTensorHandle *zero_at = &p_zero, *dense_at = &p_dense, *dense_values_at = &p_dense_values, *mask_at = &p_mask;
  AtenTensorHandle* result = &y;

  Call() {
    for (int code = 0; code < 16; ++code) k_table.as<float>()[code] = float(code - 8);
    for (int code = 0; code < 256; ++code) v_table.as<float>()[code] = float(code - 128);
  }
  Call(const Call&) = delete;

  AOTITorchError run() {
    return aoti_torch_cpu_bitport_attention(pq, p_data, &k_scale, zero_at, dense_at, p_table, n, k, block, group, bits, integer,
                                            p_values, &v_scale, nullptr, dense_values_at, &v_table, v_n, v_k, v_block, v_group,
                                            v_bits, 1, first, mask_at, causal, scale, result);
  }
  AOTITorchError run_floats() {
    return aoti_torch_cpu_bitport_float_attention(pq, p_dense, p_dense_values, mask_at, causal, scale, result);
  }
};

// Lets the heads of a tensor lie further apart, as in memory with room for more tokens.
void have_room(AtenTensorOpaque& t) {
  const int64_t row = t.sizes[3], width = host::width(t.dtype);
  std::vector<uint8_t> apart(size_t(kGroups * kRoom * row * width), 0xFF);   // NaN where nothing is read
  for (int64_t head = 0; head < kGroups; ++head)
    for (int64_t i = 0; i < t.sizes[2] * row * width; ++i)
      apart[size_t(head * kRoom * row * width + i)] = t.bytes[size_t(head * t.sizes[2] * row * width + i)];
  t.bytes = std::move(apart);
  t.strides = {kGroups * kRoom * row, kRoom * row, row, 1};
  t.contiguous = false;
}

const struct Refusal { const char* what; const char* about; std::function<void(Call&)> spoil; } kRefusals[] = {
    {"no q", "q is not", [](Call& c) { c.pq = nullptr; }},
    {"q of integers", "q is not", [](Call& c) { c.q.dtype = host::i32; }},
    {"q of three dimensions", "q is not", [](Call& c) { c.q = host::tensor({kHeads, kRows, kWidth}, host::f32); }},
    {"q strided", "q is not", [](Call& c) { c.q.contiguous = false; }},
    {"q of another width", "do not fit together", [](Call& c) { c.q = host::tensor({1, kHeads, kRows, 31}, host::f32); }},
    {"five heads on two", "heads", [](Call& c) { c.q = host::tensor({1, 5, kRows, kWidth}, host::f32); }},
    {"two sequences", "codes of another shape", [](Call& c) { c.q = host::tensor({2, kHeads, kRows, kWidth}, host::f32); }},
    {"no keys", "no codes", [](Call& c) { c.p_data = nullptr; }},
    {"no values", "no codes", [](Call& c) { c.p_values = nullptr; }},
    {"no table", "table", [](Call& c) { c.p_table = nullptr; }},
    {"no result", "result", [](Call& c) { c.result = nullptr; }},
    {"0 bits", "bits", [](Call& c) { c.bits = 0; }},
    {"9 bits", "bits", [](Call& c) { c.v_bits = 9; }},
    {"a table of another size", "table", [](Call& c) { c.bits = 3; }},
    {"keys elsewhere", "heads", [](Call& c) { c.k_data.device = host::kElsewhere; }},
    {"codes of floats", "codes are not bytes", [](Call& c) { c.v_data.dtype = host::f32; }},
    {"codes of fewer tokens", "codes of another shape", [](Call& c) { c.v_data = host::tensor({1, kGroups, kTokens - 1, kOut}, host::u8); }},
    {"codes whose rows lie apart", "heads", [](Call& c) { c.k_data.strides[2] = 17; }},
    {"codes that lie backwards", "heads", [](Call& c) { c.k_data.strides[1] = -1; }},
    {"scales of one group", "scales of another", [](Call& c) { c.k_scale = host::tensor({1, kGroups, kTokens, 1}, host::f32); }},
    {"scales of integers", "scales of another", [](Call& c) { c.v_scale.dtype = host::i32; }},
    {"zeros of one group", "zeros of another", [](Call& c) { c.k_zero = host::tensor({1, kGroups, kTokens, 1}, host::u8); }},
    {"fewer than no tokens", "size of the tokens", [](Call& c) { c.n = -1; }},
    {"2^62 tokens", "size of the tokens", [](Call& c) { c.v_n = int64_t(1) << 62; }},
    {"a width of 0", "size of the tokens", [](Call& c) { c.v_k = 0; }},
    {"blocks of 0 tokens", "size of the tokens", [](Call& c) { c.block = 0; }},
    {"groups of 8", "blocks", [](Call& c) { c.group = 8; }},
    {"values in blocks of tokens", "blocks", [](Call& c) { c.v_block = 8; c.v_group = 1; }},
    {"blocks of 8x16 keys", "blocks", [](Call& c) { c.block = 8; }},
    {"dense keys alone", "go together", [](Call& c) { c.dense_values_at = nullptr; }},
    {"dense values of another count", "dense tokens", [](Call& c) { c.v_dense = host::tensor({1, kGroups, 4, kOut}, host::f32); }},
    {"dense keys of halves", "dense tokens", [](Call& c) { c.k_dense.dtype = host::f16; }},
    {"first of more than there are", "too few", [](Call& c) { c.first = 6; }},
    {"first below 0", "too few", [](Call& c) { c.first = -1; }},
    {"a scale below 0", "positive", [](Call& c) { c.scale = -1; }},
    {"a scale that is none", "positive", [](Call& c) { c.scale = std::numeric_limits<double>::quiet_NaN(); }},
    {"a mask for fewer tokens", "mask", [](Call& c) { c.mask = host::tensor({1, 1, kRows, kTokens}, host::boolean); }},
    {"a mask of integers", "mask", [](Call& c) { c.mask.dtype = host::i32; }},
    {"a mask of three dimensions", "mask", [](Call& c) { c.mask = host::tensor({1, kRows, kTokens + kDense}, host::boolean); }},
};

void have_floats_alone(Call& c) { c.mask = host::tensor({1, 1, kRows, kDense}, host::boolean); }

const Refusal kOfFloats[] = {
    {"no q", "q is not", [](Call& c) { c.pq = nullptr; }},
    {"no keys", "heads", [](Call& c) { c.p_dense = nullptr; }},
    {"no values", "values are not floats", [](Call& c) { c.p_dense_values = nullptr; }},
    {"no result", "result", [](Call& c) { c.result = nullptr; }},
    {"keys of another width", "do not fit together", [](Call& c) { c.k_dense = host::tensor({1, kGroups, kDense, 31}, host::f32); }},
    {"values of a width of 0", "values are not floats", [](Call& c) { c.v_dense = host::tensor({1, kGroups, kDense, 0}, host::f32); }},
    {"values of fewer tokens", "dense tokens", [](Call& c) { c.v_dense = host::tensor({1, kGroups, 4, kOut}, host::f32); }},
    {"values of bytes", "dense tokens", [](Call& c) { c.v_dense = host::tensor({1, kGroups, kDense, kOut}, host::u8); }},
    {"keys of three dimensions", "heads", [](Call& c) { c.k_dense = host::tensor({kGroups, kDense, kWidth}, host::f32); }},
    {"no tokens", "too few", [](Call& c) { c.k_dense = host::tensor({1, kGroups, 0, kWidth}, host::f32); c.v_dense = host::tensor({1, kGroups, 0, kOut}, host::f32); }},
    {"more rows than tokens", "too few", [](Call& c) { c.causal = 1; c.mask_at = nullptr; c.q = host::tensor({1, kHeads, 6, kWidth}, host::f32); }},
    {"a mask for more tokens", "mask", [](Call& c) { c.mask = host::tensor({1, 1, kRows, kDense + 1}, host::boolean); }},
    {"a scale below 0", "positive", [](Call& c) { c.scale = -1; }},
};

}  // namespace

void refuse_attention() {
  for (const Refusal& refusal : kOfFloats) {
    Call call;
    have_floats_alone(call);
    refusal.spoil(call);
    expect_refused(refusal.what, call.run_floats(), call.y, nullptr, refusal.about);
  }
  for (const Refusal& refusal : kRefusals) {
    Call call;
    refusal.spoil(call);
    expect_refused(refusal.what, call.run(), call.y, nullptr, refusal.about);
  }
  Call call;
  host::faults.no_memory = true;
  EXPECT(call.run() != BITPORT_SUCCESS && !call.y, "attention on a host without memory");
  host::faults = {};
}

// Against float64. The error of a score is at most that of its sum of kWidth products, and each weight changes by as much,
// relatively; sums of up to 42 weighted values follow.
void try_attention(Random& random) {
  Call call;
  const bool floats = random() % 2 == 0;
  if (floats) have_floats_alone(call);
  const int64_t count = floats ? 0 : kTokens, all = count + kDense;
  for (AtenTensorOpaque* each : {&call.q, &call.k_dense, &call.v_dense})
    for (size_t i = 0; i < each->bytes.size() / 4; ++i) each->as<float>()[i] = float(uniform(random, -1, 1));
  for (AtenTensorOpaque* each : {&call.k_scale, &call.v_scale})
    for (size_t i = 0; i < each->bytes.size() / 4; ++i) each->as<float>()[i] = float(uniform(random, 0.01, 0.1));
  for (AtenTensorOpaque* each : {&call.k_data, &call.v_data})
    for (uint8_t& byte : each->bytes) byte = uint8_t(random());
  for (uint8_t& zero : call.k_zero.bytes) zero = uint8_t(random() % 16);
  for (uint8_t& seen : call.mask.bytes) seen = uint8_t(random() % 4 != 0);
  call.causal = int64_t(random() % 2);
  if (random() % 3 == 0) call.mask_at = nullptr;
  // token t of all -> what it is in a head
  const auto key = [&](int64_t head, int64_t t, int64_t i) -> double {
    const bool of_codes = t >= call.first && t < call.first + count;
    if (!of_codes) return call.k_dense.as<float>()[(head * kDense + (t < call.first ? t : t - count)) * kWidth + i];
    const int64_t row = head * kTokens + t - call.first, at = row * 2 + i / 16;
    const int code = call.k_data.bytes[size_t(row * kWidth / 2 + i / 2)] >> (4 * (i % 2)) & 15;
    return (code - call.k_zero.bytes[size_t(at)]) * double(call.k_scale.as<float>()[at]);
  };
  const auto value = [&](int64_t head, int64_t t, int64_t i) -> double {
    const bool of_codes = t >= call.first && t < call.first + count;
    if (!of_codes) return call.v_dense.as<float>()[(head * kDense + (t < call.first ? t : t - count)) * kOut + i];
    const int64_t row = head * kTokens + t - call.first;
    return (call.v_data.bytes[size_t(row * kOut + i)] - 128) * double(call.v_scale.as<float>()[row]);
  };
  std::vector<double> wanted, allowed;
  for (int64_t row = 0; row < kHeads * kRows; ++row) {
    const int64_t head = row / kRows / (kHeads / kGroups), place = row % kRows;
    std::vector<double> weight(size_t(all), 0);
    double sum = 0, off = 0;
    for (int64_t t = 0; t < all; ++t) {
      if (call.causal && t > all - kRows + place) continue;
      if (call.mask_at && !call.mask.bytes[size_t(place * all + t)]) continue;
      double score = 0, size = 0;
      for (int64_t i = 0; i < kWidth; ++i) {
        const double term = call.q.as<float>()[row * kWidth + i] * key(head, t, i) * call.scale;
        score += term;
        size += std::fabs(term);
      }
      sum += weight[size_t(t)] = std::exp(score);
      off = std::max(off, size * double(kWidth + 16) * 0x1p-23);
    }
    for (int64_t i = 0; i < kOut; ++i) {
      double exact = 0, size = 0;
      for (int64_t t = 0; t < all && sum > 0; ++t) {
        exact += weight[size_t(t)] / sum * value(head, t, i);
        size += weight[size_t(t)] / sum * std::fabs(value(head, t, i));
      }
      wanted.push_back(exact);
      allowed.push_back(size * (std::expm1(2 * off) + double(2 * all + 64) * 0x1p-23));
    }
  }
  if (random() % 2)
    for (AtenTensorOpaque* each : {&call.k_data, &call.k_scale, &call.k_zero, &call.v_data, &call.v_scale, &call.v_dense})
      have_room(*each);
  EXPECT((floats ? call.run_floats() : call.run()) == BITPORT_SUCCESS, "%s", bitport_shim_error());
  EXPECT((call.y->sizes == std::vector<int64_t>{1, kHeads, kRows, kOut}), "shape of attention");
  for (size_t i = 0; i < wanted.size(); ++i)
    EXPECT(std::fabs(call.y->as<float>()[i] - wanted[i]) <= allowed[i], "attention: number %zu is %g, should be %g within %g", i,
           double(call.y->as<float>()[i]), wanted[i], allowed[i]);
  aoti_torch_delete_tensor_object(call.y);
  ++cases;
}
