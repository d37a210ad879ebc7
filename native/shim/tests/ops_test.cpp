#include <functional>
#include "../../kernels/tiles.h"
#include "shim_test.h"

using namespace bitport;

extern "C" int32_t aoti_torch_delete_tensor_object(AtenTensorHandle);

namespace {

// Valid arguments for all ops: int4 in groups with zeros, 3 experts or none.
struct Call {
  int64_t n = 40, k = 96, group = 32, bits = 4, integer = 1, act = BITPORT_INT8_ROW, then = 0, experts;
  AtenTensorOpaque x, ids, ends, data, scale, zero, table, bias, times, act_scale;
  AtenTensorHandle px = &x, pids = &ids, pends = &ends, pdata = &data, pscale = &scale, pzero = &zero, ptable = &table;
  AtenTensorHandle pbias = &bias, ptimes = &times, pact = &act_scale, y = nullptr;
  AtenTensorHandle *zero_at = &pzero, *second_at = nullptr, *bias_at = &pbias, *times_at = nullptr, *act_at = nullptr;
  AtenTensorHandle* result = &y;
  int32_t dtype = host::f32;

  explicit Call(int64_t e = 0) : experts(e) {
    x = host::tensor({5, k}, host::f32);
    ids = host::tensor({2, 3}, host::i64);
    ends = host::tensor({e}, host::i32);
    data = part({2, 3, 512}, host::u8);
    scale = part({2, 3, 32}, host::f32);
    zero = part({2, 3, 32}, host::u8);
    table = host::tensor({16}, host::f32);
    for (int code = 0; code < 16; ++code) table.as<float>()[code] = float(code - 8);
    bias = host::tensor({n}, host::f32);
    times = host::tensor({5, n}, host::f32);
    act_scale = host::tensor({1}, host::f32);
  }
  Call(const Call&) = delete;

  AtenTensorOpaque part(std::vector<int64_t> sizes, int32_t of) const {
    if (experts) sizes.insert(sizes.begin(), experts);
    return host::tensor(std::move(sizes), of);
  }
  AOTITorchError linear() {
    return aoti_torch_cpu_bitport_linear(px, pdata, pscale, zero_at, second_at, ptable, n, k, group, bits, integer, bias_at,
                                         then, times_at, result);
  }
  AOTITorchError dyn_linear() {
    return aoti_torch_cpu_bitport_dyn_linear(px, pdata, pscale, zero_at, second_at, ptable, n, k, group, bits, integer, act,
                                             act_at, bias_at, then, times_at, result);
  }
  AOTITorchError grouped() {
    return aoti_torch_cpu_bitport_grouped_linear(px, pends, pdata, pscale, zero_at, second_at, ptable, n, k, group, bits,
                                                 integer, result);
  }
  AOTITorchError dyn_grouped() {
    return aoti_torch_cpu_bitport_dyn_grouped_linear(px, pends, pdata, pscale, zero_at, second_at, ptable, n, k, group, bits,
                                                     integer, act, result);
  }
  AOTITorchError embedding() {
    return aoti_torch_cpu_bitport_embedding(pids, pdata, pscale, zero_at, second_at, ptable, n, k, group, bits, integer,
                                            dtype, result);
  }
};

// Changes the weight to one that is only looked up, stored by row.
void lie_by_row(Call& c) {
  c.data = host::tensor({c.n, c.k / 2}, host::u8);
  c.scale = host::tensor({c.n, 3}, host::f32);
  c.zero = host::tensor({c.n, 3}, host::u8);
}

// Changes the weights to those of no experts, which take no memory of whatever size: n and k are multiples of 32, and each row has one scale.
void have_no_experts(Call& c, int64_t n, int64_t k) {
  c.n = n, c.k = k, c.group = INT64_MAX;
  c.x = host::tensor({0, k}, host::f32);
  c.ends = host::tensor({0}, host::i32);
  c.data = host::tensor({0, n / 32, k / 32, 512}, host::u8);
  c.scale = host::tensor({0, n / 32, 1, 32}, host::f32);
  c.zero = host::tensor({0, n / 32, 1, 32}, host::u8);
}

struct Refusal { const char* what; const char* about; std::function<void(Call&)> spoil; };

const Refusal kOfRows[] = {
    {"data too short", "data", [](Call& c) { lie_by_row(c); c.data = host::tensor({c.n, c.k / 2 - 1}, host::u8); }},
    {"a row too few", "data", [](Call& c) { lie_by_row(c); c.data = host::tensor({c.n - 1, c.k / 2}, host::u8); }},
    {"scale in tiles", "scale", [](Call& c) { lie_by_row(c); c.scale = host::tensor({2, 3, 32}, host::f32); }},
    {"zero too short", "zero", [](Call& c) { lie_by_row(c); c.zero = host::tensor({c.n, 2}, host::u8); }},
};

const Refusal kOfWeights[] = {
    {"no data", "data", [](Call& c) { c.pdata = nullptr; }},
    {"no scale", "scale", [](Call& c) { c.pscale = nullptr; }},
    {"no table", "table", [](Call& c) { c.ptable = nullptr; }},
    {"no result", "result", [](Call& c) { c.result = nullptr; }},
    {"data elsewhere", "data", [](Call& c) { c.data.device = host::kElsewhere; }},
    {"data strided", "data", [](Call& c) { c.data.contiguous = false; }},
    {"data of floats", "data", [](Call& c) { c.data.dtype = host::f32; }},
    {"data too short", "data", [](Call& c) { c.data = c.part({2, 3, 511}, host::u8); }},
    {"scale too short", "scale", [](Call& c) { c.scale = c.part({2, 2, 32}, host::f32); }},
    {"scale of integers", "scale", [](Call& c) { c.scale = c.part({2, 3, 32}, host::i32); }},
    {"zero too short", "zero", [](Call& c) { c.zero = c.part({2, 3, 31}, host::u8); }},
    {"zero of floats", "zero", [](Call& c) { c.integer = 0; }},
    {"table too short", "table", [](Call& c) { c.table = host::tensor({8}, host::f32); }},
    {"table of halves", "table", [](Call& c) { c.table = host::tensor({16}, host::f16); }},
    {"0 bits", "bits", [](Call& c) { c.bits = 0; }},
    {"2^32 + 4 bits", "bits", [](Call& c) { c.bits = (int64_t(1) << 32) + 4; }},
    {"n = 0", "size", [](Call& c) { c.n = 0; }},
    {"n of 2^62", "size", [](Call& c) { c.n = int64_t(1) << 62; }},
    {"k < 0", "size", [](Call& c) { c.k = -96; }},
    {"group 0", "size", [](Call& c) { c.group = 0; }},
    {"group 24", "group", [](Call& c) { c.group = 24; }},
    {"scale2 without e4m3", "scale2", [](Call& c) { c.second_at = &c.pact; }},
};

const Refusal kOfProducts[] = {
    {"no x", "x is", [](Call& c) { c.px = nullptr; }},
    {"x of another k", "x is", [](Call& c) { c.x = host::tensor({5, 95}, host::f32); }},
    {"x a number", "x is", [](Call& c) { c.x = host::tensor({}, host::f32); }},
    {"x of integers", "x is", [](Call& c) { c.x.dtype = host::i32; }},
    {"x strided", "x is", [](Call& c) { c.x.contiguous = false; }},
};

const Refusal kOfRounded[] = {
    {"act 10", "act", [](Call& c) { c.act = 10; }},
    {"act -1", "act", [](Call& c) { c.act = -1; }},
    {"as it is", "act", [](Call& c) { c.act = BITPORT_AS_IS; }},
    {"act of 2^32 + 1", "act", [](Call& c) { c.act = (int64_t(1) << 32) + 1; }},
};

const Refusal kOfLinear[] = {
    {"then 4", "then", [](Call& c) { c.then = 4; }},
    {"bias of another n", "bias", [](Call& c) { c.bias = host::tensor({39}, host::f32); }},
    {"bias of another dtype", "bias", [](Call& c) { c.bias.dtype = host::bf16; }},
    {"times of another shape", "times", [](Call& c) { c.then = 3; c.times_at = &c.ptimes; c.times = host::tensor({4, 40}, host::f32); }},
    {"times after nothing", "follows the product", [](Call& c) { c.times_at = &c.ptimes; }},
    {"no rows, of a result past int64", "no tensor", [](Call& c) { c.x = host::tensor({0, int64_t(1) << 60, 1, 96}, host::f32); }},
    {"a matrix of experts", "data", [](Call& c) { c.data = host::tensor({1, 2, 3, 512}, host::u8); }},
};

const Refusal kOfDynLinear[] = {
    {"a scale for rows", "act_scale", [](Call& c) { c.act_at = &c.pact; }},
    {"two scales", "act_scale", [](Call& c) { c.act = BITPORT_INT8_TENSOR; c.act_at = &c.pact; c.act_scale = host::tensor({2}, host::f32); }},
};

const Refusal kOfGrouped[] = {
    {"no ends", "ends", [](Call& c) { c.pends = nullptr; }},
    {"ends of another count", "ends", [](Call& c) { c.ends = host::tensor({2}, host::i32); }},
    {"ends of int64", "ends", [](Call& c) { c.ends = host::tensor({3}, host::i64); }},
    {"ends past the rows", "ends", [](Call& c) { c.ends.as<int32_t>()[2] = 6; }},
    {"ends that fall", "ends", [](Call& c) { c.ends.as<int32_t>()[0] = 2; c.ends.as<int32_t>()[1] = 1; }},
    {"ends below 0", "ends", [](Call& c) { c.ends.as<int32_t>()[0] = -1; }},
    {"no experts past int64", "size", [](Call& c) { have_no_experts(c, int64_t(1) << 40, int64_t(1) << 40); }},
    {"x of 3 dimensions", "x is", [](Call& c) { c.x = host::tensor({1, 5, 96}, host::f32); }},
};

const Refusal kOfDynGrouped[] = {
    {"one scale for all rows", "one scale of all", [](Call& c) { c.act = BITPORT_INT8_TENSOR; }},
};

const Refusal kOfEmbedding[] = {
    {"no ids", "ids", [](Call& c) { c.pids = nullptr; }},
    {"ids of int32", "ids", [](Call& c) { c.ids = host::tensor({2, 3}, host::i32); }},
    {"an id below 0", "row", [](Call& c) { c.ids.as<int64_t>()[1] = -1; }},
    {"an id past the end", "row", [](Call& c) { c.ids.as<int64_t>()[5] = 40; }},
    {"rows of integers", "rows are given", [](Call& c) { c.dtype = host::i32; }},
};

template <class Refusals>
void refuse(const Refusals& refusals, int64_t experts, AOTITorchError (Call::*run)()) {
  for (const Refusal& refusal : refusals) {
    Call call(experts);
    refusal.spoil(call);
    const AOTITorchError code = (call.*run)();
    expect_refused(refusal.what, code, call.y, nullptr, refusal.about);
  }
}

}  // namespace

void refuse_ops() {
  for (const auto linear : {&Call::linear, &Call::dyn_linear}) {
    refuse(kOfWeights, 0, linear);
    refuse(kOfProducts, 0, linear);
    refuse(kOfLinear, 0, linear);
  }
  for (const auto grouped : {&Call::grouped, &Call::dyn_grouped}) {
    refuse(kOfWeights, 3, grouped);
    refuse(kOfProducts, 3, grouped);
    refuse(kOfGrouped, 3, grouped);
  }
  refuse(kOfRounded, 0, &Call::dyn_linear);
  refuse(kOfRounded, 3, &Call::dyn_grouped);
  refuse(kOfDynLinear, 0, &Call::dyn_linear);
  refuse(kOfDynGrouped, 3, &Call::dyn_grouped);
  refuse(kOfWeights, 0, &Call::embedding);
  refuse(kOfEmbedding, 0, &Call::embedding);
  refuse(kOfRows, 0, &Call::embedding);
  for (const auto grouped : {&Call::grouped, &Call::dyn_grouped}) {
    Call call(3);
    have_no_experts(call, kMost, kMost);
    EXPECT((call.*grouped)() == BITPORT_SUCCESS && call.y->sizes[1] == kMost, "the largest weight, of no experts");
    aoti_torch_delete_tensor_object(call.y);
    ++cases;
  }
  Call call;
  host::faults.no_memory = true;
  for (const auto run : {&Call::linear, &Call::dyn_linear}) EXPECT((call.*run)() != BITPORT_SUCCESS && !call.y, "a host without memory");
  host::faults = {};
}

// The ops against float64, with codes packed by bitport_pack; rounding leaves x unchanged, so that both products have
// the same error bound.
void try_ops(Random& random) {
  Call call(2);
  call.ends.as<int32_t>()[0] = int32_t(random() % 6);
  call.ends.as<int32_t>()[1] = call.ends.as<int32_t>()[0] + int32_t(random() % (6 - uint64_t(call.ends.as<int32_t>()[0])));
  std::vector<double> value(size_t(2 * call.n * call.k));
  for (int64_t i = 0; i < 5 * call.k; ++i) call.x.as<float>()[i] = i % call.k ? float(int(random() % 255) - 127) : 127.0f;
  for (int64_t i = 0; i < 2 * 2 * 3 * 32; ++i) {
    call.scale.as<float>()[i] = float(uniform(random, 0.01, 0.1));
    call.zero.as<uint8_t>()[i] = uint8_t(random() % 16);
  }
  for (int64_t e = 0; e < 2; ++e) {
    std::vector<uint8_t> dense(size_t(call.n * call.k / 2));
    for (uint8_t& byte : dense) byte = uint8_t(random());
    EXPECT(!bitport_pack(dense.data(), 4, call.n, call.k, call.data.as<uint8_t>() + e * 2 * 3 * 512, 1), "packed");
    for (int64_t row = 0; row < call.n; ++row)
      for (int64_t i = 0; i < call.k; ++i) {
        const int64_t at = ((e * 2 + row / 32) * 3 + i / 32) * 32 + row % 32;
        const int code = dense[size_t(row * call.k / 2 + i / 2)] >> (4 * (i % 2)) & 15;
        value[size_t((e * call.n + row) * call.k + i)] =
            (code - call.zero.as<uint8_t>()[at]) * double(call.scale.as<float>()[at]);
      }
  }
  // expert(row): the first, the second, or none. Error bound in float32: a rounding for the weight, for the product,
  // and for each of at most k sums.
  const auto expect_products = [&](const Call& made, const std::function<int64_t(int64_t)>& expert) {
    for (int64_t row = 0; row < 5; ++row)
      for (int64_t column = 0; column < call.n; ++column) {
        const int64_t e = expert(row);
        double sum = 0, size = 0;
        for (int64_t i = 0; e >= 0 && i < call.k; ++i) {
          const double term = call.x.as<float>()[row * call.k + i] * value[size_t((e * call.n + column) * call.k + i)];
          sum += term;
          size += std::fabs(term);
        }
        EXPECT(std::fabs(made.y->as<float>()[row * call.n + column] - sum) <= size * double(call.k + 3) * 0x1p-24, "a product");
      }
    aoti_torch_delete_tensor_object(made.y);
    ++cases;
  };
  const auto by_ends = [&](int64_t row) {
    return row < call.ends.as<int32_t>()[0] ? 0 : row < call.ends.as<int32_t>()[1] ? 1 : -1;
  };
  for (const auto run : {&Call::grouped, &Call::dyn_grouped}) {
    EXPECT((call.*run)() == BITPORT_SUCCESS, "%s", bitport_shim_error());
    expect_products(call, by_ends);
  }

  Call one;
  one.data.bytes.assign(call.data.bytes.begin(), call.data.bytes.begin() + 2 * 3 * 512);
  one.scale.bytes.assign(call.scale.bytes.begin(), call.scale.bytes.begin() + 2 * 3 * 32 * 4);
  one.zero.bytes.assign(call.zero.bytes.begin(), call.zero.bytes.begin() + 2 * 3 * 32);
  one.x.bytes = call.x.bytes;
  one.bias_at = nullptr;
  for (const auto run : {&Call::linear, &Call::dyn_linear}) {
    EXPECT((one.*run)() == BITPORT_SUCCESS, "%s", bitport_shim_error());
    expect_products(one, [](int64_t) { return 0; });
  }
  for (int64_t i = 0; i < 6; ++i) one.ids.as<int64_t>()[i] = int64_t(random() % uint64_t(one.n));
  EXPECT(one.embedding() == BITPORT_SUCCESS, "%s", bitport_shim_error());
  EXPECT((one.y->sizes == std::vector<int64_t>{2, 3, one.k}), "shape of a lookup");
  for (int64_t i = 0; i < 6 * one.k; ++i) {
    const double wanted = value[size_t(one.ids.as<int64_t>()[i / one.k] * one.k + i % one.k)];
    EXPECT(std::fabs(one.y->as<float>()[i] - wanted) <= std::fabs(wanted) * 0x1p-23, "a lookup");
  }
  const auto looked_up = one.y->bytes;
  aoti_torch_delete_tensor_object(one.y);
  one.y = nullptr;
  Call by_row;
  lie_by_row(by_row);
  by_row.ids.bytes = one.ids.bytes;
  EXPECT(!bitport_unpack(one.data.as<uint8_t>(), 4, one.n, one.k, by_row.data.as<uint8_t>(), 1), "unpacked");
  for (int64_t row = 0; row < one.n; ++row)
    for (int64_t group = 0; group < 3; ++group) {
      const int64_t at = (row / 32 * 3 + group) * 32 + row % 32;
      by_row.scale.as<float>()[row * 3 + group] = one.scale.as<float>()[at];
      by_row.zero.as<uint8_t>()[row * 3 + group] = one.zero.as<uint8_t>()[at];
    }
  EXPECT(by_row.embedding() == BITPORT_SUCCESS, "%s", bitport_shim_error());
  EXPECT(by_row.y->bytes == looked_up, "a lookup in dense rows");
  aoti_torch_delete_tensor_object(by_row.y);
  one.x = host::tensor({0, one.k}, host::f32);
  EXPECT(one.linear() == BITPORT_SUCCESS && one.y->bytes.empty(), "no rows");
  aoti_torch_delete_tensor_object(one.y);
  cases += 3;
}
