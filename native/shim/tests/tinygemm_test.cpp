#include <functional>
#include "shim_test.h"

using namespace bitport;

namespace {

// Valid arguments; a test spoils one at a time.
struct Call {
  AtenTensorOpaque self, mat2, pairs;
  AtenTensorHandle a = &self, b = &mat2, c = &pairs, y = nullptr;
  AtenTensorHandle* result = &y;
  int64_t group;

  Call(int64_t m, int64_t n, int64_t k, int64_t inner, int64_t g)
      : self(host::tensor({m, k}, host::bf16)),
        mat2(host::tensor({n / 8, k / (16 * inner), 32, inner / 2}, host::i32)),
        pairs(host::tensor({k / g, n, 2}, host::bf16)),
        group(g) {}
  Call() : Call(3, 16, 256, 4, 64) {}

  AOTITorchError run() { return aoti_torch_cpu__weight_int4pack_mm(a, b, group, c, result); }
};

struct Refusal { const char* what; const char* about; std::function<void(Call&)> spoil; };

void reshape(AtenTensorOpaque& t, std::vector<int64_t> sizes) { t = host::tensor(std::move(sizes), t.dtype); }

constexpr int64_t kHuge = int64_t(1) << 62;   // a size beside one of 0 takes no memory

const Refusal kRefusals[] = {
    {"self null", "self is null", [](Call& c) { c.a = nullptr; }},
    {"mat2 null", "mat2 is null", [](Call& c) { c.b = nullptr; }},
    {"scales null", "scales_and_zeros is null", [](Call& c) { c.c = nullptr; }},
    {"result null", "result is null", [](Call& c) { c.result = nullptr; }},
    {"self on another device", "self is not", [](Call& c) { c.self.device = host::kElsewhere; }},
    {"mat2 on another device", "mat2 is not", [](Call& c) { c.mat2.device = host::kElsewhere; }},
    {"scales on another device", "scales_and_zeros is not", [](Call& c) { c.pairs.device = host::kElsewhere; }},
    {"self strided", "self is not a contiguous", [](Call& c) { c.self.contiguous = false; }},
    {"mat2 strided", "mat2 is not a contiguous", [](Call& c) { c.mat2.contiguous = false; }},
    {"scales strided", "scales_and_zeros is not a contiguous", [](Call& c) { c.pairs.contiguous = false; }},
    {"self float32", "self must be bfloat16", [](Call& c) { c.self = host::tensor({3, 256}, host::f32); }},
    {"self float16", "self must be bfloat16", [](Call& c) { c.self.dtype = host::f16; }},
    {"mat2 uint8", "mat2 must be int32", [](Call& c) { c.mat2.dtype = host::u8; }},
    {"mat2 int64", "mat2 must be int32", [](Call& c) { c.mat2 = host::tensor(c.mat2.sizes, host::i64); }},
    {"scales float32", "scales_and_zeros must be bfloat16", [](Call& c) { c.pairs = host::tensor(c.pairs.sizes, host::f32); }},
    {"self of rank 1", "2 dimensions", [](Call& c) { reshape(c.self, {256}); }},
    {"self of rank 3", "2 dimensions", [](Call& c) { reshape(c.self, {1, 3, 256}); }},
    {"mat2 of rank 2", "4 dimensions", [](Call& c) { reshape(c.mat2, {2, 256}); }},
    {"mat2 of rank 5", "4 dimensions", [](Call& c) { reshape(c.mat2, {1, 2, 4, 32, 2}); }},
    {"scales of rank 2", "3 dimensions", [](Call& c) { reshape(c.pairs, {4, 32}); }},
    {"scales of rank 0", "3 dimensions", [](Call& c) { reshape(c.pairs, {}); }},
    {"inner 6", "inner/2", [](Call& c) { reshape(c.mat2, {2, 4, 32, 3}); }},
    {"inner 16", "inner/2", [](Call& c) { reshape(c.mat2, {2, 1, 32, 8}); }},
    {"inner 0", "inner/2", [](Call& c) { reshape(c.mat2, {2, 4, 32, 0}); }},
    {"inner past int64", "inner/2", [](Call& c) { reshape(c.mat2, {0, 4, 32, kHuge}); }},
    {"n past int64", "dimension 1 of mat2", [](Call& c) { reshape(c.mat2, {kHuge, 0, 32, 2}); }},
    {"31 lanes", "dimension 2 of mat2 must be 32", [](Call& c) { reshape(c.mat2, {2, 4, 31, 2}); }},
    {"k of mat2 differs", "dimension 1 of mat2", [](Call& c) { reshape(c.mat2, {2, 5, 32, 2}); }},
    {"no k", "group must divide k", [](Call& c) { reshape(c.self, {3, 0}); }},
    {"group 0", "group must be 32", [](Call& c) { c.group = 0; }},
    {"group -32", "group must be 32", [](Call& c) { c.group = -32; }},
    {"group 16", "group must be 32", [](Call& c) { c.group = 16; }},
    {"group 48", "group must be 32", [](Call& c) { c.group = 48; }},
    {"group 512", "group must be 32", [](Call& c) { c.group = 512; }},
    {"group of 2^32 and 32", "group must be 32", [](Call& c) { c.group = (int64_t(1) << 32) + 32; }},
    {"group not dividing k", "group must divide k", [](Call& c) { c = Call(3, 16, 192, 4, 64); c.a = &c.self; c.b = &c.mat2; c.c = &c.pairs; c.result = &c.y; c.group = 128; }},
    {"groups of scales differ", "dimension 0 of scales_and_zeros", [](Call& c) { c.group = 32; }},
    {"n of scales not a multiple of 8", "a multiple of 8", [](Call& c) { reshape(c.pairs, {4, 12, 2}); }},
    {"n of scales differs", "dimension 1 of scales_and_zeros", [](Call& c) { reshape(c.pairs, {4, 24, 2}); }},
    {"three of a pair", "dimension 2 of scales_and_zeros", [](Call& c) { reshape(c.pairs, {4, 16, 3}); }},
};

extern "C" int32_t aoti_torch_delete_tensor_object(AtenTensorHandle);

double number(AtenTensorOpaque& t, int64_t at) { return float_of_bf16(t.as<uint16_t>()[at]); }

int64_t pick(Random& random, std::initializer_list<int64_t> from) { return from.begin()[random() % from.size()]; }

}  // namespace

void refuse_tinygemm() {
  for (const Refusal& refusal : kRefusals) {
    Call call;
    AtenTensorHandle before = call.y;
    refusal.spoil(call);
    expect_refused(refusal.what, call.run(), call.y, before, refusal.about);
  }
  Call call;
  host::faults.no_memory = true;
  EXPECT(call.run() != BITPORT_SUCCESS && !call.y, "a host without memory");
  host::faults = {false, true};
  EXPECT(call.run() == BITPORT_FAILURE && !call.y && host::alive == 0, "an exception of the host");
  EXPECT(std::string(bitport_shim_error()).find("no threads today") != std::string::npos, "its text");
  host::faults = {};
  cases += 2;
}

void try_tinygemm(Random& random) {
  const int64_t inner = pick(random, {2, 4, 8}), group = pick(random, {32, 64, 128, 256});
  const int64_t unit = group > 16 * inner ? group : 16 * inner;
  const int64_t k = unit * (1 + int64_t(random() % 3)), n = 8 * int64_t(random() % 7), m = int64_t(random() % 20);
  Call call(m, n, k, inner, group);
  for (int64_t i = 0; i < m * k; ++i) call.self.as<uint16_t>()[i] = bf16_of_float(float(uniform(random, -2, 2)));
  const int64_t kind = int64_t(random() % 3);   // scales: ordinary, zero, or negligible compared to z
  for (int64_t i = 0; i < k / group * n; ++i) {
    const double s = kind == 0 ? uniform(random, 0.01, 0.1) : kind == 1 ? 0 : 1e-30;
    call.pairs.as<uint16_t>()[2 * i] = bf16_of_float(float(s));
    call.pairs.as<uint16_t>()[2 * i + 1] = bf16_of_float(float(uniform(random, -0.5, 0.5)));
  }
  // [n][k] codes; a word holds columns base + (0, 1, 8, 9, 16, 17, 24, 25), at the bit positions in kBits
  std::vector<int> codes(size_t(n * k));
  for (int& code : codes) code = int(random() % 16);
  const int kColumns[] = {0, 1, 8, 9, 16, 17, 24, 25}, kBits[] = {0, 16, 4, 20, 8, 24, 12, 28};
  uint32_t* word = call.mat2.as<uint32_t>();
  for (int64_t tile = 0; tile < n / 8; ++tile)
    for (int64_t outer = 0; outer < k / (16 * inner); ++outer)
      for (int64_t lane = 0; lane < 32; ++lane)
        for (int64_t pair = 0; pair < inner / 2; ++pair, ++word)
          for (int v = 0; v < 8; ++v) {
            const int64_t column = (outer * inner + 2 * pair) * 16 + 2 * (lane % 4) + kColumns[v];
            *word |= uint32_t(codes[size_t((8 * tile + lane / 4) * k + column)]) << kBits[v];
          }
  EXPECT(call.run() == BITPORT_SUCCESS, "%s", bitport_shim_error());
  EXPECT((call.y->sizes == std::vector<int64_t>{m, n}) && call.y->dtype == host::bf16, "shape and dtype");
  for (int64_t row = 0; row < m; ++row)
    for (int64_t column = 0; column < n; ++column) {
      double sum = 0, size = 0;   // size: sum of the magnitudes of the terms, with code and z separate
      for (int64_t i = 0; i < k; ++i) {
        const int64_t at = 2 * (i / group * n + column);
        const double s = number(call.pairs, at), z = number(call.pairs, at + 1), x = number(call.self, row * k + i);
        const int code = codes[size_t(column * k + i)];
        sum += x * ((code - 8) * s + z);
        size += std::fabs(x) * (8 * s + std::fabs(z));
      }
      // a weight is rounded once to bfloat16 (2^-9), sums are float32, the result is rounded once
      const double got = number(*call.y, row * n + column), bound = size * 0x1p-8 + std::fabs(sum) * 0x1p-8;
      EXPECT(std::fabs(got - sum) <= bound + 1e-30, "tinygemm %lldx%lldx%lld: %g, not %g", (long long)m, (long long)n,
             (long long)k, got, sum);
    }
  aoti_torch_delete_tensor_object(call.y);
  ++cases;
}
