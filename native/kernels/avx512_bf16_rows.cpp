// Many rows in bfloat16 by vdpbf16ps, for processors on which it has twice the rate of float32.
#include "engine.h"
#if BITPORT_X86
#include <cstring>
#include "avx512_bf16.h"

namespace bitport {
namespace {

constexpr int64_t kDepth = 3072;
constexpr int64_t kLongest = 512;   // groups that are fused

// Rows up to which looking up codes again for every 8 of them beats a panel.
int64_t few_rows(const BitportTiles& w) { return w.bits == 4 && w.group >= 32 ? 24 : 8; }

// Rows up to which a panel of each group, in L1, beats those of pass.h, as measured with 2, 3, 4 and 6 bits.
int64_t fused_rows(const BitportTiles& w) { return w.bits > 4 ? 64 : 32; }

// A few rows and a stretch of K: operands and destination.
struct Few {
  const uint16_t* x;
  int64_t stride, columns;   // stride between steps of 32 columns; number of columns
  const uint16_t* panel;
  float* sum;                // [rows][32]
  const Affine* scales;      // of the group, for two times 16 rows of the weight
  const float* of_x;         // the sum of x over the group, or null, or its scale; rows are `groups` apart
  int64_t groups;
  const uint16_t* next = nullptr;   // x of the rows after these, to prefetch; or null
};

// R rows of x, H times 16 rows of the weight.
template <int R, int H>
AVX512_BF16_INLINE void multiply_pair(const uint16_t* x, const uint16_t* panel, __m512 (&sum)[R][H]) {
  __m512bh values[H];
#pragma GCC unroll 2
  for (int h = 0; h < H; ++h) values[h] = reinterpret_cast<__m512bh>(_mm512_load_si512(panel + h * 512));
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const __m512bh both = pair_of(x + r * 32);
#pragma GCC unroll 2
    for (int h = 0; h < H; ++h) sum[r][h] = _mm512_dpbf16_ps(sum[r][h], values[h], both);
  }
}

template <int R, int H>
AVX512_BF16_INLINE void multiply(const Few& few, __m512 (&sum)[R][H]) {
  const uint16_t *x = few.x, *panel = few.panel, *next = few.next;
  for (int64_t step = 0; step < few.columns / 32; ++step, x += few.stride, panel += 1024) {
    if (next) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) __builtin_prefetch(next + r * 32, 0, kToL1);
      next += few.stride;
    }
#pragma GCC unroll 4
    for (int pair = 0; pair < 16; ++pair) multiply_pair<R, H>(x + pair * 2, panel + pair * 32, sum);
  }
  const int64_t pairs = (few.columns % 32 + 1) / 2;
  for (int64_t pair = 0; pair < pairs; ++pair) multiply_pair<R, H>(x + pair * 2, panel + pair * 32, sum);
}

// sum += x * panel
template <int R, int H>
AVX512_BF16 void add(const Few& few) {
  __m512 sum[R][H];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int h = 0; h < H; ++h) sum[r][h] = _mm512_load_ps(few.sum + r * 32 + h * 16);
  multiply(few, sum);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int h = 0; h < H; ++h) _mm512_store_ps(few.sum + r * 32 + h * 16, sum[r][h]);
}

// sum += (x * panel - shift * sum of x) * scale, or, if of_x is a scale, x * panel * scale * of_x
template <int R, bool Scales>
AVX512_BF16 void add_scaled(const Few& few) {
  __m512 part[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) part[r][0] = part[r][1] = _mm512_setzero_ps();
  multiply<R, 2>(few, part);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      float* to = few.sum + r * 32 + h * 16;
      __m512 s = part[r][h], scale = few.scales[h].scale;
      const __m512 of_x = few.of_x ? _mm512_set1_ps(few.of_x[r * few.groups]) : _mm512_setzero_ps();
      if (Scales) scale = _mm512_mul_ps(scale, of_x);
      else if (few.of_x) s = _mm512_fnmadd_ps(few.scales[h].shift, of_x, s);
      _mm512_store_ps(to, _mm512_fmadd_ps(s, scale, _mm512_load_ps(to)));
    }
}

template <int R>
void add_group(const Few& few) { add_scaled<R, false>(few); }
template <int R>
void add_block(const Few& few) { add_scaled<R, true>(few); }

using Function = void (*)(const Few&);
constexpr Function kAdd[2][kPassing] = {{add<1, 1>, add<2, 1>, add<3, 1>, add<4, 1>, add<5, 1>, add<6, 1>,
                                        add<7, 1>, add<8, 1>, add<9, 1>, add<10, 1>, add<11, 1>, add<12, 1>},
                                       {add<1, 2>, add<2, 2>, add<3, 2>, add<4, 2>, add<5, 2>, add<6, 2>,
                                        add<7, 2>, add<8, 2>, add<9, 2>, add<10, 2>, add<11, 2>, add<12, 2>}};
constexpr Function kAddGroup[kPassing] = {add_group<1>, add_group<2>, add_group<3>, add_group<4>,  add_group<5>,  add_group<6>,
                                         add_group<7>, add_group<8>, add_group<9>, add_group<10>, add_group<11>, add_group<12>};
constexpr Function kAddBlock[kPassing] = {add_block<1>, add_block<2>, add_block<3>, add_block<4>,  add_block<5>,  add_block<6>,
                                         add_block<7>, add_block<8>, add_block<9>, add_block<10>, add_block<11>, add_block<12>};

void multiply_panel(const Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum) {
  const uint16_t* x = static_cast<const uint16_t*>(job.rows) + job.at(row, panel.k);
  if (panel.k == 0) std::memset(sum, 0, size_t(rows) * 128);
  const bool second = job.weight->n - panel.tile * 32 > 16;   // whether the tile has more than 16 rows
  kAdd[second][rows - 1]({x, kPassing * 32, smaller(job.weight->k - panel.k, panel.count),
                          static_cast<const uint16_t*>(panel.data), sum, nullptr, nullptr, 0, after<uint16_t>(job, row, panel.k)});
}

float* scales_of(const Panel& panel) { return reinterpret_cast<float*>(static_cast<uint16_t*>(panel.data) + panel.count * 32); }

void decode_blocks(const BitportTiles& w, const Panel& panel) { avx512_decode_blocks(w, panel, scales_of(panel)); }

AVX512 void multiply_blocks(const Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum) {
  const uint16_t *x = static_cast<const uint16_t*>(job.rows) + job.at(row, panel.k), *values = static_cast<const uint16_t*>(panel.data);
  const float* scale = scales_of(panel);
  if (panel.k == 0) std::memset(sum, 0, size_t(rows) * 128);
  for (int64_t k = 0, end = smaller(job.weight->k - panel.k, panel.count); k < end; k += kScaled, scale += 32) {
    const Affine scales[2] = {{_mm512_load_ps(scale), {}}, {_mm512_load_ps(scale + 16), {}}};
    kAddBlock[rows - 1]({x + k * kPassing, kPassing * 32, smaller(end - k, kScaled), values + k * 32, sum, scales,
                         job.scales + (panel.k + k) / kScaled * job.m + row, 1, after<uint16_t>(job, row, panel.k + k)});
  }
}

AVX512 void fused(const Job& job, int64_t tile, void* panel, float* sum) {
  if (job.m <= few_rows(*job.weight)) return avx512_fused_bf16(job, tile, panel, sum);
  const BitportTiles& w = *job.weight;
  const int64_t groups = groups_of(w), columns = steps_of(w) * 32;
  std::memset(sum, 0, size_t(job.m) * 128);
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t first = g * w.group, last = g + 1 < groups ? first + w.group : columns;
    avx512_look_up_bf16(w, {tile, first, last - first, panel});
    const Affine scales[2] = {affine(w, (tile * groups + g) * 32), affine(w, (tile * groups + g) * 32 + 16)};
    by_few(job.m, job.block, kPassing, [&](int64_t row, int64_t count) {
      const uint16_t* x = static_cast<const uint16_t*>(job.rows) + job.at(row, first);
      kAddGroup[count - 1]({x, job.block * 32, smaller(last, w.k) - first, static_cast<const uint16_t*>(panel),
                            sum + row * 32, scales, w.zero ? job.sums + row * groups + g : nullptr, groups});
    });
  }
}

bool fuses(const BitportTiles& w, int64_t m) { return m <= few_rows(w) || (m <= fused_rows(w) && has_long_groups(w, kLongest)); }

bool fuses_blocks(const BitportTiles& w, int64_t m) {
  return m <= few_rows(w) && !w.zero && smaller(w.group, w.k) == smaller(kScaled, w.k);
}

void end() { _mm_sfence(); }   // fences non-temporal stores

}  // namespace

const Engine avx512_bf16_engine = {
    true, kDepth, kPassing, {}, avx512_widen, avx512_decode_bf16, avx512_look_up_bf16, avx512_finish,
    multiply_panel, nullptr, fuses, fused, avx512_store, avx512_stream, nullptr, end};

const Engine avx512_bf16_blocks_engine = {
    true, kDepth, kPassing, {}, avx512_widen, decode_blocks, nullptr, nullptr,
    multiply_blocks, nullptr, fuses_blocks, avx512_fused_bf16, avx512_store, avx512_stream, nullptr, end};

}  // namespace bitport
#endif
