// Products of integer weights with x rounded to int8, which are exact in int32:
//   y[r] = scale_r * sum over pieces of scale_w * (sum of (code - center) * x  -  shift * sum of x)  +  bias
// for each output row of the weight. center is the whole number in the middle of the codes; shift is what the zero
// point differs from it. A piece is what integers are summed over: a group, cut where a stretch of K ends.
//
// Rows with a zero point of their own: x = code - zero, and the sum of zero * weight over K is zero times the result
// of one more row, of ones.
#pragma once
#include <numeric>
#include "engine.h"
#include "tiles.h"

namespace bitport {

// What a code of x means: (code - zero) * scale, codes -128 .. 127.
struct Rounding { float scale, zero; };

// Codes of x in blocks [m / block][K / 64][block][64], columns past K 0; the last block may hold fewer rows, the rest
// of it is undefined.
struct Int8Job {
  const BitportTiles* weight;
  int8_t* rows;
  const float* sums;       // [pieces][m], of the codes; exact
  int64_t m, block, stretch;
  int64_t first = 0;       // the row that `rows` begins with, a multiple of the block
};

constexpr int64_t kInt8Step = 64;              // columns
constexpr int64_t kInt32Columns = 1 << 16;     // sums of 128 * 128 over as many and more fit into int32

static inline int64_t int8_steps(const BitportTiles& w) { return ceil_div(w.k, kInt8Step); }

// The pieces of a row from a column on, one after another: what a walk needs no division for.
struct Pieces {
  const int64_t length, stretch, k;
  int64_t index, group, begin, end;   // index: among those of the row

  // column: where a piece begins
  Pieces(const BitportTiles& w, int64_t stretch, int64_t column)
      : length(w.group < w.k ? w.group : w.k), stretch(stretch), k(w.k), index(count(length, stretch, column)),
        group(length ? column / length : 0), begin(column), next_group((group + 1) * length),
        next_stretch((column / stretch + 1) * stretch) {
    cut();
  }
  void next() {
    if (end == next_group) { ++group; next_group += length; }
    if (end == next_stretch) next_stretch += stretch;
    begin = end;
    ++index;
    cut();
  }

  // Pieces that begin before a column: a multiple of one length, or of the other, or of both.
  static int64_t count(int64_t length, int64_t stretch, int64_t column) {
    if (!column || length % stretch == 0) return ceil_div(column, stretch);
    if (stretch % length == 0) return ceil_div(column, length);
    return ceil_div(column, length) + ceil_div(column, stretch) - ceil_div(column, std::lcm(length, stretch));
  }

 private:
  int64_t next_group, next_stretch;
  void cut() {
    const int64_t first = next_group < next_stretch ? next_group : next_stretch;
    end = first < k ? first : k;
  }
};

static inline int64_t pieces_of(const BitportTiles& w, int64_t stretch) {
  return Pieces::count(w.group < w.k ? w.group : w.k, stretch, w.k);
}

// One bit has no code in the middle: -1/2 and 1/2.
static inline int32_t center(const BitportTiles& w) { return w.bits == 1 ? 0 : 1 << (w.bits - 1); }
static inline bool has_shift(const BitportTiles& w) { return w.zero || w.bits == 1; }

static inline const int8_t* codes_at(const Int8Job& job, int64_t row, int64_t k) {
  const int64_t step = (row - job.first) / job.block * int8_steps(*job.weight) + k / kInt8Step;
  return job.rows + (step * job.block + row % job.block) * kInt8Step + k % kInt8Step;
}

// Sums of the codes over one piece: of a row, and behind it of the next ones.
static inline const float* sums_at(const Int8Job& job, int64_t row, int64_t piece) { return job.sums + piece * job.m + row; }

struct Int8Engine {
  int64_t stretch;    // columns whose unpacked codes lie in L1 at once
  int64_t item;       // bytes of a code in a panel
  AtOnce at_once;
  // Smallest and largest number, 0 included; NaN if one is.
  void (*range)(const void* x, int32_t type, int64_t count, float* low, float* high);
  // Codes of `count` numbers, in steps of 64 that lie `next` bytes apart; a multiple of 16 is written, filled up with
  // 0. from: place of the first in its step, a multiple of 16. Returns their sum.
  int32_t (*round)(const void* x, int32_t type, int64_t count, Rounding rounding, int8_t* to, int64_t from,
                   int64_t next);
  bool (*fuses)(const BitportTiles& weight, int64_t m);
  // Few rows (one, at least): sum [m][32] is overwritten.
  void (*fused)(const Int8Job& job, int64_t tile, void* panel, float* sum);
  // Many rows: the codes of a panel are unpacked, then multiplied with rows of x and added to sum, which a panel from
  // column 0 overwrites; row is a multiple of the block. A panel begins at a whole step of 64 columns and may end within one, at the last column.
  void (*unpack)(const BitportTiles& weight, const Panel& panel);
  void (*multiply)(const Int8Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum);
  // The same, and meanwhile unpacks another panel; null: one does not run beside the other.
  void (*multiply_ahead)(const Int8Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum,
                         const Panel& next);
  // Where groups are whole rows sums may stay int32, and become float32 at the end; null: never.
  bool (*stays_int)(const BitportTiles& weight);
  void (*settle)(const Int8Job& job, int64_t tile, int64_t row, int64_t rows, float* sum);
  // y = (sum - zero * ones) * scale + bias, for part of a row; ones and bias may be null.
  // stream: y is a whole aligned line that may go past the caches (see linear.cpp).
  void (*finish)(float* sum, const float* ones, Rounding rounding, int64_t count, const float* bias, void* y,
                 int32_t type, bool stream);
  bool streams;   // finish() knows how, and end() orders it
  void (*begin)(const BitportTiles& weight);   // once per thread and piece of work; may be null
  void (*end)();
};

// How the numbers of a range are rounded.
Rounding rounding_of(float low, float high, int32_t type, int32_t act);

const Int8Engine& int8_engine_for(int32_t isa, const BitportTiles& weight);

extern const Int8Engine scalar_int8_engine;
#if BITPORT_X86
extern const Int8Engine avx2_int8_engine, avx512_int8_engine, amx_int8_engine;
#elif BITPORT_ARM
extern const Int8Engine neon_int8_engine, neon_dot_int8_engine, neon_matrix_int8_engine;
#endif

}  // namespace bitport
