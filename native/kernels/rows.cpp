// Single rows of a weight as numbers: what an embedding looks up.
#include "engine.h"
#include "number.h"
#include "rows.h"
#include "share.h"
#include "status.h"

namespace bitport {
namespace {

constexpr int64_t kAtOnce = 512;   // codes of a row, a byte each in L1

void write_piece(const Piece& p, void* y, int32_t type, int64_t at) {
  for (int64_t i = 0; i < p.count; ++i) store_number((p.table[p.codes[i]] - p.shift) * p.scale, y, type, at + i);
}

// How the rows of a weight are found: in tiles, or dense, with scales [n][groups].
struct Rows {
  const BitportTiles& w;
  ReadCodes read;
  bool dense;
  WritePiece write;
  bool in_place;    // write() takes codes as they lie
  WriteRow whole;   // in place of all that; or null

  int64_t scale_at(int64_t row, int64_t group) const {
    const int64_t groups = groups_of(w);
    return dense ? row * groups + group : (row / 32 * groups + group) * 32 + row % 32;
  }

  // Calls give(piece, column), its codes still missing, for the parts of columns [first, end) that share a scale. A
  // division takes as long as what is computed of a group: only the first part needs one.
  template <class Give>
  void each_piece(int64_t row, int64_t first, int64_t end, const Give& give) const {
    const float scale2 = w.scale2 ? *w.scale2 : 1.0f;
    int64_t place = scale_at(row, first / w.group), count = w.group - first % w.group;
    for (int64_t column = first; column < end; column += count, count = w.group, place += dense ? 1 : 32) {
      if (count > end - column) count = end - column;
      const float shift = w.zero ? load_number(w.zero, w.zero_type, place) - middle(w) : 0.0f;
      give(Piece{nullptr, count, w.table, w.bits, w.integer != 0, load_number(w.scale, w.scale_type, place) * scale2, shift}, column);
    }
  }

  void write_row(int64_t row, void* y, int32_t type, int64_t at) const {
    if (whole) whole(w, row, static_cast<char*>(y) + at * width_of(type));
    else if (in_place) write_in_place(row, y, type, at);
    else write_codes(row, y, type, at);
  }

  void write_codes(int64_t row, void* y, int32_t type, int64_t at) const {
    alignas(64) uint8_t codes[kAtOnce];
    for (int64_t first = 0; first < w.k; first += kAtOnce) {
      const int64_t end = w.k - first < kAtOnce ? w.k : first + kAtOnce;
      read(w, row, first, ceil_div(end - first, 32) * 32, codes);
      each_piece(row, first, end, [&](Piece piece, int64_t column) {
        piece.codes = codes + (column - first);
        write(piece, y, type, at + column);
      });
    }
  }

  // The same without codes of a byte each.
  void write_in_place(int64_t row, void* y, int32_t type, int64_t at) const {
    const uint8_t* const codes = w.codes + row * w.k / 2;
    each_piece(row, 0, w.k, [&](Piece piece, int64_t column) {
      piece.codes = codes + column / 2;
      write(piece, y, type, at + column);
    });
  }

  // A dense row from beyond the caches, while the one before it is written; its scales lie elsewhere. Inlined always:
  // g++ takes a function of prefetches alone for one that does nothing, and leaves its calls out.
  __attribute__((always_inline)) void fetch(int64_t row) const {
    const int64_t row_bytes = ceil_div(w.k * w.bits, 8), place = scale_at(row, 0);
    for (int64_t at = 0; at < row_bytes; at += 64) __builtin_prefetch(w.codes + row * row_bytes + at);
    __builtin_prefetch(static_cast<const char*>(w.scale) + place * width_of(w.scale_type));
    if (w.zero) __builtin_prefetch(static_cast<const char*>(w.zero) + place * width_of(w.zero_type));
  }
};

}  // namespace

int32_t rows_on(int32_t isa, const BitportTiles* w, bool dense, const int64_t* ids, int64_t count, void* y,
                int32_t type, int32_t threads) {
  if (const int32_t code = check_weight(w)) return code;
  if (type < BITPORT_F32 || type > BITPORT_F16) return kBadType;
  if (count < 0 || count > kMost) return kBadShape;
  if (count > 0 && (!ids || !y)) return kNullPointer;
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= w->n) return kBadRow;
  Rows found{*w, dense ? codes_of_dense(w->bits) : codes_of_tiles(w->bits), dense, write_piece, false, nullptr};
#if BITPORT_X86
  const bool even = dense && w->k % 32 == 0 && (w->group % 32 == 0 || w->group >= w->k);
  if (isa >= BITPORT_AVX2) {
    found.in_place = even && w->bits == 4 && type != BITPORT_F32;
    found.write = found.in_place ? avx2_write_nibbles : avx2_write_piece;
  }
  if (isa >= BITPORT_AVX512_VNNI && even && (w->bits == 4 || (w->bits == 8 && w->integer)))
    found.whole = avx512_write_row(isa, w->bits, type);
#endif
  (void)isa;
  constexpr int64_t kGrain = 1 << 15;   // numbers for which a thread pays
  const int64_t pieces = count * w->k / kGrain, most = threads < 1 ? 1 : threads;
  const int64_t shares = pieces < 2 ? 1 : pieces < most ? pieces : most;
  share(shares, int32_t(shares), [&](int64_t piece) {
    const int64_t first = count * piece / shares, end = count * (piece + 1) / shares;
    if (dense && first < end) found.fetch(ids[first]);
    for (int64_t i = first; i < end; ++i) {
      if (dense && i + 1 < end) found.fetch(ids[i + 1]);
      found.write_row(ids[i], y, type, i * w->k);
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
