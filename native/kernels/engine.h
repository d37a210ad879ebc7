// The interface between the product and an instruction set. A weight is processed in tiles of 32 output rows; sums are
// float32 [rows][32]. The sums of a tile are computed in one of three ways:
//   panel   decode() writes a stretch of K as scaled values, which multiply() reuses for every row of x: many rows.
//   late    the same with unscaled values from look_up(); finish() scales the sums: one scale per output row.
//   fused   codes become values in registers or L1 and are used at once, scales are applied to group sums: few rows.
// The tensor-wide scale (scale2) is applied to the final sums, so that products of short floats stay exact in bfloat16.
#pragma once
#include <cstddef>
#include "bitport_kernels.h"
#include "machine.h"
#include "status.h"
#include "tiles.h"

// For target attributes of auto-vectorized loops: g++, unlike clang++, must be told to prefer 512-bit vectors.
#if defined(__clang__)
#define BITPORT_LONG_VECTORS ""
#else
#define BITPORT_LONG_VECTORS ",prefer-vector-width=512"
#endif

namespace bitport {

constexpr int64_t kScaled = 128;   // columns of x that share a scale that is not a power of two
// Whether the scale of the weight, like that of x, can be applied to sums over kScaled columns: it is constant over
// them.
static inline bool scales_act_on_blocks(const BitportTiles& w) {
  return !w.zero && (w.group % kScaled == 0 || w.group >= w.k);
}

// Rows of x in blocks: [m / block][K / 32][block][32], the last step padded with zeros. The last block may hold fewer
// rows; the rest of it is undefined.
struct Job {
  const BitportTiles* weight;
  void* rows;          // float32 or bfloat16, as Engine::bf16 says
  const float* sums;   // [m][pieces]: sums of x over each piece, if the weight has a zero and scales are applied to sums
  int64_t m, block;
  const float* scales = nullptr;   // [ceil(k / kScaled)][m]: scales of x, for engines whose multiply() applies them
  int64_t first = 0;               // the row at which `rows` begins

  // Index of the element at a row and column; the column is a multiple of 32.
  int64_t at(int64_t row, int64_t k) const {
    const int64_t r = row - first;
    return ((r / block * ((weight->k + 31) / 32) + k / 32) * block + r % block) * 32;
  }
};

// An unpacked stretch of K of one tile: columns [k, k + count), a multiple of 32.
struct Panel {
  int64_t tile, k, count;
  void* data;
};

// x is summed over pieces if scales are applied to sums: a piece is a group, cut to at most this many columns if x is float32
// and the weight has a zero. The zero may subtract many times the result, so the rounding error of long sums counts.
static inline int64_t summed_columns(const BitportTiles& w, bool bf16) { return w.zero && !bf16 ? 256 : kMost; }

// x at a column of the rows that pass by (pass.h) after those from `row` on; null: none do.
template <class Number>
const Number* after(const Job& job, int64_t row, int64_t k) {
  const int64_t next = row + job.block;
  return next < job.m ? static_cast<const Number*>(job.rows) + job.at(next, k) : nullptr;
}

// Calls work(row, count) on rows from 0 on. Parts never cross a block boundary; each block is split as evenly as
// possible into the fewest parts of at most `most` rows.
template <class Work>
void by_few(int64_t rows, int64_t block, int64_t most, const Work& work) {
  for (int64_t row = 0; row < rows;) {
    const int64_t left = smaller(rows - row, block - row % block), count = ceil_div(left, ceil_div(left, most));
    work(row, count);
    row += count;
  }
}

// Implements Engine::multiply with functions for 1, 2 .. Most rows of x, where consecutive steps of 32 columns are
// `stride` elements apart.
template <class Number, size_t Most>
void multiply_few(const Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum,
                  void (*const (&by_rows)[Most])(const Number* x, int64_t stride, int64_t steps, const Number* panel, float* sum)) {
  if (panel.k == 0)
    for (int64_t i = 0; i < rows * 32; ++i) sum[i] = 0;
  by_few(rows, job.block, int64_t(Most), [&](int64_t r, int64_t count) {
    const Number* x = static_cast<const Number*>(job.rows) + job.at(row + r, panel.k);
    by_rows[count - 1](x, job.block * 32, panel.count / 32, static_cast<const Number*>(panel.data), sum + r * 32);
  });
}

// Blocking of a product of many rows by sweep.h, as measured for an engine.
struct AtOnce {
  int64_t rows;      // rows of x in a part
  size_t x_bytes;    // a span of K of that part, kept in L2
  int64_t tiles;     // tiles whose sums are kept there
  int64_t pieces;    // per thread, when parts are split among threads
};
constexpr AtOnce kUsual{128, size_t(1) << 20, 16, 4}, kUsualOfBytes{256, size_t(1) << 20, 16, 4};

struct Engine {
  bool bf16;            // rows and panel are bfloat16, else float32
  int64_t depth;        // how much of K a panel holds
  int64_t passing;      // rows of x in registers, for pass.h; 0: sweep.h, with
  AtOnce at_once;
  void (*widen)(const void* from, int32_t type, int64_t count, float* to);
  void (*decode)(const BitportTiles& weight, const Panel& panel);
  void (*look_up)(const BitportTiles& weight, const Panel& panel);   // null: never late
  void (*finish)(const Job& job, int64_t tile, int64_t row, int64_t rows, float* sum);
  // Adds the product of rows [row, row + rows) and the panel to sum, or overwrites sum if the panel begins at column 0;
  // row begins a block.
  void (*multiply)(const Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum);
  // The same, while decoding (looking up, if late) another panel; null: the engine cannot overlap the two.
  void (*multiply_ahead)(const Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum, const Panel& next,
                         bool late);
  bool (*fuses)(const BitportTiles& weight, int64_t m);   // whether to use the fused path; null: never
  // Overwrites sum, which has room for whole blocks of 32 rows; `panels` is scratch memory of four panels.
  void (*fused)(const Job& job, int64_t tile, void* panels, float* sum);
  // Part of a row; sum is aligned to 64 bytes.
  void (*store)(const float* sum, int64_t count, const float* bias, void* y, int32_t type);
  // Stores 32 two-byte numbers, a full cache line, non-temporally; visible to other threads after end(). null: never
  void (*stream)(const float* sum, const float* bias, void* y, int32_t type);
  void (*begin)();      // once per thread and work item; may be null
  void (*end)();
};

// The validated arguments of bitport_linear or bitport_dyn_linear.
struct Product {
  const BitportTiles& weight;
  const void* x;
  int32_t x_type;
  int64_t m;
  const void* bias;
  void* y;
  int32_t y_type;   // also of the bias
  int32_t threads, isa;
  int32_t then;
  const void* times;
};

// Whether rows of y consist of full cache lines and y is too large to stay in L2: regular stores would evict x, and
// sooner if rows are a multiple of the page size apart and map to the same few sets.
static inline bool lines_past_caches(const Product& p) {
  const size_t row = size_t(p.weight.n) * 2, stays = size_t(row % 4096 ? 2 : 1) << 20;
  return p.y_type != BITPORT_F32 && row % 64 == 0 && reinterpret_cast<uintptr_t>(p.y) % 64 == 0 && size_t(p.m) * row > stays;
}

// Validation common to both entry points; returns a Status. multiply_checked() then calls `multiply`, which also
// returns a Status, unless there is nothing to do.
int32_t check_product(const BitportTiles* w, int32_t x_type, int64_t m, int32_t then, const void* times, int32_t isa);
template <class Multiply>
int32_t multiply_checked(const BitportTiles* w, const void* x, int32_t x_type, int64_t m, const void* bias, int32_t then,
                         const void* times, void* y, int32_t threads, int32_t isa, const Multiply& multiply) {
  if (m == 0 || w->n == 0) return kOk;
  if (!x || !y) return kNullPointer;
  constexpr int64_t kGrain = 1 << 18;   // below this many products a second thread does not pay off
  if (threads < 1 || w->n * w->k < kGrain / m) threads = 1;
  return multiply(Product{*w, x, x_type, m, bias, y, x_type, threads, isa < 0 ? bitport_best_isa() : isa, then, times});
}

// The products, each returning a Status: x as is; x as floats, rounded before if `rounded` is not null; x rounded to
// integers.
struct RoundedRows;
int32_t linear_as_is(const Product& product);
int32_t linear_of_floats(const Product& product, const Engine& engine, const RoundedRows* rounded);
int32_t linear_int8(const Product& product, int32_t act, const float* act_scale);
bool takes_digits(const Product& product);   // few rows of bfloat16, integer weights
int32_t linear_digits(const Product& product, bool* taken);   // not taken: x is not finite or near the range limit, or has outliers
#if BITPORT_X86
bool fast_bf16();   // whether to use vdpbf16ps for more than a few rows
#endif

// The engine for m rows of x_type on this instruction set.
const Engine& engine_for(int32_t isa, int32_t x_type, int64_t m);

extern const Engine scalar_engine;
#if BITPORT_X86
extern const Engine avx2_engine, avx512_engine, avx512_bf16_engine, avx512_bf16_blocks_engine, amx_engine, amx_blocks_engine;
#elif BITPORT_ARM
extern const Engine neon_engine, neon_matrix_engine, neon_matrix_blocks_engine;
#endif

}  // namespace bitport
