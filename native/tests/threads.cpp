// Many threads call concurrently, and each call uses several threads: the results must equal those of a single thread.
#include <thread>
#include "tests.h"
#include "weight.h"

namespace {

int32_t pool(int64_t begin, int64_t end, int64_t, BitportBody body, void* context) {
  std::vector<std::thread> threads;
  for (int64_t i = begin; i < end; ++i) threads.emplace_back([=] { body(i, i + 1, context); });
  for (std::thread& thread : threads) thread.join();
  return 0;
}

struct Work {
  const Weight& w;
  int64_t m;
  int32_t type, act, isa;
  Numbers& x;

  // y, the repacked tiles, and all rows
  std::vector<uint8_t> done(int32_t threads) const {
    const Shape& s = w.shape;
    const size_t product = size_t(m * s.n * bytes_of(type)), whole = size_t(s.n * s.k * 4);
    std::vector<int64_t> ids(size_t(s.n));
    for (int64_t i = 0; i < s.n; ++i) ids[size_t(i)] = s.n - 1 - i;
    std::vector<uint8_t> y(product), tiles(w.tiles.bytes()), rows(whole);
    const int32_t code =
        bitport_dyn_linear(&w.view, x.data(), type, m, act, nullptr, nullptr, 0, nullptr, y.data(), threads, isa) |
        bitport_pack(w.dense.data(), s.bits, s.n, s.k, tiles.data(), threads) |
        bitport_rows(&w.view, ids.data(), s.n, rows.data(), BITPORT_F32, threads);
    EXPECT(code == 0, "a call failed");
    std::vector<uint8_t> all;
    for (const auto* part : {&y, &tiles, &rows}) all.insert(all.end(), part->begin(), part->end());
    return all;
  }
};

}  // namespace

void try_threads(uint64_t seed) {
  constexpr int kAtOnce = 8;
  Random random(seed);
  const Weight w({200, 320, 64, 4, 1, BITPORT_BF16, BITPORT_U8}, random);
  const Weight floats({150, 260, 16, 4, 0, BITPORT_E4M3, -1}, random);
  std::vector<std::unique_ptr<Numbers>> inputs;
  std::vector<Work> works;
  for (int32_t isa : isas())
    for (int32_t act : {BITPORT_AS_IS, BITPORT_INT8_ROW_ASYM, BITPORT_INT8_TENSOR, BITPORT_FP8_TENSOR, BITPORT_NVFP4,
                        BITPORT_FP8_128})
      for (int64_t m : {5, 70}) {
        const bool int8 = act == BITPORT_INT8_ROW_ASYM || act == BITPORT_INT8_TENSOR;
        const Weight& weight = int8 || random() % 2 ? w : floats;
        const int32_t type = one_of(random, {BITPORT_F32, BITPORT_BF16, BITPORT_F16});
        inputs.push_back(std::make_unique<Numbers>(type, m * weight.shape.k, Place::heap));
        for (int64_t i = 0; i < inputs.back()->count; ++i) inputs.back()->set_random(i, random, -4, 2);
        works.push_back({weight, m, type, act, isa, *inputs.back()});
      }
  std::vector<std::vector<uint8_t>> alone;
  for (const Work& work : works) alone.push_back(work.done(1));
  bitport_use_pool(pool);
  std::vector<std::thread> threads;
  for (int t = 0; t < kAtOnce; ++t)
    threads.emplace_back([&, t] {
      for (size_t i = size_t(t % 4); i < works.size(); i += 4)   // every work item twice, at about the same time
        EXPECT(works[i].done(2 + t % 3) == alone[i], "%s, act %d, m %lld: other numbers with threads",
               bitport_isa_name(works[i].isa), works[i].act, (long long)works[i].m);
    });
  for (std::thread& thread : threads) thread.join();
  bitport_use_pool(nullptr);
  cases += 2 * (long long)works.size();
}
