// The product with 256-bit vectors, in float32: for x of every type on machines without AVX-512. A few rows need no
// panel: values of codes stay in registers, and the scale of a group is applied to its sums.
#include "engine.h"
#if BITPORT_X86
#include "avx2_values.h"

namespace bitport {
namespace {

AVX2_INLINE void widen_as(const void* from, int32_t type, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) _mm256_storeu_ps(to + i, load8(from, type, i));
  for (; i < count; ++i) to[i] = load_number(from, type, i);
}

AVX2 void widen(const void* from, int32_t type, int64_t count, float* to) {
  if (type == BITPORT_BF16) widen_as(from, BITPORT_BF16, count, to);   // a loop without type dispatch
  else widen_as(from, type, count, to);
}

// Scales and shifts of 16 rows, half a tile, in one group.
struct Affine {
  __m256 scale[2], shift[2];
  AVX2_MEMBER Affine(const BitportTiles& w, int64_t tile, int64_t group, int64_t half) {
    const int64_t at = (tile * groups_of(w) + group) * 32 + half * 16;
    for (int i = 0; i < 2; ++i) {
      scale[i] = load8(w.scale, w.scale_type, at + i * 8);
      shift[i] = w.zero ? _mm256_sub_ps(load8(w.zero, w.zero_type, at + i * 8), _mm256_set1_ps(middle(w)))
                        : _mm256_setzero_ps();
    }
  }
};

// 16 columns of 16 rows, two at a time: calls take(i, columns), where i is the first of them.
template <class Meaning, int32_t Bits, Fetch How>
struct Unit {
  const BitportTiles& w;
  const Meaning meaning;

  template <class Take>
  AVX2_MEMBER void each_pair(int64_t tile, int64_t k, int64_t half, const Take& take) const {
    const int32_t bits = Bits ? Bits : w.bits;
    const uint8_t* const codes = tile_at(w, tile, k / 32);
    const int64_t first = half * 8 + k % 32 / 4;
    fetch<How>(codes + first * 8 * bits, 32 * bits);
#pragma GCC unroll 4
    for (int64_t i = 0; i < 4; ++i) {
      const Line line = read_line(codes, bits, first + i);
      take(i * 4, meaning(line.pair[0]));
      take(i * 4 + 2, meaning(line.pair[1]));
    }
  }
};

// panel [count][32]
template <class Meaning, int32_t Bits, Fetch How>
AVX2 void decode_as(const BitportTiles& w, const Panel& panel) {
  const Unit<Meaning, Bits, How> unit{w, Meaning(w)};
  for (int64_t k = panel.k; k < panel.k + panel.count; k += 16)
    for (int64_t half = 0; half < 2; ++half) {
      const Affine by(w, panel.tile, group_of(w, k), half);
      float* const to = static_cast<float*>(panel.data) + (k - panel.k) * 32 + half * 16;
      unit.each_pair(panel.tile, k, half, [&](int64_t i, const Columns& columns) AVX2 {
        for (int64_t c = 0; c < 2; ++c) {
          __m256 rows[2];
          in_order(columns.of[c][0], columns.of[c][1], rows);
          for (int j = 0; j < 2; ++j)
            _mm256_store_ps(to + (i + c) * 32 + j * 8,
                            _mm256_mul_ps(_mm256_sub_ps(rows[j], by.shift[j]), by.scale[j]));
        }
      });
    }
}

// Sums of 16 rows of the weight; with one row of x, even and odd columns have separate sums to hide the latency of
// additions.
template <int R>
struct Sums {
  static constexpr int kApart = R == 1 ? 2 : 1;
  __m256 of[R][kApart][2];
};

// Multiplies R rows of x by a tile, reading codes in memory order: 32 columns of one half of the rows, then of the
// other.
template <int R, class Meaning, int32_t Bits, Fetch How>
AVX2 void multiply_tile(const Job& job, int64_t tile, int64_t row, float* sum) {
  constexpr int kApart = Sums<R>::kApart;
  const BitportTiles& w = *job.weight;
  const Unit<Meaning, Bits, How> unit{w, Meaning(w)};
  const float* const rows = static_cast<const float*>(job.rows) + job.at(row, 0);
  const int64_t summed = summed_columns(w, false), pieces = pieces_of(w, summed);
  for (int64_t i = 0; i < R * 32; ++i) sum[i] = 0;
  for (Pieces piece(w, summed, 0); piece.begin < w.k; piece.next()) {
    Sums<R> sums[2];
    for (Sums<R>& half : sums)
      for (auto& of_row : half.of)
        for (auto& each : of_row) each[0] = each[1] = _mm256_setzero_ps();
    for (int64_t k = piece.begin, last = piece.end < w.k ? piece.end : steps_of(w) * 32; k < last;) {
      const int64_t end = smaller(last, (k / 32 + 1) * 32);
      const float* const step = rows + k / 32 * job.block * 32;
#pragma GCC unroll 1
      for (int64_t half = 0; half < 2; ++half) {
        Sums<R> here = sums[half];
        for (int64_t at = k; at < end; at += 16)
          unit.each_pair(tile, at, half, [&](int64_t i, const Columns& two) AVX2 {
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
              for (int c = 0; c < 2; ++c) {
                const __m256 value = _mm256_broadcast_ss(step + r * 32 + at % 32 + i + c);
                __m256* const to = here.of[r][c % kApart];
                to[0] = _mm256_fmadd_ps(value, two.of[c][0], to[0]);
                to[1] = _mm256_fmadd_ps(value, two.of[c][1], to[1]);
              }
          });
        sums[half] = here;
      }
      k = end;
    }
    for (int64_t half = 0; half < 2; ++half) {
      const Affine by(w, tile, piece.group, half);
      for (int r = 0; r < R; ++r) {
        __m256 (*const all)[2] = sums[half].of[r], found[2];
        for (int j = 0; j < 2 && kApart == 2; ++j) all[0][j] = _mm256_add_ps(all[0][j], all[kApart - 1][j]);
        in_order(all[0][0], all[0][1], found);
        const __m256 less = _mm256_set1_ps(w.zero ? job.sums[(row + r) * pieces + piece.index] : 0);
        for (int j = 0; j < 2; ++j) {
          float* const to = sum + r * 32 + half * 16 + j * 8;
          const __m256 whole = _mm256_fnmadd_ps(less, by.shift[j], found[j]);
          _mm256_store_ps(to, _mm256_fmadd_ps(whole, by.scale[j], _mm256_load_ps(to)));
        }
      }
    }
  }
}

template <int R>
AVX2 void multiply_rows(const float* x, int64_t stride, int64_t steps, const float* panel, float* sum) {
  __m256 a[R][4];
#pragma GCC unroll 3
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) a[r][j] = _mm256_load_ps(sum + r * 32 + j * 8);
  for (int64_t step = 0; step < steps; ++step, x += stride)
    for (int64_t i = 0; i < 32; ++i, panel += 32)
#pragma GCC unroll 3
      for (int r = 0; r < R; ++r) {
        const __m256 value = _mm256_broadcast_ss(x + r * 32 + i);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) a[r][j] = _mm256_fmadd_ps(value, _mm256_load_ps(panel + j * 8), a[r][j]);
      }
#pragma GCC unroll 3
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) _mm256_store_ps(sum + r * 32 + j * 8, a[r][j]);
}

void multiply(const Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum) {
  static constexpr decltype(&multiply_rows<1>) by_rows[] = {multiply_rows<1>, multiply_rows<2>, multiply_rows<3>};
  multiply_few(job, panel, row, rows, sum, by_rows);
}

constexpr int64_t kRows = 4;   // rows of x multiplied at once without a panel

// Functions by the meaning of the codes and the number of rows of x.
struct Ways {
  void (*decode)(const BitportTiles& w, const Panel& panel);
  void (*multiply[kRows])(const Job& job, int64_t tile, int64_t row, float* sum);
};
template <Fetch How, class Meaning, int32_t Bits>
constexpr Ways ways = {decode_as<Meaning, Bits, How>,
                       {multiply_tile<1, Meaning, Bits, How>, multiply_tile<2, Meaning, Bits, How>,
                        multiply_tile<3, Meaning, Bits, How>, multiply_tile<4, Meaning, Bits, How>}};

template <Fetch How>
const Ways& ways_of(const BitportTiles& w) {
  if (w.bits == 8) return w.integer ? ways<How, Whole, 8> : ways<How, Float8, 8>;
  if (w.bits > 4) return w.integer ? ways<How, Whole, 0> : ways<How, Quarters, 6>;
  if (w.bits < 4) return ways<How, Short, 0>;
  uint32_t lower = 0;
  for (int i = 0; i < 16; ++i) lower |= bits_of_float(w.table[i]) & 0xffff;
  return lower ? ways<How, Few, 4> : ways<How, Short, 4>;
}

void decode(const BitportTiles& w, const Panel& panel) {
  with_fetch([&](auto how) { ways_of<how>(w).decode(w, panel); });
}

// Measured: with short groups, loading scales has a cost for every few rows.
bool fuses(const BitportTiles& w, int64_t m) { return m <= (w.group < 32 && w.group < w.k ? kRows : 2 * kRows); }

void fused(const Job& job, int64_t tile, void*, float* sum) {
  with_fetch([&](auto how) {
    const Ways& ways = ways_of<how>(*job.weight);
    by_few(job.m, job.block, kRows, [&](int64_t row, int64_t count) {
      ways.multiply[count - 1](job, tile, row, sum + row * 32);
    });
  });
}

AVX2 void store(const float* sum, int64_t count, const float* bias, void* y, int32_t type) {
  int64_t j = 0;
  for (; j + 8 <= count; j += 8) {
    __m256 v = _mm256_load_ps(sum + j);
    if (bias) v = _mm256_add_ps(v, _mm256_loadu_ps(bias + j));
    if (type == BITPORT_F32) {
      _mm256_storeu_ps(static_cast<float*>(y) + j, v);
    } else {
      const __m128i half = type == BITPORT_BF16 ? bf16_of(v) : _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<uint16_t*>(y) + j), half);
    }
  }
  for (; j < count; ++j) store_number(bias ? sum[j] + bias[j] : sum[j], y, type, j);
}

}  // namespace

const Engine avx2_engine = {false, 256, 0, kUsual, widen, decode, nullptr, nullptr, multiply, nullptr, fuses, fused,
                            store, nullptr, nullptr, nullptr};

}  // namespace bitport
#endif
