// Many rows of bfloat16 by bfmmla: two rows of x times two of the weight, four columns at a time.
#include "engine.h"
#if BITPORT_ARM
#include "neon_values.h"
#define TARGET __attribute__((target("arch=armv8.6-a")))

namespace bitport {
namespace {

// A panel, [columns / 4][16 pairs of rows][2 rows][4 columns]: the second operand of bfmmla.
constexpr int64_t kDepth = 256, kPair = 8, kColumns = 16 * kPair;

// Scaled or unscaled.
template <class Meaning, int32_t Bits, bool Scaled>
TARGET void decode_as(const BitportTiles& w, const Panel& panel) {
  const Lines<Meaning, Bits> lines(w);
  for (int64_t k = panel.k; k < panel.k + panel.count; k += 16)
    for (int64_t half = 0; half < 2; ++half) {
      const Affine by(w, panel.tile, group_of(w, k), half);
      uint16_t* to = static_cast<uint16_t*>(panel.data) + (k - panel.k) / 4 * kColumns + half * 8 * kPair;
      for (int64_t i = 0; i < 4; ++i, to += kColumns) {
        const Columns columns = lines(tile_at(w, panel.tile, k / 32), first_line(k, half) + i);
        for (int j = 0; j < 4; j += 2) {
          uint16x8x4_t rows;   // four columns of eight rows, stored row by row
          for (int c = 0; c < 4; ++c) {
            float32x4_t v[2];
            for (int l = 0; l < 2; ++l) {
              v[l] = columns.of[c].v[j + l];
              if (Scaled) v[l] = vmulq_f32(vsubq_f32(v[l], by.shift[j + l]), by.scale[j + l]);
            }
            rows.val[c] = vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(v[0]), v[1]));
          }
          vst4q_u16(to + j * 2 * kPair, rows);
        }
      }
    }
}

using Unpack = void (*)(const BitportTiles& w, const Panel& panel);
template <class Meaning, int32_t Bits>
struct Scaled { static constexpr Unpack ways = decode_as<Meaning, Bits, true>; };
template <class Meaning, int32_t Bits>
struct AsTheyAre { static constexpr Unpack ways = decode_as<Meaning, Bits, false>; };

void decode(const BitportTiles& w, const Panel& panel) { ways_of<Scaled>(w)(w, panel); }
void look_up(const BitportTiles& w, const Panel& panel) { ways_of<AsTheyAre>(w)(w, panel); }

// Multiplies R rows of x, with steps of 32 columns `stride` elements apart, by a panel.
template <int R>
TARGET void multiply_rows(const uint16_t* x, int64_t stride, int64_t steps, const uint16_t* panel, float* sum) {
  using P = Pairs<R>;
  for (int64_t half = 0; half < 2; ++half) {
    float* const to = sum + half * 16;
    float32x4_t sums[P::kCount][8];   // two rows of x by two of the weight
    for (int p = 0; p < P::kCount; ++p)
      for (int j = 0; j < 8; ++j)
        sums[p][j] = vcombine_f32(vld1_f32(to + 2 * p * 32 + j * 2), vld1_f32(to + P::second(p) * 32 + j * 2));
    const uint16_t* weights = panel + half * 8 * kPair;
    for (int64_t step = 0; step < steps; ++step)
      for (int64_t i = 0; i < 32; i += 8, weights += 2 * kColumns) {
        bfloat16x8_t pairs[2][P::kCount];   // of rows, for four columns and the next four
        for (int p = 0; p < P::kCount; ++p) {
          const uint16_t* const at = x + step * stride + i;
          const uint64x2_t first = vreinterpretq_u64_u16(vld1q_u16(at + 2 * p * 32));
          const uint64x2_t second = vreinterpretq_u64_u16(vld1q_u16(at + P::second(p) * 32));
          pairs[0][p] = vreinterpretq_bf16_u64(vzip1q_u64(first, second));
          pairs[1][p] = vreinterpretq_bf16_u64(vzip2q_u64(first, second));
        }
        for (int c = 0; c < 2; ++c)
          for (int j = 0; j < 8; ++j) {
            const bfloat16x8_t weight = vreinterpretq_bf16_u16(vld1q_u16(weights + c * kColumns + j * kPair));
            for (int p = 0; p < P::kCount; ++p) sums[p][j] = vbfmmlaq_f32(sums[p][j], pairs[c][p], weight);
          }
      }
    for (int p = 0; p < P::kCount; ++p)
      for (int j = 0; j < 8; ++j) {
        vst1_f32(to + P::second(p) * 32 + j * 2, vget_high_f32(sums[p][j]));
        vst1_f32(to + 2 * p * 32 + j * 2, vget_low_f32(sums[p][j]));
      }
  }
}

constexpr decltype(&multiply_rows<1>) kByRows[kNeonRows] = {multiply_rows<1>, multiply_rows<2>, multiply_rows<3>,
                                                            multiply_rows<4>};

void multiply(const Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum) {
  multiply_few(job, panel, row, rows, sum, kByRows);
}

void finish(const Job& job, int64_t tile, int64_t row, int64_t rows, float* sum) {
  const BitportTiles& w = *job.weight;
  for (int64_t half = 0; half < 2; ++half) {
    const Affine by(w, tile, 0, half);
    for (int64_t r = 0; r < rows; ++r) {
      const float32x4_t less = vdupq_n_f32(w.zero ? job.sums[row + r] : 0);
      for (int j = 0; j < 4; ++j) {
        float* const at = sum + r * 32 + half * 16 + j * 4;
        vst1q_f32(at, vmulq_f32(vfmsq_f32(vld1q_f32(at), less, by.shift[j]), by.scale[j]));
      }
    }
  }
}

// If x has a scale per 128 columns, it is applied to the sums over them, and so is the scale of the weight if it is
// constant there: products with either would be rounded once more. The scales of the weight, or ones, follow the panel.
float* scales_of(const Panel& panel) { return reinterpret_cast<float*>(static_cast<uint16_t*>(panel.data) + kDepth * 32); }

void decode_blocks(const BitportTiles& w, const Panel& panel) {
  float* scale = scales_of(panel);
  const bool apart = scales_act_on_blocks(w);
  (apart ? look_up : decode)(w, panel);
  for (int64_t k = panel.k; k < panel.k + panel.count; k += kScaled)
    for (int64_t half = 0; half < 2; ++half) {
      const Affine by(w, panel.tile, group_of(w, k), half);
      for (int j = 0; j < 4; ++j, scale += 4) vst1q_f32(scale, apart ? by.scale[j] : vdupq_n_f32(1));
    }
}

void multiply_blocks(const Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum) {
  const uint16_t* values = static_cast<const uint16_t*>(panel.data);
  const float* scale = scales_of(panel);
  if (panel.k == 0) std::memset(sum, 0, size_t(rows) * 128);
  for (int64_t k = panel.k, end = k + panel.count; k < end; k += kScaled, values += kScaled * 32, scale += 32)
    by_few(rows, job.block, kNeonRows, [&](int64_t r, int64_t count) {
      float part[kNeonRows * 32] = {};
      const uint16_t* x = static_cast<const uint16_t*>(job.rows) + job.at(row + r, k);
      kByRows[count - 1](x, job.block * 32, smaller(end - k, kScaled) / 32, values, part);
      for (int64_t i = 0; i < count; ++i) {
        const float own = job.scales[k / kScaled * job.m + row + r + i];
        for (int64_t j = 0; j < 32; ++j) sum[(r + i) * 32 + j] += part[i * 32 + j] * (scale[j] * own);
      }
    });
}

}  // namespace

const Engine neon_matrix_engine = {true, kDepth, 0, kUsual, neon_widen, decode, look_up, finish, multiply, nullptr, nullptr,
                                   nullptr, neon_store, nullptr, nullptr, nullptr};
const Engine neon_matrix_blocks_engine = {true, kDepth, 0, kUsual, neon_widen, decode_blocks, nullptr, nullptr, multiply_blocks,
                                          nullptr, nullptr, nullptr, neon_store, nullptr, nullptr, nullptr};

}  // namespace bitport
#endif
