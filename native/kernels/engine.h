// What an instruction set brings to the product, and what the product hands to it. A weight is worked off in tiles of 32
// output rows; sums are float32 [rows][32]. Two ways lead to the sums of a tile:
//   panel   decode() writes a stretch of K as scaled values, which multiply() uses for every row of x: many rows.
//   fused   codes become values in registers or L1 and are used at once, scales act on the sums of a group: few rows.
#pragma once
#include "bitport_kernels.h"

#if defined(__x86_64__) && defined(__linux__)
#define BITPORT_X86 1
#endif

namespace bitport {

// Rows of x in blocks: [m / block][steps][block][32], the last step filled up with zeros, so that what one step reads lies together (rows 2^n bytes apart
// would fall into the same few lines of the cache). The last block may hold fewer rows; the rest of it is undefined.
struct Job {
  const BitportTiles* weight;
  const void* rows;    // float32 or bfloat16, as the engine asks
  const float* sums;   // [m][groups]: sums of x over each group, where the weight has a zero and the way is fused
  int64_t m, block;
};

struct Engine {
  bool bf16;            // rows and panel in bfloat16, else in float32
  int64_t depth;        // how much of K a panel holds
  void (*widen)(const void* from, int32_t type, int64_t count, float* to);
  void (*decode)(const BitportTiles& weight, int64_t tile, int64_t k, int64_t count, void* panel);
  // Adds rows [row, row + rows) times the panel of columns [k, k + count) to sum; row is a multiple of the block.
  void (*multiply)(const Job& job, int64_t row, int64_t rows, int64_t k, int64_t count, const void* panel, float* sum);
  bool (*fuses)(const BitportTiles& weight, int64_t m);   // whether to go the fused way; null: never
  void (*fused)(const Job& job, int64_t tile, void* panel, float* sum);   // overwrites sum
  void (*store)(const float* sum, int64_t count, const float* bias, void* y, int32_t type);   // part of a row
  void (*begin)();      // once per thread and piece of work; may be null
  void (*end)();
};

// The arguments of bitport_linear, checked.
struct Product {
  const BitportTiles& weight;
  const void* x;
  int32_t type;   // of x, bias and y
  int64_t m;
  const void* bias;
  void* y;
  int32_t threads, isa;
};

int32_t linear_int8(const Product& product, int32_t act, const float* act_scale);   // a Status

// The engine for m rows of this type on this instruction set.
const Engine& engine_for(int32_t isa, int32_t x_type, int64_t m);

extern const Engine scalar_engine;
#if BITPORT_X86
extern const Engine avx2_engine, avx512_engine, avx512_bf16_engine, amx_engine;
#endif

}  // namespace bitport
