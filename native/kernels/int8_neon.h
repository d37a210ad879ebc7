// The product with int8 inputs, with 128-bit vectors. A file that includes this defines TARGET, and
//   kRows      rows of x multiplied at once
//   kLines     lines multiplied at once
//   Lanes      these lines as operands: bytes of 16 rows and 4 columns each
//   lanes(lines)
//   Sums<R>    sums of R rows of x and 16 rows of the weight, like RowSums
//   add_unit<Bits>(unit, x, sums)   16 columns of 16 rows of the weight, Lanes unit(0), unit(1) .., times 16 columns of
//              rows of x; Bits: 4 if codes have at most 4, or 8
// 8-bit codes are multiplied minus their center, others as is: their sums begin at -center times the sum of x.

namespace bitport {
namespace {

// Codes as signed bytes.
template <int32_t Bits>
NEON_INLINE Line bytes_of(const uint8_t* tile, int32_t bits, int64_t line) {
  Line codes = read_line(tile, bits, line);
  if constexpr (Bits == 8)
    for (uint8x16_t& v : codes.v) v = vsubq_u8(v, vdupq_n_u8(128));
  return codes;
}

// Units of codes read from a tile. Bits: 4 or 8; 1 and 5 stand for any other up to 4 and 7. kRun: columns of one half
// of the rows processed before those of the other, so that lines are read in memory order.
template <int32_t Bits>
struct FromTile {
  static constexpr int32_t kBits = Bits > 4 ? 8 : 4;
  static constexpr int64_t kRun = 32;
  const BitportTiles& w;
  int64_t tile;
  NEON_MEMBER auto unit(uint64_t k, int64_t half) const {
    const uint8_t* const codes = tile_at(w, tile, int64_t(k / 32));
    const int64_t first = half * 8 + int64_t(k % 32 / 4);
    const int32_t bits = Bits == 4 || Bits == 8 ? Bits : w.bits;
    return [=](int64_t i) INLINED {
      Line lines[kLines];
      for (int64_t l = 0; l < kLines; ++l) lines[l] = bytes_of<Bits>(codes, bits, first + i * kLines + l);
      return lanes(lines);
    };
  }
};

constexpr int64_t kLanes = 4 / kLines;   // per unit

// Unpacked units: [K / 16][2 halves][kLanes].
template <int32_t Bits>
struct FromPanel {
  static constexpr int32_t kBits = Bits;
  static constexpr int64_t kRun = kInt8Stretch;
  const Panel& panel;
  NEON_MEMBER auto unit(uint64_t k, int64_t half) const {
    const Lanes* const at = static_cast<const Lanes*>(panel.data) + (int64_t((k - uint64_t(panel.k)) / 16) * 2 + half) * kLanes;
    return [=](int64_t i) INLINED -> const Lanes& { return at[i]; };
  }
};

template <int32_t Bits>
void unpack_as(const BitportTiles& w, const Panel& panel) {
  Lanes* to = static_cast<Lanes*>(panel.data);
  const FromTile<Bits> source{w, panel.tile};
  for (int64_t k = panel.k; k < panel.k + panel.count; k += 16)
    for (int64_t half = 0; half < 2; ++half) {
      const auto unit = source.unit(uint64_t(k), half);
      for (int64_t i = 0; i < kLanes; ++i, ++to) *to = unit(i);
    }
}

void unpack(const BitportTiles& w, const Panel& panel) {
  if (w.bits == 8) unpack_as<8>(w, panel);
  else if (w.bits == 4) unpack_as<4>(w, panel);
  else unpack_as<1>(w, panel);
}

// Converts sums of R rows of x and 16 rows of the weight to float32.
template <int R>
NEON_INLINE void add_piece(const BitportTiles& w, int64_t at, const float* x_sums, const Sums<R>& whole, float* sum) {
  for (int j = 0; j < 4; ++j) {
    const float32x4_t own = load4(w.scale, w.scale_type, at + j * 4);
    const float32x4_t scale = w.scale2 ? vmulq_n_f32(own, *w.scale2) : own;
    const float32x4_t zero = w.zero ? load4(w.zero, w.zero_type, at + j * 4) : vdupq_n_f32(middle(w));
    const float32x4_t shift = vsubq_f32(zero, vdupq_n_f32(float(center(w))));
    for (int r = 0; r < R; ++r) {
      float* const to = sum + r * 32 + j * 4;
      const float32x4_t values = vfmsq_f32(vcvtq_f32_s32(whole.of(r, j)), shift, vdupq_n_f32(x_sums[r]));
      vst1q_f32(to, vfmaq_f32(vld1q_f32(to), values, scale));
    }
  }
}

struct Columns { int64_t tile, k, end; };   // [k, end) of a tile

// Multiplies R rows of x by columns and adds to sum.
template <int R, class Source>
TARGET void multiply_rows(const Int8Job& job, const Source& source, const Columns& columns, int64_t row, float* sum) {
  const auto [tile, k, end] = columns;
  const BitportTiles& w = *job.weight;
  const int64_t step = job.block * kInt8Step, scales = tile * groups_of(w) * 32;
  const int8_t* const codes = codes_at(job, row, 0);
  const int32_t taken = w.bits == 8 ? 0 : center(w);   // subtracted from codes, through the sums of x
  for (Pieces piece(w, job.stretch, k); piece.begin < end; piece.next()) {
    const float* const sums = sums_at(job, row, piece.index);
    int32_t first[R];
    for (int r = 0; r < R; ++r) first[r] = -taken * int32_t(sums[r]);
    Sums<R> halves[2] = {Sums<R>(first), Sums<R>(first)};
    for (int64_t at = piece.begin, run_end; at < piece.end; at = run_end) {
      run_end = smaller(piece.end, (at / Source::kRun + 1) * Source::kRun);
      for (int64_t half = 0; half < 2; ++half) {
        Sums<R> whole = halves[half];
        for (uint64_t i = uint64_t(at); i < uint64_t(run_end); i += 16) {
          int8x16_t x[R];
          for (int r = 0; r < R; ++r) x[r] = vld1q_s8(codes + int64_t(i / kInt8Step) * step + r * kInt8Step + i % kInt8Step);
          add_unit<Source::kBits>(source.unit(i, half), x, whole);
        }
        halves[half] = whole;
      }
    }
    for (int64_t half = 0; half < 2; ++half)
      add_piece<R>(w, scales + piece.group * 32 + half * 16, sums, halves[half], sum + half * 16);
  }
}

// Any number of rows.
template <class Source>
void multiply_all(const Int8Job& job, const Source& source, const Columns& columns, int64_t row, int64_t rows,
                  float* sum) {
  by_few(rows, job.block, kRows, [&](int64_t r, int64_t count) {
    float* const to = sum + r * 32;
    if (count == 1) multiply_rows<1>(job, source, columns, row + r, to);
    if (count == 2) multiply_rows<2>(job, source, columns, row + r, to);
    if constexpr (kRows > 2) {
      if (count == 3) multiply_rows<3>(job, source, columns, row + r, to);
      if (count == 4) multiply_rows<4>(job, source, columns, row + r, to);
    }
  });
}

void multiply(const Int8Job& job, const Panel& panel, int64_t row, int64_t rows, float* sum) {
  const Columns columns{panel.tile, panel.k, panel.k + panel.count};
  if (panel.k == 0) std::memset(sum, 0, size_t(rows) * 128);
  if (job.weight->bits > 4) multiply_all(job, FromPanel<8>{panel}, columns, row, rows, sum);
  else multiply_all(job, FromPanel<4>{panel}, columns, row, rows, sum);
}

template <int32_t Bits>
void multiply_tile(const Int8Job& job, int64_t tile, float* sum) {
  const BitportTiles& w = *job.weight;
  std::memset(sum, 0, size_t(job.m) * 128);
  multiply_all(job, FromTile<Bits>{w, tile}, {tile, 0, w.k}, 0, job.m, sum);
}

void fused(const Int8Job& job, int64_t tile, void* memory, float* sum) {
  const BitportTiles& w = *job.weight;
  if (job.m <= kRows) {
    if (w.bits == 8) multiply_tile<8>(job, tile, sum);
    else if (w.bits > 4) multiply_tile<5>(job, tile, sum);
    else if (w.bits == 4) multiply_tile<4>(job, tile, sum);
    else multiply_tile<1>(job, tile, sum);
    return;
  }
  for (int64_t k = 0; k < w.k; k += kInt8Stretch) {
    const Panel panel{tile, k, smaller(w.k - k, kInt8Stretch), memory};
    unpack(w, panel);
    multiply(job, panel, 0, job.m, sum);
  }
}

bool fuses(const BitportTiles&, int64_t m) { return m <= 32; }

}  // namespace
}  // namespace bitport
