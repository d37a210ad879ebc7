// Dequantizes single rows of a weight, for embedding lookups.
#include "engine.h"
#include "number.h"
#include "rows.h"
#include "share.h"
#include "status.h"

namespace bitport {
namespace {

constexpr int64_t kAtOnce = 4096, kGroups = kAtOnce / 16;   // columns of a row, and the most groups that they span

void write_plain(const Stretch& s, char* y) {
  int64_t group = 0, end = s.first;
  for (int64_t i = 0; i < s.count; ++i) {
    if (i == end) ++group, end += smaller(s.group, s.count - end);
    const int code = are_nibbles(s.bits) ? s.codes[i / 2] >> i % 2 * 4 & 15 : s.codes[i];
    store_number((s.table[code] - s.shift[group]) * s.scale[group], y, s.type, i);
  }
}

// Converts numbers with a stride of `apart`.
void load_all(const void* numbers, int32_t type, int64_t place, int64_t apart, int64_t count, float* to) {
  if (type == BITPORT_BF16) {   // the loop that most weights take
    const uint16_t* const bits = static_cast<const uint16_t*>(numbers) + place;
    for (int64_t i = 0; i < count; ++i) to[i] = float_of_bf16(bits[i * apart]);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = load_number(numbers, type, place + i * apart);
  }
}

// Access to the rows of a weight: in tiles, or dense with scales [n][groups].
struct Rows {
  const BitportTiles& w;
  bool dense;
  ReadCodes read;       // null: codes are used in place
  WriteStretch write;
  int32_t type;

  int64_t row_bytes() const { return ceil_div(w.k * w.bits, 8); }

  int64_t scale_at(int64_t row, int64_t group) const {
    const int64_t groups = groups_of(w);
    return dense ? row * groups + group : (row / 32 * groups + group) * 32 + row % 32;
  }

  // next: the row after this one, or -1
  void write_row(int64_t row, int64_t next, char* y) const {
    alignas(64) uint8_t codes[kAtOnce];
    alignas(64) float scale[kGroups], shift[kGroups];
    for (int64_t first = 0; first < w.k; first += kAtOnce) {
      const int64_t count = smaller(w.k - first, kAtOnce), group = first / w.group, into = first % w.group;
      const int64_t groups = w.group < w.k ? ceil_div(into + count, w.group) : 1;
      load_scales(scale_at(row, group), groups, scale, shift);
      if (read) read(w, row, first, count, next, codes);
      const uint8_t* const here = read ? codes : w.codes + row * row_bytes() + first * w.bits / 8;
      write({here, count, smaller(w.group - into, count), w.group, scale, shift, w.table, w.bits, w.integer != 0, type},
            y + first * width_of(type));
    }
  }

  void load_scales(int64_t place, int64_t count, float* scale, float* shift) const {
    const int64_t apart = dense ? 1 : 32;
    load_all(w.scale, w.scale_type, place, apart, count, scale);
    if (w.zero) load_all(w.zero, w.zero_type, place, apart, count, shift);
    const float scale2 = w.scale2 ? *w.scale2 : 1.0f, centre = middle(w);
    for (int64_t i = 0; i < count; ++i) {
      scale[i] *= scale2;
      shift[i] = w.zero ? shift[i] - centre : 0.0f;
    }
  }

  // Prefetches a dense row, and its scales elsewhere, while the previous one is written (readers of tiles prefetch by
  // themselves). Always inlined: g++ considers a function that only prefetches to have no effect, and drops calls to
  // it.
  __attribute__((always_inline)) void fetch(int64_t row) const {
    const int64_t bytes = row_bytes(), place = scale_at(row, 0);
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(w.codes + row * bytes + at);
    __builtin_prefetch(static_cast<const char*>(w.scale) + place * width_of(w.scale_type));
    if (w.zero) __builtin_prefetch(static_cast<const char*>(w.zero) + place * width_of(w.zero_type));
  }
};

// The fastest function that writes rows of this weight.
WriteStretch writer(int32_t isa, const BitportTiles& w, int32_t type) {
#if BITPORT_X86
  const bool even = w.k % 32 == 0 && !splits_steps(w);
  if (isa >= BITPORT_AVX512_VNNI && even && (are_nibbles(w.bits) || w.integer)) return avx512_write(isa, w.bits, type);
  if (isa >= BITPORT_AVX2) return avx2_write(w.bits);
#elif BITPORT_ARM
  if (isa >= BITPORT_NEON) return neon_write(w.bits);
#endif
  (void)isa, (void)w, (void)type;
  return write_plain;
}

}  // namespace

void write_rows(int32_t isa, const BitportTiles& w, bool dense, int64_t first, int64_t count, int64_t apart, float* y) {
  const ReadCodes read = dense ? codes_of_dense(w.bits) : codes_of_tiles(w.bits);
  const Rows rows{w, dense, read, writer(isa, w, BITPORT_F32), BITPORT_F32};
  for (int64_t row = first; row < first + count; ++row)
    rows.write_row(row, row + 1 < w.n ? row + 1 : -1, reinterpret_cast<char*>(y + (row - first) * apart));
}

int32_t rows_on(int32_t isa, const BitportTiles* w, bool dense, const int64_t* ids, int64_t count, void* y,
                int32_t type, int32_t threads) {
  if (const int32_t code = check_weight(w)) return code;
  if (!is_float(type)) return kBadType;
  if (count < 0 || count > kMost) return kBadShape;
  if (count > 0 && (!ids || !y)) return kNullPointer;
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= w->n) return kBadRow;
  const ReadCodes read = dense ? codes_of_dense(w->bits) : codes_of_tiles(w->bits);
  const Rows rows{*w, dense, read, writer(isa, *w, type), type};
  constexpr int64_t kGrain = 1 << 15;   // elements for which another thread pays off
  const int64_t pieces = count * w->k / kGrain, most = threads < 1 ? 1 : threads;
  const int64_t shares = pieces < 2 ? 1 : pieces < most ? pieces : most;
  share(shares, int32_t(shares), [&](int64_t piece) {
    const int64_t first = count * piece / shares, end = count * (piece + 1) / shares;
    if (dense && first < end) rows.fetch(ids[first]);
    for (int64_t i = first; i < end; ++i) {
      const int64_t next = i + 1 < end ? ids[i + 1] : -1;
      if (dense && next >= 0) rows.fetch(next);
      rows.write_row(ids[i], next, static_cast<char*>(y) + i * w->k * width_of(type));
    }
  });
  return kOk;
}

}  // namespace bitport

int32_t bitport_rows(const BitportTiles* w, const int64_t* ids, int64_t count, void* y, int32_t y_type,
                     int32_t threads) {
  return bitport::rows_on(bitport_best_isa(), w, false, ids, count, y, y_type, threads);
}

int32_t bitport_dense_rows(const BitportTiles* w, const int64_t* ids, int64_t count, void* y, int32_t y_type,
                           int32_t threads) {
  return bitport::rows_on(bitport_best_isa(), w, true, ids, count, y, y_type, threads);
}
