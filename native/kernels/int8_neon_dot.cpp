// The product with int8 inputs by sdot, which sums four neighbours in K.
#include "int8.h"
#if BITPORT_ARM
#include "neon.h"
#define TARGET __attribute__((target("arch=armv8.2-a+dotprod")))   // g++ needs the architecture too

namespace bitport {
namespace {

constexpr int64_t kRows = 4, kLines = 1;

struct Lanes { int8x16_t v[4]; };   // 4 columns of rows 0 .. 3, 4 .. 7, ..

NEON_INLINE Lanes lanes(const Line (&line)[1]) {
  const Line rows = by_rows(line[0]);
  Lanes four;
  for (int i = 0; i < 4; ++i) four.v[i] = vreinterpretq_s8_u8(rows.v[i]);
  return four;
}

template <int R>
using Sums = RowSums<R>;

template <int I, int R>
TARGET NEON_INLINE void add_line(const Lanes& line, const int8x16_t (&x)[R], Sums<R>& whole) {
  for (int j = 0; j < 4; ++j)
    for (int r = 0; r < R; ++r) whole.v[r][j] = vdotq_laneq_s32(whole.v[r][j], line.v[j], x[r], I);
}

template <int32_t, class Unit, int R>
TARGET NEON_INLINE void add_unit(const Unit& unit, const int8x16_t (&x)[R], Sums<R>& whole) {
  add_line<0>(unit(0), x, whole);
  add_line<1>(unit(1), x, whole);
  add_line<2>(unit(2), x, whole);
  add_line<3>(unit(3), x, whole);
}

}  // namespace
}  // namespace bitport

#include "int8_neon.h"

namespace bitport {

void neon_dot_int8_fused(const Int8Job& job, int64_t tile, void* panel, float* sum) { fused(job, tile, panel, sum); }

const Int8Engine neon_dot_int8_engine = {kInt8Stretch, 1, 0, kUsualOfBytes, neon_range, neon_round, fuses, fused, unpack,
                                         multiply, nullptr, nullptr, nullptr, neon_finish, false, nullptr, nullptr};

}  // namespace bitport
#endif
