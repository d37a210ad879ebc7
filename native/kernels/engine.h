// What an instruction set brings to the product, and what the product hands to it. A weight is worked off in tiles of 32
// output rows; sums are float32 [rows][32]. Three ways lead to the sums of a tile:
//   panel   decode() writes a stretch of K as scaled values, which multiply() uses for every row of x: many rows.
//   late    the same with look_up(), unscaled; finish() scales the sums: one scale for the whole row.
//   fused   codes become values in registers or L1 and are used at once, scales act on the sums of a group: few rows.
// The scale of the whole tensor (scale2) acts on the sums at the end: products of short floats stay exact in bfloat16.
#pragma once
#include <cstddef>
#include "bitport_kernels.h"
#include "status.h"
#include "tiles.h"

#if defined(__x86_64__) && defined(__linux__)
#define BITPORT_X86 1
#elif defined(__aarch64__) && (defined(__linux__) || defined(__APPLE__)) && !defined(__AARCH64EB__)
#define BITPORT_ARM 1
#endif

// In target attributes of loops that the compiler makes into vectors: g++ alone has to be told that these be long.
#if defined(__clang__)
#define BITPORT_LONG_VECTORS ""
#else
#define BITPORT_LONG_VECTORS ",prefer-vector-width=512"
#endif

namespace bitport {

constexpr int64_t kScaled = 128;   // columns of x under one scale that is no power of two
// Whether, beside that of x, the scale of the weight can act on sums over as many columns: it is one for all of them.
static inline bool scales_act_on_blocks(const BitportTiles& w) {
  return !w.zero && (w.group % kScaled == 0 || w.group >= w.k);
}
constexpr int64_t kBehindPanel = 256;   // bytes that an engine may use

// Rows of x in blocks: [m / block][K / 32][block][32], the last step filled up with zeros. The last block may hold fewer
// rows; the rest of it is undefined.
struct Job {
  const BitportTiles* weight;
  void* rows;          // float32 or bfloat16, as the engine asks
  const float* sums;   // [m][groups]: sums of x over each group, where the weight has a zero and scales act on sums
  int64_t m, block;
  const float* scales = nullptr;   // [k / kScaled, rounded up][m]: of x, for engines whose multiply() takes them
  int64_t first = 0;               // the row that `rows` begins with, a multiple of the block

  // Where the number of a row and column lies; the column is a multiple of 32.
  int64_t at(int64_t row, int64_t k) const {
    return (((row - first) / block * ((weight->k + 31) / 32) + k / 32) * block + row % block) * 32;
  }
};

// A stretch of K of one tile, unpacked: columns [k, k + count), whole steps of 32.
struct Panel {
  int64_t tile, k, count;
  void* data;
};

// Calls work(row, count) on rows from 0 on, cut where a block ends, and between into as few parts of at most `most`, and as
// even ones, as can be.
template <class Work>
void by_few(int64_t rows, int64_t block, int64_t most, const Work& work) {
  for (int64_t row = 0; row < rows;) {
    const int64_t left = smaller(rows - row, block - row % block), count = ceil_div(left, ceil_div(left, most));
    work(row, count);
    row += count;
  }
}

// What multiply() of an engine does with functions for 1, 2 .. rows of x, `stride` numbers apart from one step of 32 columns
// to the next.
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

// How much of a product of many rows is at hand at once (sweep.h), as it was measured for an engine.
struct AtOnce {
  int64_t rows;      // of a part of x
  size_t x_bytes;    // of a span of K of that part, in L2
  int64_t tiles;     // whose sums wait there
  int64_t pieces;    // for each thread, that the parts are cut into which threads share
};
constexpr AtOnce kUsual{128, size_t(1) << 20, 16, 4}, kUsualOfBytes{256, size_t(1) << 20, 16, 4};

struct Engine {
  bool bf16;            // rows and panel in bfloat16, else in float32
  int64_t depth;        // how much of K a panel holds
  AtOnce at_once;
  void (*widen)(const void* from, int32_t type, int64_t count, float* to);
  void (*decode)(const BitportTiles& weight, const Panel& panel);
  void (*look_up)(const BitportTiles& weight, const Panel& panel);   // null: never late
  void (*finish)(const Job& job, int64_t tile, int64_t row, int64_t rows, float* sum);
  // Adds rows [row, row + rows) times the panel to sum, or overwrites it where the panel begins at column 0; row is a
  // multiple of the block.
  void (*multiply)(const Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum);
  // The same, and meanwhile decodes (or looks up, if late) another panel; null: one does not run beside the other.
  void (*multiply_ahead)(const Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum, const Panel& next,
                         bool late);
  bool (*fuses)(const BitportTiles& weight, int64_t m);   // whether to go the fused way; null: never
  // Overwrites sum, of whole blocks of 32 rows; has the memory of four panels.
  void (*fused)(const Job& job, int64_t tile, void* panels, float* sum);
  void (*store)(const float* sum, int64_t count, const float* bias, void* y, int32_t type);   // part of a row
  // 32 numbers of two bytes, a whole line, past the caches; seen by others after end(). null: never
  void (*stream)(const float* sum, const float* bias, void* y, int32_t type);
  void (*begin)();      // once per thread and piece of work; may be null
  void (*end)();
};

// The arguments of bitport_linear or bitport_dyn_linear, checked.
struct Product {
  const BitportTiles& weight;
  const void* x;
  int32_t x_type;
  int64_t m;
  const void* bias;
  void* y;
  int32_t y_type;   // of the bias too
  int32_t threads, isa;
  int32_t then;
  const void* times;
};

// Whether rows of y are whole lines that stay in no L2 anyway: written through it they would drive out x, and sooner where
// they lie a page apart and fall into the same few of its lines.
static inline bool lines_past_caches(const Product& p) {
  const size_t row = size_t(p.weight.n) * 2, stays = size_t(row % 4096 ? 2 : 1) << 20;
  return p.y_type != BITPORT_F32 && row % 64 == 0 && reinterpret_cast<uintptr_t>(p.y) % 64 == 0 && size_t(p.m) * row > stays;
}

// What both ask alike: a Status. Then ``multiply`` is called, itself giving one, unless there is nothing to do.
int32_t check_product(const BitportTiles* w, int32_t x_type, int64_t m, int32_t then, const void* times, int32_t isa);
template <class Multiply>
int32_t multiply_checked(const BitportTiles* w, const void* x, int32_t x_type, int64_t m, const void* bias, int32_t then,
                         const void* times, void* y, int32_t threads, int32_t isa, const Multiply& multiply) {
  if (m == 0 || w->n == 0) return kOk;
  if (!x || !y) return kNullPointer;
  constexpr int64_t kGrain = 1 << 18;   // below this many products a second thread costs more than it gives
  if (threads < 1 || w->n * w->k < kGrain / m) threads = 1;
  return multiply(Product{*w, x, x_type, m, bias, y, x_type, threads, isa < 0 ? bitport_best_isa() : isa, then, times});
}

// The products, each a Status: x as it is; x of floats, each row of sums (with in_blocks those of each kScaled columns)
// still to be multiplied by a number of row_scale, where that is not null; x to be rounded to integers.
int32_t linear_as_is(const Product& product);
int32_t linear_of_floats(const Product& product, const Engine& engine, const float* row_scale, bool in_blocks);
int32_t linear_int8(const Product& product, int32_t act, const float* act_scale);
bool takes_digits(const Product& product);   // few rows of bfloat16, whole numbers
int32_t linear_digits(const Product& product, bool* taken);   // not taken: x is not finite, near the end of the range, or numbers stand out
#if BITPORT_X86
bool fast_bf16();   // whether vdpbf16ps is to be used for more rows than a few
#endif

// The engine for m rows of this type on this instruction set.
const Engine& engine_for(int32_t isa, int32_t x_type, int64_t m);

extern const Engine scalar_engine;
#if BITPORT_X86
extern const Engine avx2_engine, avx512_engine, avx512_bf16_engine, avx512_bf16_blocks_engine, amx_engine, amx_blocks_engine;
#elif BITPORT_ARM
extern const Engine neon_engine, neon_matrix_engine, neon_matrix_blocks_engine;
#endif

}  // namespace bitport
