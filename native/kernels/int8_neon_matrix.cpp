// The product with int8 inputs by smmla: two rows of x times two of the weight, eight columns at a time.
#include "int8.h"
#if BITPORT_ARM
#include "neon.h"
#define TARGET __attribute__((target("arch=armv8.6-a")))

namespace bitport {
namespace {

constexpr int64_t kRows = 4, kLines = 2;

struct Lanes { int8x16_t v[8]; };   // 8 columns of rows 0 and 1, 2 and 3, ..

NEON_INLINE Lanes lanes(const Line (&lines)[2]) {
  const Line first = by_rows(lines[0]), second = by_rows(lines[1]);
  Lanes eight;
  for (int i = 0; i < 4; ++i) {
    const uint32x4_t low = vreinterpretq_u32_u8(first.v[i]), high = vreinterpretq_u32_u8(second.v[i]);
    eight.v[2 * i] = vreinterpretq_s8_u32(vzip1q_u32(low, high));
    eight.v[2 * i + 1] = vreinterpretq_s8_u32(vzip2q_u32(low, high));
  }
  return eight;
}

template <int R>
struct Sums {
  using P = Pairs<R>;
  int32x4_t v[P::kCount][8];   // two rows of x by two of the weight
  NEON_MEMBER explicit Sums(const int32_t (&first)[R]) {
    for (int p = 0; p < P::kCount; ++p)
      for (int32x4_t& each : v[p]) each = vcombine_s32(vdup_n_s32(first[2 * p]), vdup_n_s32(first[P::second(p)]));
  }
  NEON_MEMBER int32x4_t of(int row, int four) const {
    const int64x2_t low = vreinterpretq_s64_s32(v[row / 2][2 * four]), high = vreinterpretq_s64_s32(v[row / 2][2 * four + 1]);
    return vreinterpretq_s32_s64(row % 2 ? vzip2q_s64(low, high) : vzip1q_s64(low, high));
  }
};

template <int32_t, class Unit, int R>
TARGET NEON_INLINE void add_unit(const Unit& unit, const int8x16_t (&x)[R], Sums<R>& whole) {
  using P = Pairs<R>;
  for (int i = 0; i < 2; ++i) {
    const Lanes& eight = unit(i);
    for (int p = 0; p < P::kCount; ++p) {
      const int64x2_t first = vreinterpretq_s64_s8(x[2 * p]), second = vreinterpretq_s64_s8(x[P::second(p)]);
      const int8x16_t pair = vreinterpretq_s8_s64(i ? vzip2q_s64(first, second) : vzip1q_s64(first, second));
      for (int j = 0; j < 8; ++j) whole.v[p][j] = vmmlaq_s32(whole.v[p][j], pair, eight.v[j]);
    }
  }
}

}  // namespace
}  // namespace bitport

#include "int8_neon.h"

namespace bitport {

// A single row has no partner, so it uses sdot.
void neon_matrix_int8_fused(const Int8Job& job, int64_t tile, void* panel, float* sum) {
  (job.m == 1 ? neon_dot_int8_fused : fused)(job, tile, panel, sum);
}

const Int8Engine neon_matrix_int8_engine = {kInt8Stretch, 1, 0, kUsualOfBytes, neon_range, neon_round, fuses,
                                            neon_matrix_int8_fused, unpack, multiply, nullptr, nullptr, nullptr,
                                            neon_finish, false, nullptr, nullptr};

}  // namespace bitport
#endif
