// The product with 128-bit vectors, in float32. A few rows need no panel: values of codes stay in registers, and the
// scale of a group is applied to its sums.
#include "engine.h"
#if BITPORT_ARM
#include "neon_values.h"

namespace bitport {
namespace {

// panel [count][32]
template <class Meaning, int32_t Bits>
void decode_as(const BitportTiles& w, const Panel& panel) {
  const Lines<Meaning, Bits> lines(w);
  for (int64_t k = panel.k; k < panel.k + panel.count; k += 16)
    for (int64_t half = 0; half < 2; ++half) {
      const Affine by(w, panel.tile, group_of(w, k), half);
      float* to = static_cast<float*>(panel.data) + (k - panel.k) * 32 + half * 16;
      for (int64_t i = 0; i < 4; ++i, to += 128) {
        const Columns columns = lines(tile_at(w, panel.tile, k / 32), first_line(k, half) + i);
        for (int c = 0; c < 4; ++c)
          for (int j = 0; j < 4; ++j)
            vst1q_f32(to + c * 32 + j * 4, vmulq_f32(vsubq_f32(columns.of[c].v[j], by.shift[j]), by.scale[j]));
      }
    }
}

// Multiplies rows of x, where lane c of x is column c, by 4 columns.
template <int C, int R>
NEON_INLINE void add_column(const Column& column, const float32x4_t (&x)[R], float32x4_t (&sum)[R][4]) {
  for (int j = 0; j < 4; ++j)
    for (int r = 0; r < R; ++r) sum[r][j] = vfmaq_laneq_f32(sum[r][j], column.v[j], x[r], C);
}
template <int R>
NEON_INLINE void add_columns(const Columns& columns, const float32x4_t (&x)[R], float32x4_t (&sum)[R][4]) {
  add_column<0>(columns.of[0], x, sum);
  add_column<1>(columns.of[1], x, sum);
  add_column<2>(columns.of[2], x, sum);
  add_column<3>(columns.of[3], x, sum);
}

// Multiplies R rows of x by a tile, reading codes in memory order: 32 columns of one half of the rows, then of the
// other.
template <int R, class Meaning, int32_t Bits>
void multiply_tile(const Job& job, int64_t tile, int64_t row, float* sum) {
  struct Half { float32x4_t of[R][4]; };
  const BitportTiles& w = *job.weight;
  const Lines<Meaning, Bits> lines(w);
  const float* const rows = static_cast<const float*>(job.rows) + job.at(row, 0);
  const int64_t summed = summed_columns(w, false), pieces = pieces_of(w, summed);
  for (int64_t i = 0; i < R * 32; ++i) sum[i] = 0;
  for (Pieces piece(w, summed, 0); piece.begin < w.k; piece.next()) {
    Half halves[2];
    for (Half& half : halves)
      for (auto& of_row : half.of)
        for (float32x4_t& v : of_row) v = vdupq_n_f32(0);
    for (int64_t k = piece.begin, piece_end = piece.end < w.k ? piece.end : steps_of(w) * 32; k < piece_end;) {
      const int64_t end = smaller(piece_end, (k / 32 + 1) * 32);
      const uint8_t* const codes = tile_at(w, tile, k / 32);
      const float* const step = rows + k / 32 * job.block * 32;
      for (int64_t half = 0; half < 2; ++half) {
        Half here = halves[half];
        for (int64_t at = k % 32, last = at + end - k; at < last; at += 4) {
          float32x4_t x[R];
          for (int r = 0; r < R; ++r) x[r] = vld1q_f32(step + r * 32 + at);
          add_columns(lines(codes, first_line(at, half)), x, here.of);
        }
        halves[half] = here;
      }
      k = end;
    }
    for (int64_t half = 0; half < 2; ++half) {
      const Affine by(w, tile, piece.group, half);
      for (int r = 0; r < R; ++r) {
        const float32x4_t less = vdupq_n_f32(w.zero ? job.sums[(row + r) * pieces + piece.index] : 0);
        for (int j = 0; j < 4; ++j) {
          float* const to = sum + r * 32 + half * 16 + j * 4;
          const float32x4_t found = vfmsq_f32(halves[half].of[r][j], less, by.shift[j]);
          vst1q_f32(to, vfmaq_f32(vld1q_f32(to), found, by.scale[j]));
        }
      }
    }
  }
}

// Multiplies R rows of x, with steps of 32 columns `stride` elements apart, by a panel.
template <int R>
void multiply_rows(const float* x, int64_t stride, int64_t steps, const float* panel, float* sum) {
  for (int64_t half = 0; half < 2; ++half) {
    float* const to = sum + half * 16;
    float32x4_t a[R][4];
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < 4; ++j) a[r][j] = vld1q_f32(to + r * 32 + j * 4);
    const float* weights = panel + half * 16;
    for (int64_t step = 0; step < steps; ++step)
      for (int64_t i = 0; i < 32; i += 4, weights += 128) {
        Columns columns;
        for (int c = 0; c < 4; ++c)
          for (int j = 0; j < 4; ++j) columns.of[c].v[j] = vld1q_f32(weights + c * 32 + j * 4);
        float32x4_t numbers[R];
        for (int r = 0; r < R; ++r) numbers[r] = vld1q_f32(x + step * stride + r * 32 + i);
        add_columns(columns, numbers, a);
      }
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < 4; ++j) vst1q_f32(to + r * 32 + j * 4, a[r][j]);
  }
}

void multiply(const Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum) {
  static constexpr decltype(&multiply_rows<1>) by_rows[kNeonRows] = {multiply_rows<1>, multiply_rows<2>, multiply_rows<3>,
                                                                     multiply_rows<4>};
  multiply_few(job, panel, row, rows, sum, by_rows);
}

// Functions by the number of rows of x.
struct Ways {
  void (*decode)(const BitportTiles& w, const Panel& panel);
  void (*multiply[kNeonRows])(const Job& job, int64_t tile, int64_t row, float* sum);
};
template <class Meaning, int32_t Bits>
struct OfCodes {
  static constexpr Ways ways = {decode_as<Meaning, Bits>,
                                {multiply_tile<1, Meaning, Bits>, multiply_tile<2, Meaning, Bits>,
                                 multiply_tile<3, Meaning, Bits>, multiply_tile<4, Meaning, Bits>}};
};

void decode(const BitportTiles& w, const Panel& panel) { ways_of<OfCodes>(w).decode(w, panel); }

bool fuses(const BitportTiles&, int64_t m) { return m <= kNeonRows; }

void fused(const Job& job, int64_t tile, void*, float* sum) {
  ways_of<OfCodes>(*job.weight).multiply[job.m - 1](job, tile, 0, sum);
}

}  // namespace

void neon_widen(const void* from, int32_t type, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) vst1q_f32(to + i, load4(from, type, i));
  for (; i < count; ++i) to[i] = load_number(from, type, i);
}

void neon_store(const float* sum, int64_t count, const float* bias, void* y, int32_t type) {
  int64_t j = 0;
  for (; j + 4 <= count; j += 4) {
    const float32x4_t v = vld1q_f32(sum + j);
    store4(bias ? vaddq_f32(v, vld1q_f32(bias + j)) : v, y, type, j);
  }
  for (; j < count; ++j) store_number(bias ? sum[j] + bias[j] : sum[j], y, type, j);
}

const Engine neon_engine = {false, 128, 0, kUsual, neon_widen, decode, nullptr, nullptr, multiply, nullptr, fuses, fused,
                            neon_store, nullptr, nullptr, nullptr};

}  // namespace bitport
#endif
