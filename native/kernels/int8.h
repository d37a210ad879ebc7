// Products of integer weights with x rounded to int8, exact in int32:
//   y[r] = scale_r * sum over pieces of scale_w * (sum of (code - center) * x  -  shift * sum of x)  +  bias
// for each output row of the weight. center is the integer in the middle of the code range; shift is the zero point minus
// center. A piece is a range of columns summed as integers: a group, split where a stretch of K ends.
//
// Rows with a zero point of their own: x = code - zero, and the sum of zero * weight over K is zero times the result
// for an additional row of ones.
#pragma once
#include "engine.h"
#include "tiles.h"

namespace bitport {

// The value of a code of x is (code - zero) * scale, with codes -128 .. 127.
struct Rounding { float scale, zero; };

// Codes of x in blocks [m / block][K / 64][block][64], columns past K are 0; the last block may hold fewer rows, the
// rest of it is undefined.
struct Int8Job {
  const BitportTiles* weight;
  int8_t* rows;
  const float* sums;       // [pieces][m], of the codes; exact
  int64_t m, block, stretch;
  int64_t first = 0;       // the row that `rows` begins with
};

constexpr int64_t kInt8Step = 64;              // columns
constexpr int64_t kInt32Columns = 1 << 16;     // sums of 128 * 128 over this many columns fit into int32

static inline int64_t int8_steps(const BitportTiles& w) { return ceil_div(w.k, kInt8Step); }

// 1-bit codes have no middle code: they mean -1/2 and 1/2.
static inline int32_t center(const BitportTiles& w) { return w.bits == 1 ? 0 : 1 << (w.bits - 1); }
static inline bool has_shift(const BitportTiles& w) { return w.zero || w.bits == 1; }

static inline const int8_t* codes_at(const Int8Job& job, int64_t row, int64_t k) {
  const int64_t r = row - job.first, step = r / job.block * int8_steps(*job.weight) + k / kInt8Step;
  return job.rows + (step * job.block + r % job.block) * kInt8Step + k % kInt8Step;
}

// Sums of the codes over one piece, for a row and those after it.
static inline const float* sums_at(const Int8Job& job, int64_t row, int64_t piece) { return job.sums + piece * job.m + row; }

struct Int8Engine {
  int64_t stretch;    // columns of a panel
  int64_t item;       // bytes of a code in a panel
  int64_t passing;    // rows of x in registers, for pass.h; 0: sweep.h, with
  AtOnce at_once;
  // The smallest and largest of the numbers and 0; NaN if a number is NaN.
  void (*range)(const void* x, int32_t type, int64_t count, float* low, float* high);
  // Writes the codes of `count` numbers, in steps of 64 that are `next` bytes apart, padded with 0 to a multiple of 16.
  // from: position of the first in its step, a multiple of 16. Returns the sum of the codes.
  int32_t (*round)(const void* x, int32_t type, int64_t count, Rounding rounding, int8_t* to, int64_t from,
                   int64_t next);
  bool (*fuses)(const BitportTiles& weight, int64_t m);
  // Few rows (always including one): overwrites sum [m][32].
  void (*fused)(const Int8Job& job, int64_t tile, void* panel, float* sum);
  // Many rows: a panel of codes is unpacked, then multiplied by rows of x and added to sum, which a panel from column 0
  // overwrites; row begins a block. A panel begins at a multiple of 64 columns and may end within a step
  // only at the last column.
  void (*unpack)(const BitportTiles& weight, const Panel& panel);
  void (*multiply)(const Int8Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum);
  // The same, while unpacking another panel; null: the engine cannot overlap the two.
  void (*multiply_ahead)(const Int8Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum,
                         const Panel& next);
  // If a group is a whole row, sums may stay int32 until settle() converts them to float32; null: never.
  bool (*stays_int)(const BitportTiles& weight);
  void (*settle)(const Int8Job& job, int64_t tile, int64_t row, int64_t rows, float* sum);
  // y = (sum - zero * ones) * scale + bias, for part of a row; ones and bias may be null. stream: y is a full aligned
  // cache line that may be stored non-temporally (see lines_past_caches).
  void (*finish)(float* sum, const float* ones, Rounding rounding, int64_t count, const float* bias, void* y,
                 int32_t type, bool stream);
  bool streams;   // finish() supports stream, and end() fences these stores
  void (*begin)(const BitportTiles& weight);   // once per thread and work item; may be null
  void (*end)();
};

// The scale and zero point for numbers in the range low .. high.
Rounding rounding_of(float low, float high, int32_t type, int32_t act);

const Int8Engine& int8_engine_for(int32_t isa, const BitportTiles& weight);

extern const Int8Engine scalar_int8_engine;
#if BITPORT_X86
extern const Int8Engine avx2_int8_engine, avx512_int8_engine, amx_int8_engine;
#elif BITPORT_ARM
extern const Int8Engine neon_int8_engine, neon_dot_int8_engine, neon_matrix_int8_engine;
#endif

}  // namespace bitport
