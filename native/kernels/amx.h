// What the products with AMX share: how the tile registers are laid out, and work of the vectors beside theirs.
#pragma once
#include "avx512.h"

#define AMX __attribute__((target(AVX512_TARGET ",avx512bf16,amx-tile,amx-bf16,amx-int8")))
#define AMX_INLINE AMX __attribute__((always_inline)) static inline
#define AMX_MEMBER AMX __attribute__((always_inline)) inline

namespace bitport {

// Tiles 0..3 hold sums, 4 and 5 x: two times 16 rows, or as many as said, of `bytes`; 6 and 7 two times 16 rows of the
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
  asm volatile("" ::"r"(&config) : "memory");   // g++ 12 does not see that the next line reads it
  _tile_loadconfig(&config);
}

AMX_INLINE void release() {
  _tile_release();
  _mm_sfence();   // what was streamed
}

// Sums of 32 rows (or 16), float32 or int32 [rows][32]. g++ 12 does not see that loads of tiles read memory, and stores
// write it.
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

// What is done beside a step of K, part by part: an instruction for the tile registers takes 16 cycles, and none of the
// vectors' time.
struct Nothing {
  AMX_MEMBER int begin() const { return 0; }
  AMX_MEMBER void part(int, int64_t) const {}
  AMX_MEMBER void end() const {}
};

// Decodes a panel by quarters of a tile, so much of it a step that it is ready when `steps` steps are over.
template <class Quarters>
struct Ahead {
  Quarters quarters;
  const int64_t at_once;
  bool any = true;   // left to decode

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
