// The product with 128-bit vectors, in float32. A few rows go without a panel: what codes mean stays in registers, and
// the scale of a group acts on its sums.
#include "engine.h"
#if BITPORT_ARM
#include "neon.h"

namespace bitport {
namespace {

constexpr int64_t kRows = 4;   // of x that are multiplied at once: with 16 rows of the weight, 16 registers of sums

void widen(const void* from, int32_t type, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) vst1q_f32(to + i, load4(from, type, i));
  for (; i < count; ++i) to[i] = load_number(from, type, i);
}

struct Column { float32x4_t v[4]; };   // of 16 rows

// What codes mean. Whole numbers: a byte less the center goes to the top of a word, which is then converted with 24
// bits behind the point.
struct Whole {
  uint8x16_t center, places[4];
  explicit Whole(const BitportTiles& w) : center(vdupq_n_u8(uint8_t(1 << (w.bits - 1)))) {
    const uint32_t first[] = {0x00ffffff, 0x01ffffff, 0x02ffffff, 0x03ffffff};   // a byte outside the 16 gives 0
    for (uint32_t i = 0; i < 4; ++i)
      places[i] = vreinterpretq_u8_u32(vaddq_u32(vld1q_u32(first), vdupq_n_u32(i << 26)));
  }
  NEON_MEMBER Column operator()(uint8x16_t codes) const {
    const uint8x16_t bytes = vsubq_u8(codes, center);
    Column found;
    for (int i = 0; i < 4; ++i)
      found.v[i] = vcvtq_n_f32_s32(vreinterpretq_s32_u8(vqtbl1q_u8(bytes, places[i])), 24);
    return found;
  }
};

// Up to 16 numbers: each of their four bytes is looked up.
struct Few {
  uint8x16x4_t bytes;
  explicit Few(const BitportTiles& w) {
    float numbers[16];
    for (int i = 0; i < 16; ++i) numbers[i] = w.table[i & ((1 << w.bits) - 1)];
    bytes = vld4q_u8(reinterpret_cast<const uint8_t*>(numbers));
  }
  NEON_MEMBER Column operator()(uint8x16_t codes) const {
    const uint8x16_t first = vqtbl1q_u8(bytes.val[0], codes), second = vqtbl1q_u8(bytes.val[1], codes);
    const uint8x16_t third = vqtbl1q_u8(bytes.val[2], codes), fourth = vqtbl1q_u8(bytes.val[3], codes);
    const auto words = [](uint8x16_t v) INLINED { return vreinterpretq_u16_u8(v); };
    const auto zipped = [](uint16x8_t low, uint16x8_t high, Column& to, int at) INLINED {
      to.v[at] = vreinterpretq_f32_u16(vzip1q_u16(low, high));
      to.v[at + 1] = vreinterpretq_f32_u16(vzip2q_u16(low, high));
    };
    Column found;
    zipped(words(vzip1q_u8(first, second)), words(vzip1q_u8(third, fourth)), found, 0);
    zipped(words(vzip2q_u8(first, second)), words(vzip2q_u8(third, fourth)), found, 2);
    return found;
  }
};

struct Many {
  const float* table;
  explicit Many(const BitportTiles& w) : table(w.table) {}
  NEON_MEMBER Column operator()(uint8x16_t codes) const {
    uint8_t each[16];
    float numbers[16];
    vst1q_u8(each, codes);
    for (int i = 0; i < 16; ++i) numbers[i] = table[each[i]];
    return {{vld1q_f32(numbers), vld1q_f32(numbers + 4), vld1q_f32(numbers + 8), vld1q_f32(numbers + 12)}};
  }
};

// Scales and shifts of 16 rows, a half of a tile, in one group.
struct Affine {
  float32x4_t scale[4], shift[4];
  Affine(const BitportTiles& w, int64_t tile, int64_t group, int64_t half) {
    const int64_t at = (tile * groups_of(w) + group) * 32 + half * 16;
    for (int i = 0; i < 4; ++i) {
      scale[i] = load4(w.scale, w.scale_type, at + i * 4);
      shift[i] = w.zero ? vsubq_f32(load4(w.zero, w.zero_type, at + i * 4), vdupq_n_f32(middle(w))) : vdupq_n_f32(0);
    }
  }
};

// 16 columns of 16 rows, 4 at a time: take(i, columns).
template <class Meaning, int32_t Bits>
struct Unit {
  const BitportTiles& w;
  const Meaning meaning;

  template <class Take>
  NEON_MEMBER void each_line(int64_t tile, int64_t k, int64_t half, const Take& take) const {
    const uint8_t* const codes = tile_at(w, tile, k / 32);
    for (int64_t i = 0; i < 4; ++i) {
      const Line line = read_line(codes, Bits ? Bits : w.bits, half * 8 + k % 32 / 4 + i);
      take(i, {meaning(vuzp1q_u8(line.v[0], line.v[1])), meaning(vuzp2q_u8(line.v[0], line.v[1])),
                           meaning(vuzp1q_u8(line.v[2], line.v[3])), meaning(vuzp2q_u8(line.v[2], line.v[3]))});
    }
  }
};

// panel [count][32]
template <class Meaning, int32_t Bits>
void decode_as(const BitportTiles& w, const Panel& panel) {
  const Unit<Meaning, Bits> unit{w, Meaning(w)};
  for (int64_t k = panel.k; k < panel.k + panel.count; k += 16)
    for (int64_t half = 0; half < 2; ++half) {
      const Affine by(w, panel.tile, group_of(w, k), half);
      float* const to = static_cast<float*>(panel.data) + (k - panel.k) * 32 + half * 16;
      unit.each_line(panel.tile, k, half, [&](int64_t i, const Column (&columns)[4]) INLINED {
        for (int c = 0; c < 4; ++c)
          for (int j = 0; j < 4; ++j)
            vst1q_f32(to + (i * 4 + c) * 32 + j * 4, vmulq_f32(vsubq_f32(columns[c].v[j], by.shift[j]), by.scale[j]));
      });
    }
}

// Rows of x, of which lane c of x is column c, times 4 columns.
template <int C, int R>
NEON_INLINE void add_column(const Column& column, const float32x4_t (&x)[R], float32x4_t (&sum)[R][4]) {
  for (int j = 0; j < 4; ++j)
    for (int r = 0; r < R; ++r) sum[r][j] = vfmaq_laneq_f32(sum[r][j], column.v[j], x[r], C);
}
template <int R>
NEON_INLINE void add_columns(const Column (&columns)[4], const float32x4_t (&x)[R], float32x4_t (&sum)[R][4]) {
  add_column<0>(columns[0], x, sum);
  add_column<1>(columns[1], x, sum);
  add_column<2>(columns[2], x, sum);
  add_column<3>(columns[3], x, sum);
}

// R rows of x times a tile.
template <int R, class Meaning, int32_t Bits>
void multiply_tile(const Job& job, int64_t tile, int64_t row, float* sum) {
  const BitportTiles& w = *job.weight;
  const Unit<Meaning, Bits> unit{w, Meaning(w)};
  const int64_t columns = steps_of(w) * 32, groups = groups_of(w);
  constexpr int64_t kStretch = 256;   // columns of one half of the rows, then of the other, while their lines are near
  for (int64_t i = 0; i < R * 32; ++i) sum[i] = 0;
  for (int64_t k = 0, end; k < columns; k = end) {
    const int64_t group = group_of(w, k);
    const int64_t group_end = group + 1 < groups ? (group + 1) * w.group : columns;
    end = smaller(k + kStretch, group_end);
    for (int64_t half = 0; half < 2; ++half) {
      const Affine by(w, tile, group, half);
      float32x4_t part[R][4];
      for (auto& of_row : part)
        for (float32x4_t& v : of_row) v = vdupq_n_f32(0);
      for (int64_t at = k; at < end; at += 16) {
        const float* const numbers = static_cast<const float*>(job.rows) + job.at(row, at / 32 * 32) + at % 32;
        unit.each_line(tile, at, half, [&](int64_t i, const Column (&four)[4]) INLINED {
          float32x4_t x[R];
          for (int r = 0; r < R; ++r) x[r] = vld1q_f32(numbers + r * 32 + i * 4);
          add_columns(four, x, part);
        });
      }
      for (int r = 0; r < R; ++r) {
        const float32x4_t less = vdupq_n_f32(w.zero && end == group_end ? job.sums[(row + r) * groups + group] : 0);
        for (int j = 0; j < 4; ++j) {
          float* const to = sum + r * 32 + half * 16 + j * 4;
          const float32x4_t found = w.zero ? vfmsq_f32(part[r][j], less, by.shift[j]) : part[r][j];
          vst1q_f32(to, vfmaq_f32(vld1q_f32(to), found, by.scale[j]));
        }
      }
    }
  }
}

// R rows of x, `stride` apart from one step of 32 columns to the next, times a panel.
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
        Column columns[4];
        for (int c = 0; c < 4; ++c)
          for (int j = 0; j < 4; ++j) columns[c].v[j] = vld1q_f32(weights + c * 32 + j * 4);
        float32x4_t numbers[R];
        for (int r = 0; r < R; ++r) numbers[r] = vld1q_f32(x + step * stride + r * 32 + i);
        add_columns(columns, numbers, a);
      }
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < 4; ++j) vst1q_f32(to + r * 32 + j * 4, a[r][j]);
  }
}

void multiply(const Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum) {
  if (panel.k == 0) std::memset(sum, 0, size_t(rows) * 128);
  constexpr decltype(&multiply_rows<1>) by_rows[kRows] = {multiply_rows<1>, multiply_rows<2>, multiply_rows<3>,
                                                          multiply_rows<4>};
  by_few(rows, job.block, kRows, [&](int64_t r, int64_t count) {
    const float* x = static_cast<const float*>(job.rows) + job.at(row + r, panel.k);
    by_rows[count - 1](x, job.block * 32, panel.count / 32, static_cast<const float*>(panel.data), sum + r * 32);
  });
}

// By what codes of a weight mean, and by rows of x.
struct Ways {
  void (*decode)(const BitportTiles& w, const Panel& panel);
  void (*multiply[kRows])(const Job& job, int64_t tile, int64_t row, float* sum);
};
template <class Meaning, int32_t Bits>
constexpr Ways ways = {decode_as<Meaning, Bits>,
                       {multiply_tile<1, Meaning, Bits>, multiply_tile<2, Meaning, Bits>,
                        multiply_tile<3, Meaning, Bits>, multiply_tile<4, Meaning, Bits>}};

const Ways& ways_of(const BitportTiles& w) {
  if (w.integer && w.bits > 1) return w.bits == 4 ? ways<Whole, 4> : w.bits == 8 ? ways<Whole, 8> : ways<Whole, 0>;
  return w.bits == 4 ? ways<Few, 4> : w.bits < 4 ? ways<Few, 0> : ways<Many, 0>;
}

void decode(const BitportTiles& w, const Panel& panel) { ways_of(w).decode(w, panel); }

bool fuses(const BitportTiles&, int64_t m) { return m <= kRows; }

void fused(const Job& job, int64_t tile, void*, float* sum) {
  ways_of(*job.weight).multiply[job.m - 1](job, tile, 0, sum);
}

void store(const float* sum, int64_t count, const float* bias, void* y, int32_t type) {
  int64_t j = 0;
  for (; j + 4 <= count; j += 4) {
    const float32x4_t v = vld1q_f32(sum + j);
    store4(bias ? vaddq_f32(v, vld1q_f32(bias + j)) : v, y, type, j);
  }
  for (; j < count; ++j) store_number(bias ? sum[j] + bias[j] : sum[j], y, type, j);
}

}  // namespace

const Engine neon_engine = {false, 128, kUsual, widen, decode, nullptr, nullptr, multiply, nullptr, fuses, fused,
                            store, nullptr, nullptr, nullptr};

}  // namespace bitport
#endif
