// Shared by the products with AMX: the layout of the tile registers, and vector work interleaved with tile
// instructions.
#pragma once
#include <type_traits>
#include <utility>
#include "avx512.h"

#define AMX __attribute__((target(AVX512_TARGET ",avx512bf16,amx-tile,amx-bf16,amx-int8")))
#define AMX_INLINE AMX __attribute__((always_inline)) static inline
#define AMX_MEMBER AMX __attribute__((always_inline)) inline

namespace bitport {

// Tiles 0..3 hold sums; 4 and 5 hold x, each 16 rows, or as many as given, of `bytes`; 6 and 7 each hold 16 rows of the
// weight.
AMX_INLINE void configure(int64_t rows0, int64_t rows1, int64_t bytes) {
  struct __attribute__((packed)) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int i = 0; i < 8; ++i) config.bytes[i] = 64;
  config.bytes[4] = config.bytes[5] = uint16_t(bytes);
  config.rows[0] = config.rows[1] = config.rows[4] = uint8_t(rows0);
  config.rows[2] = config.rows[3] = config.rows[5] = uint8_t(rows1);
  config.rows[6] = config.rows[7] = uint8_t(bytes / 4);
  asm volatile("" ::"r"(&config) : "memory");   // g++ 12 does not know that the next line reads it
  _tile_loadconfig(&config);
}

AMX_INLINE void release() {
  _tile_release();
  _mm_sfence();   // fences non-temporal stores
}

// Sums of 32 rows (or 16), float32 or int32 [rows][32]. g++ 12 does not know that tile loads read memory and tile
// stores write it.
template <bool Two>
AMX_INLINE void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  if (Two) { _tile_zero(2); _tile_zero(3); }
}

template <bool Two>
AMX_INLINE void load_sums(const float* sum) {
  asm volatile("" ::: "memory");
  _tile_loadd(0, sum, 128);
  _tile_loadd(1, sum + 16, 128);
  if (Two) { _tile_loadd(2, sum + 512, 128); _tile_loadd(3, sum + 528, 128); }
}

template <bool Two>
AMX_INLINE void store_sums(void* to) {
  float* sum = static_cast<float*>(to);
  _tile_stored(0, sum, 128);
  _tile_stored(1, sum + 16, 128);
  if (Two) { _tile_stored(2, sum + 512, 128); _tile_stored(3, sum + 528, 128); }
  asm volatile("" ::: "memory");
}

// Work done during a step of K, in parts: a tile product takes 16 cycles, in which the vector units are free.
struct Nothing {
  AMX_MEMBER int begin() const { return 0; }
  AMX_MEMBER void part(int, int64_t) const {}
  AMX_MEMBER void end() const {}
};

// Sums of 32 rows stay in the tile registers from one step to the next.
struct Stay {
  AMX_MEMBER void first() const {}
  AMX_MEMBER void second() const {}
  AMX_MEMBER void third() const {}
  AMX_MEMBER void fourth() const {}
};

// Sums leave the tile registers for `out`, unless it is null, while others are loaded from `in`, or begin at zero. Each
// move is placed right before the first product of the register: a store waits for all products of its register, and
// after stores of all four at once the tile unit would stall until the last product is done.
struct Turn {
  float* out;   // float32 or int32 [32][32]
  const float* in;

  AMX_MEMBER void first() const {
    if (out) _tile_stored(0, out, 128);
    if (in) _tile_loadd(0, in, 128); else _tile_zero(0);
  }
  AMX_MEMBER void second() const {
    if (out) _tile_stored(1, out + 16, 128);
    if (in) _tile_loadd(1, in + 16, 128); else _tile_zero(1);
  }
  AMX_MEMBER void third() const {
    if (out) _tile_stored(2, out + 512, 128);
    if (in) _tile_loadd(2, in + 512, 128); else _tile_zero(2);
  }
  AMX_MEMBER void fourth() const {
    if (out) _tile_stored(3, out + 528, 128);
    if (in) _tile_loadd(3, in + 528, 128); else _tile_zero(3);
  }
};

struct Floats {};   // x and weight in bfloat16, sums in float32
struct Bytes {};    // signed bytes, sums in int32

#define BITPORT_TILES(to, x, panel)                                          \
  if constexpr (std::is_same_v<Number, Floats>) _tile_dpbf16ps(to, x, panel); \
  else _tile_dpbssd(to, x, panel)

// One step of K for 32 rows (or 16): 64 bytes of each row of x, of which the second 16 are at +1024 bytes, times those
// of 32 rows of the weight, of which the second 16 are at +`half` bytes. The panel should stay in L1; x is streamed.
template <class Number, bool Two, class Sums, class Beside>
AMX_INLINE void multiply_step(const void* x, const void* panel, int64_t half, const Sums& sums, Beside& beside) {
  const char* const rows = static_cast<const char*>(x);
  const char* const weights = static_cast<const char*>(panel);
  const auto work = beside.begin();
  sums.first();
  _tile_loadd(6, weights, 64);
  _tile_stream_loadd(4, rows, 64);
  BITPORT_TILES(0, 4, 6);
  beside.part(work, 0);
  sums.second();
  _tile_loadd(7, weights + half, 64);
  BITPORT_TILES(1, 4, 7);
  beside.part(work, 1);
  if (Two) {
    sums.third();
    _tile_stream_loadd(5, rows + 1024, 64);
    BITPORT_TILES(2, 5, 6);
  }
  beside.part(work, 2);
  if (Two) {
    sums.fourth();
    BITPORT_TILES(3, 5, 7);
  }
  beside.part(work, 3);
  beside.end();
}

// Multiplies a panel by all rows of x, in blocks of 32, the last of which may hold up to 16. Adds to sum [rows][32], or
// overwrites it if the panel is the first. Steps of x are `next` bytes apart, blocks `block` bytes.
template <class Number, class Beside>
AMX_INLINE void multiply_rows(const void* x, int64_t next, int64_t block, int64_t rows, const void* panel, int64_t steps,
                              bool first, float* sum, Beside& beside) {
  const char* at = static_cast<const char*>(x);
  float* open = nullptr;   // the sums held by the tile registers
  for (; rows > 0; rows -= 32, at += block, sum += 1024) {
    const char* from = at;
    const char* weights = static_cast<const char*>(panel);
    asm volatile("" ::: "memory");   // g++ 12 does not know that tile loads read memory
    if (rows > 16) {
      multiply_step<Number, true>(from, weights, 1024, Turn{open, first ? nullptr : sum}, beside);
      for (int64_t step = 1; step < steps; ++step)
        multiply_step<Number, true>(from += next, weights += 2048, 1024, Stay{}, beside);
      open = sum;
    } else {
      if (open) store_sums<true>(open);
      open = nullptr;
      if (first) zero_sums<false>();
      else load_sums<false>(sum);
      for (int64_t step = 0; step < steps; ++step, from += next, weights += 2048)
        multiply_step<Number, false>(from, weights, 1024, Stay{}, beside);
      store_sums<false>(sum);
    }
  }
  if (open) store_sums<true>(open);
}

// A pipeline of pieces of K whose sums are scaled separately: while one is multiplied, the sums of the previous one leave
// the tile registers, and those of the one before are scaled and added to their destination. A Piece has
//   rows             rows of x, 1 to 32, or 0: no piece; kAtOnce of them are scaled during one product. The rows beyond
//                    must not be scaled: they are not numbers of x, and if they hold subnormal ones, scaling takes some
//                    hundred cycles
//   scales()         loaded once for all rows
//   add(scales, parts, row)   adds the parts [32] of a row
template <class Piece, class Work>
struct Stages {
  using Scales = decltype(Piece().scales());
  Work* work;
  float *leaving, *left;   // [32][32]: where leaving sums go, and where sums to be scaled are
  Piece open = {}, earlier = {};
  Scales scales = {};
  int64_t row = 0;   // of `earlier`, to be scaled next

  AMX_MEMBER Stages(Work& beside, float (*memory)[32 * 32]) : work(&beside), leaving(memory[0]), left(memory[1]) {}

  AMX_MEMBER auto begin() { return work->begin(); }
  template <class Quarter>
  AMX_MEMBER void part(const Quarter& quarter, int64_t i) {
    work->part(quarter, i);
    add_some();
  }
  AMX_MEMBER void end() { work->end(); }

  AMX_MEMBER void add_some() {
    if (row + Piece::kAtOnce <= earlier.rows) {
#pragma GCC unroll 4
      for (int64_t r = row; r < row + Piece::kAtOnce; ++r) earlier.add(scales, left + r * 32, r);
      row += Piece::kAtOnce;
    } else {
      for (; row < earlier.rows; ++row) earlier.add(scales, left + row * 32, row);
    }
  }
  AMX_MEMBER void add_all() { while (row < earlier.rows) add_some(); }

  AMX_MEMBER Turn turn() const { return {open.rows ? leaving : nullptr, nullptr}; }
  // The sums of `open` have left the registers, which hold those of `now`.
  AMX_MEMBER void pass(const Piece& now) {
    add_all();
    asm volatile("" ::: "memory");   // g++ 12 does not know that tile stores write it
    earlier = open;
    if (open.rows) scales = open.scales();
    row = 0;
    open = now;
    std::swap(leaving, left);
  }
  AMX_MEMBER void close() {
    if (!open.rows) return;
    if (open.rows > 16) store_sums<true>(leaving);
    else store_sums<false>(leaving);
    pass({});
  }

  // Multiplies rows of a block, up to 32 (or 16), by the steps of a piece; x_at(step) returns the rows.
  template <class Number, bool Two, class Rows>
  AMX_MEMBER void multiply(const Piece& now, const Rows& x_at, const void* panel, int64_t step_bytes, int64_t steps) {
    const char* weights = static_cast<const char*>(panel);
    if (open.rows > 16 != Two) close();
    asm volatile("" ::: "memory");   // g++ 12 does not know that tile loads read memory
    for (int64_t step = 0; step < steps; ++step, weights += step_bytes)
      if (step == 0) multiply_step<Number, Two>(x_at(step), weights, step_bytes / 2, turn(), *this);
      else multiply_step<Number, Two>(x_at(step), weights, step_bytes / 2, Stay{}, *this);
    pass(now);
  }
};

// Prefetching of codes that are unpacked during products: narrow codes arrive in time either way, and windows have a
// cost.
constexpr Fetch beside_products(int64_t bits) { return bits > 4 ? Fetch::windows : Fetch::stream; }

// Decodes a panel in quarters of a tile, enough of them per step to be finished after `steps` steps.
template <class Quarters>
struct Ahead {
  Quarters quarters;
  const int64_t at_once;
  bool any = true;   // whether any are left to decode

  AMX_MEMBER Ahead(const Quarters& all, int64_t steps) : quarters(all), at_once((all.end + steps - 1) / steps) {}

  AMX_MEMBER auto begin() {
    any = quarters.at < quarters.end;
    return any ? quarters.next() : typename Quarters::Quarter{};
  }
  AMX_MEMBER void part(const typename Quarters::Quarter& quarter, int64_t i) const {
    if (any) quarters.decode(quarter, i);
  }
  AMX_MEMBER void end() {
    for (int64_t i = 1; i < at_once && quarters.at < quarters.end; ++i) quarters.decode();
  }
};

}  // namespace bitport
