// An optimizer step on many parameters: validates the arguments and distributes the blocks of all parameters over
// threads.
#include "engine.h"
#include "number.h"
#include "share.h"
#include "status.h"
#include "step.h"

namespace bitport {
namespace {

constexpr int64_t kPiece = 64;   // blocks per work item

int64_t block_of(const BitportStep& step) {
  for (int32_t i = 0; i < step.count; ++i)
    if (step.moments[i].map) return step.moments[i].map->block;
  return kMostInBlock;
}

int64_t blocks_in_row(const BitportStep& step) { return ceil_div(step.k, block_of(step)); }

int32_t check(int32_t rule, const BitportStep& step) {
  const bool counted = rule == BITPORT_ADAM ? step.count == 2 : rule == BITPORT_LION ? step.count == 1
                       : rule == BITPORT_SGD && (step.count == 0 || step.count == 1);
  if (!counted || !is_float(step.type) || !is_float(step.grad_type)) return kBadStep;
  if (step.n < 0 || step.k < 0) return kBadShape;
  if (!step.param || !step.grad) return kNullPointer;
  const int64_t block = block_of(step);
  for (int32_t i = 0; i < step.count; ++i) {
    const BitportMoment& m = step.moments[i];
    if (!m.data) return kNullPointer;
    if (!m.map) {
      if (m.type != BITPORT_F32 && m.type != BITPORT_BF16) return kBadStep;
      continue;
    }
    if (!m.scale || !m.map->values || !m.map->thresholds || !m.map->first || !m.map->value_bytes ||
        !m.map->ranked_bytes || !m.map->borders || !m.map->slopes || !m.map->offsets || !m.map->zones) return kNullPointer;
    if (m.map->bits != 8 && (m.map->bits != 4 || block % 2 || m.map->way == BITPORT_SIGN)) return kBadStep;
    if (m.map->block != block || block < 1 || block > kMostInBlock) return kBadStep;
  }
  return kOk;
}

// The last of the steps that begins at or before this piece.
const BitportStep& step_of(const BitportStep* steps, int64_t count, int64_t piece) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (steps[middle].before <= piece ? low : high) = middle;
  }
  return steps[low];
}

}  // namespace
}  // namespace bitport

int32_t bitport_optimizer_step(int32_t rule, BitportStep* steps, int64_t count, int32_t threads, int32_t isa) {
  using namespace bitport;
  if (count < 0) return kBadShape;
  if (count && !steps) return kNullPointer;
  const int32_t chosen = isa < 0 ? bitport_best_isa() : isa;
  if (!bitport_has_isa(chosen)) return kNoIsa;
  int64_t pieces = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (const int32_t wrong = check(rule, steps[i])) return wrong;
    steps[i].before = pieces;
    pieces += ceil_div(steps[i].n * blocks_in_row(steps[i]), kPiece);
  }
  const StepBlock some = step_in_loops(chosen, rule);
#if BITPORT_X86
  const bool vectors = chosen >= BITPORT_AVX512_VNNI && has_byte_lookups();
#endif
  share(pieces, threads, [&](int64_t piece) {
    const BitportStep& step = step_of(steps, count, piece);
    StepBlock whole = nullptr;
#if BITPORT_X86
    if (vectors) whole = step_whole_vectors(rule, step);
#endif
    const int64_t in_row = blocks_in_row(step), block = block_of(step), from = (piece - step.before) * kPiece;
    const int64_t to = smaller(from + kPiece, step.n * in_row);
    for (int64_t at = from; at < to; ++at) {
      const int64_t begin = at % in_row * block, numbers = smaller(block, step.k - begin);
      (whole && numbers % kInVectors == 0 ? whole : some)(step, at / in_row, begin, numbers);
    }
  });
  return kOk;
}
