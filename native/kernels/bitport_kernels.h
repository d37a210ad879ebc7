// CPU kernels of bitport: plain C++17 behind a C ABI, no torch, no Python. One library holds every ISA variant; which
// one runs is decided at run time.
#pragma once
#include <cstdint>

#if defined(_WIN32)
#define BITPORT_API extern "C" __declspec(dllexport)
#else
#define BITPORT_API extern "C" __attribute__((visibility("default")))
#endif

enum BitportType : int32_t { BITPORT_F32 = 0, BITPORT_BF16 = 1, BITPORT_F16 = 2, BITPORT_U8 = 3 };

enum BitportIsa : int32_t { BITPORT_SCALAR = 0, BITPORT_AVX2 = 1, BITPORT_AVX512_BF16 = 2, BITPORT_AMX_BF16 = 3 };

// A 4-bit weight [n, k] in tiles of 32 rows by 32 columns; n is filled up to 32 with code 0 and scale 0, k % 32 == 0.
//
//   codes  [n/32][k/32][2][8][32] bytes: half h holds rows 16h .. 16h+15; byte j of line p holds, for row 16h + j/2,
//          column 4p + (j & 1) in the low nibble and column 4p + 2 + (j & 1) in the high one: two lines of a tile of
//          column pairs, as AMX wants them, come out of one line by a mask and a shift.
//   scale  [n/32][k/group][32], group % 32 == 0 and divides k; dtype scale_type (F32, BF16, F16)
//   zero   [n/32][k/group][32] of zero_type (U8, or a float type), or null; value = table[code] * scale, less
//          (zero - 8) * scale where there is a zero. table[16] float: what a code means (for integers code - 8).
struct BitportTiles4 {
  const uint8_t* codes;
  const void* scale;
  const void* zero;
  const float* table;
  int64_t n, k, group;
  int32_t scale_type, zero_type;
};

// y [m, n] = x [m, k] W^T + bias, x and y of x_type with rows contiguous, bias of x_type or null. threads: how many to
// use at most (1: the calling thread alone). isa < 0: the best this machine has. Returns 0, or a code of bitport_error.
BITPORT_API int32_t bitport_tiles4_linear(const BitportTiles4* w, const void* x, int32_t x_type, int64_t m,
                                          const void* bias, void* y, int32_t threads, int32_t isa);

// codes dense along k (two in a byte, the even one low), [n, k/2] -> tiles, and back. Threaded alike.
BITPORT_API int32_t bitport_tiles4_pack(const uint8_t* dense, int64_t n, int64_t k, uint8_t* tiles, int32_t threads);
BITPORT_API int32_t bitport_tiles4_unpack(const uint8_t* tiles, int64_t n, int64_t k, uint8_t* dense, int32_t threads);

BITPORT_API int32_t bitport_best_isa(void);           // asks for AMX permission once; refused means the next variant
BITPORT_API int32_t bitport_has_isa(int32_t isa);     // 1 if this machine can run it
BITPORT_API const char* bitport_isa_name(int32_t isa);
BITPORT_API const char* bitport_error(int32_t code);  // what a return code means
