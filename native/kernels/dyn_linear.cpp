// y = then(round(x) W^T + bias) * times. Rows rounded to floats become x of the float product; integers have a product
// of their own.
#include "buffer.h"
#include "engine.h"
#include "round.h"
#include "tiles.h"

namespace bitport {
namespace {

thread_local Buffer factors_buffer;

#if BITPORT_X86
// Small products are finished in vector code before tile registers have delivered their first sums.
bool is_small(const Product& p) {
  constexpr int64_t kFew = 1 << 15;
  return p.weight.n * p.weight.k <= kFew / p.m;
}
#endif

const Engine& engine_for_rounded(const Product& p, int32_t act) {
#if BITPORT_X86
  if (act == BITPORT_FP8_128 && p.isa > BITPORT_AVX512_VNNI) {
    if (p.isa == BITPORT_AMX && p.x_type == BITPORT_BF16 && !is_small(p)) return amx_blocks_engine;
    if (p.isa == BITPORT_AVX512_BF16 && p.x_type == BITPORT_BF16 && fast_bf16()) return avx512_bf16_blocks_engine;
    return engine_for(BITPORT_AVX512_VNNI, p.x_type, p.m);
  }
#endif
  const Engine& usual = engine_for(p.isa, p.x_type, p.m);
#if BITPORT_ARM
  if (act == BITPORT_FP8_128 && &usual == &neon_matrix_engine) return neon_matrix_blocks_engine;
#endif
  (void)act;
  return usual;
}

int32_t linear_rounded(const Product& product, int32_t act, const float* act_scale) {
  const BitportTiles& w = product.weight;
  const Engine& engine = engine_for_rounded(product, act);
  const bool in_blocks = act == BITPORT_FP8_128 && engine.bf16;
  const int64_t factors = product.m * (in_blocks ? ceil_div(w.k, kScaled) : 1) + 31;   // 32 rows of the last block may be read
  float* memory = reinterpret_cast<float*>(factors_buffer.need(size_t(factors) * 4));
  if (!memory) return kNoMemory;
  const RoundedRows rows{product, act, engine.bf16, in_blocks, global_scale(product, act, act_scale), memory};
  const int32_t code = linear_of_floats(product, engine, &rows);
  factors_buffer.trim();
  return code;
}

}  // namespace
}  // namespace bitport

int32_t bitport_dyn_linear(const BitportTiles* w, const void* x, int32_t x_type, int64_t m, int32_t act, const float* act_scale,
                           const void* bias, int32_t then, const void* times, void* y, int32_t threads, int32_t isa) {
  using namespace bitport;
  if (const int32_t code = check_product(w, x_type, m, then, times, isa)) return code;
  if (act < BITPORT_AS_IS || act > BITPORT_FP8_128) return kBadAct;
  const bool floats = act == BITPORT_AS_IS || rounds_to_floats(act);
  if (!floats && !w->integer) return kBadAct;
  if (act_scale && act != BITPORT_INT8_TENSOR && act != BITPORT_FP8_TENSOR && act != BITPORT_NVFP4) return kBadAct;
  return multiply_checked(w, x, x_type, m, bias, then, times, y, threads, isa, [&](const Product& product) {
    if (act == BITPORT_AS_IS) return linear_as_is(product);
    return floats || int8_as_floats(product, act) ? linear_rounded(product, act, act_scale)
                                                  : linear_int8(product, act, act_scale);
  });
}
