// CPU kernels of bitport: plain C++17 behind a C ABI, no torch, no Python. One library holds every ISA variant; which
// one runs is decided at run time.
#pragma once
#include <cstdint>

#if defined(_WIN32)
#define BITPORT_API extern "C" __declspec(dllexport)
#else
#define BITPORT_API extern "C" __attribute__((visibility("default")))
#endif

enum BitportType : int32_t {
  BITPORT_F32 = 0, BITPORT_BF16 = 1, BITPORT_F16 = 2, BITPORT_U8 = 3, BITPORT_E8M0 = 4, BITPORT_E4M3 = 5
};

// Of one architecture each includes those before it; scalar code runs on all.
enum BitportIsa : int32_t {
  BITPORT_SCALAR = 0,
  BITPORT_AVX2 = 1, BITPORT_AVX512_VNNI = 2, BITPORT_AVX512_BF16 = 3, BITPORT_AMX = 4,   // x86
  BITPORT_NEON = 5, BITPORT_NEON_DOT = 6,   // 64-bit ARM: Armv8.0, and with dot products of bytes
  BITPORT_NEON_MATRIX = 7,                  // and with products of matrices of bytes and of bfloat16
  BITPORT_ISAS = 8   // how many there are
};

// How x is rounded before the product. To integers, for integer weights: per row to int8 or to uint8 with a
// zero point, or all of x to int8 by one scale. To floats: e4m3 with a scale per row, for all of x or per block of 128;
// blocks of 32 of e4m3 or e2m1 with powers of two; blocks of 16 of e2m1 with e4m3 scales and a global one.
enum BitportAct : int32_t {
  BITPORT_AS_IS = 0, BITPORT_INT8_ROW = 1, BITPORT_INT8_ROW_ASYM = 2, BITPORT_INT8_TENSOR = 3,
  BITPORT_FP8_ROW = 4, BITPORT_FP8_TENSOR = 5, BITPORT_MXFP8 = 6, BITPORT_MXFP4 = 7, BITPORT_NVFP4 = 8,
  BITPORT_FP8_128 = 9
};

// What is done to sums before they are rounded to y: nothing, or z * Phi(z), the same with the tanh that comes near it, or
// z * sigmoid(z).
enum BitportThen : int32_t { BITPORT_NOTHING = 0, BITPORT_GELU = 1, BITPORT_GELU_TANH = 2, BITPORT_SILU = 3 };

// A weight [n, k] of 1 to 8 bits in tiles of 32 rows by 32 columns; both are filled up to 32, columns with code 0, rows
// with code 0 and scale 0.
//
// A tile has 16 lines of 64 codes: line 8h + p holds rows 16h .. 16h+15 and columns 4p .. 4p+3, and its code number
//   q = 32 (c / 2) + 2 r + c % 2      belongs to row 16h + r, column 4p + c:
// two lines of column pairs as AMX wants bfloat16. The bits of a code are cut, from the lowest, into digits of 8, 4, 2
// and 1 bits, those that add up to `bits`; each digit has a plane of its own, 16 lines of 8 * digit bytes. With D = 64 *
// digit / 8 bytes in a line, byte j holds the digits of codes j, j + D, j + 2D .., lowest bits first; of single bits,
// bit q of the 64-bit line belongs to code q.
//
//   codes  [n/32][k/32][planes, the widest digit first], 128 * bits bytes a tile
//   scale  [n/32][groups][32] of scale_type (all but U8), groups = k / group, rounded up; group is a multiple of 16, or
//          at least k (then there is one)
//   zero   like scale, of zero_type (U8, F32, BF16, F16), or null
//   table  what a code means, 2^bits floats: code - 2^(bits-1) for integers, of 1 bit -1/2 and 1/2; other types have up to
//          4 bits, or 6 with numbers that bfloat16 holds, or are float8, e4m3 or e5m2
//   value  (table[code] - (zero + table[0])) * scale * scale2; without a zero, table[code] * scale * scale2
struct BitportTiles {
  const uint8_t* codes;
  const void* scale;
  const void* zero;
  const float* scale2;   // one number, or null
  const float* table;
  int64_t n, k, group;
  int32_t bits, integer, scale_type, zero_type;
};

// y [m, n] = then(x W^T + bias) * times. x, y and times [m, n] of x_type (F32, BF16, F16), rows contiguous; bias of x_type
// or null; times null where nothing is done. threads: how many to use at most (1: the calling thread alone). isa < 0: the
// best this machine has. Returns 0, or a code of bitport_error.
BITPORT_API int32_t bitport_linear(const BitportTiles* w, const void* x, int32_t x_type, int64_t m, const void* bias,
                                   int32_t then, const void* times, void* y, int32_t threads, int32_t isa);

// The same with x rounded. act_scale: one number for BITPORT_INT8_TENSOR and BITPORT_FP8_TENSOR, the global one for
// BITPORT_NVFP4; null to measure it. It is a function of its own so that a program which rounds nothing need not carry the
// kernels of those that do.
BITPORT_API int32_t bitport_dyn_linear(const BitportTiles* w, const void* x, int32_t x_type, int64_t m, int32_t act,
                                       const float* act_scale, const void* bias, int32_t then, const void* times, void* y,
                                       int32_t threads, int32_t isa);

// y [count, k] of y_type: the rows of the weight that ids names. An id outside 0 .. n-1 is an error.
BITPORT_API int32_t bitport_rows(const BitportTiles* w, const int64_t* ids, int64_t count, void* y, int32_t y_type,
                                 int32_t threads);

// The same of a weight for lookups alone, a row of which lies in one place: w->codes dense as bitport_pack takes them, scale
// and zero [n][groups].
BITPORT_API int32_t bitport_dense_rows(const BitportTiles* w, const int64_t* ids, int64_t count, void* y, int32_t y_type,
                                       int32_t threads);

// sums[0], sums[1]: of the squares of x [n, k] of x_type, rows contiguous, and of x - the weight, in float64.
BITPORT_API int32_t bitport_distance(const BitportTiles* w, const void* x, int32_t x_type, double* sums, int32_t threads);

// Keys or values of the tokens of several sequences: first_dense of them as floats, then `quantized` ones, then the other
// dense ones. Steps lead from one sequence, and from one head, to the next; a head's tokens lie side by side.
//   codes  [tokens][ceil(width * bits / 8)] dense, lowest bits first; steps in bytes
//   scale  [tokens][groups], groups = width / group, rounded up, and group as of a BitportTiles; or, with block > 1 (keys
//          alone), [tokens / block, rounded up][width]: a scale per column over `block` tokens
//   zero   like scale, or null
//   table  as of a BitportTiles
//   dense  [tokens][width] of the type of q, or null where there are none
struct BitportTokens {
  const uint8_t* codes;
  const void* scale;
  const void* zero;
  const float* table;
  const void* dense;
  int64_t width, group, block;
  int64_t codes_step[2], scale_step[2], zero_step[2], dense_step[2];
  int32_t bits, integer, scale_type, zero_type;
};

// y [batch][heads][rows][width of values] = softmax(q K^T * scale + mask) V. q and y of one type (F32, BF16, F16). Query head
// h reads head h / (heads / groups) of keys and values. mask [batch][heads][rows][tokens] by mask_step (0: the same along
// an axis), or null. causal: row i of the rows sees the tokens up to tokens - rows + i. A row that sees none gives zeros.
struct BitportAttention {
  BitportTokens keys, values;
  const void* q;
  void* y;
  const float* mask;
  int64_t mask_step[4];
  int64_t batch, heads, groups, rows, first_dense, quantized, dense;   // dense: all of them, first_dense among these
  float scale;
  int32_t causal, type;
};
BITPORT_API int32_t bitport_attention(const BitportAttention* attention, int32_t threads, int32_t isa);

// Codes dense along k, lowest bits first, [n, ceil(k * bits / 8)] bytes -> tiles, and back.
BITPORT_API int32_t bitport_pack(const uint8_t* dense, int32_t bits, int64_t n, int64_t k, uint8_t* tiles,
                                 int32_t threads);
BITPORT_API int32_t bitport_unpack(const uint8_t* tiles, int32_t bits, int64_t n, int64_t k, uint8_t* dense,
                                   int32_t threads);

// How a weight is rounded: numerics/format.py, its numbers and its scales.
enum BitportKind : int32_t { BITPORT_INTEGER = 0, BITPORT_FLOAT = 1, BITPORT_CODEBOOK = 2 };
enum BitportRule : int32_t { BITPORT_FLOOR = 0, BITPORT_CEIL = 1, BITPORT_EVEN = 2, BITPORT_RCEIL = 3 };

struct BitportFormat {
  const float* thresholds;    // of a codebook: 2^bits - 1, a code counts those below it
  int64_t block_n, block_k;   // rows and columns of one scale; both at least 1
  float largest;              // the magnitude that a symmetric scale maps the largest element to
  int32_t kind, bits;
  int32_t mantissa;           // bits of a float's mantissa; of an integer's largest power of two
  int32_t nan_code;           // of a float or codebook: what a number in a block without a scale becomes
  int32_t scale_type;         // all but U8
  int32_t rule;               // how a scale of E8M0 is rounded (BitportRule)
  int32_t zero_type;          // of integers: U8, or scale_type; -1 for none
  int32_t global;             // 1: a scale of the whole matrix above those of E4M3
  int32_t has_zero;           // 1: a code, with its zero point, may mean 0; else a block of zeros has the scale 0
};

// x [n, k] of x_type (F32, BF16, F16), rows contiguous, rounded to nearest -> codes dense along k, lowest bits first,
// [n, ceil(k * bits / 8)] bytes; scale and zero [ceil(n / block_n), ceil(k / block_k)]; scale2 one number.
// zero and scale2: null where the format has none.
BITPORT_API int32_t bitport_quantize(const BitportFormat* format, const void* x, int32_t x_type, int64_t n, int64_t k,
                                     uint8_t* codes, void* scale, void* zero, float* scale2, int32_t threads,
                                     int32_t isa);

// How a moment of an optimizer is kept in codes of 4 or 8 bits: blocks of `block` numbers (up to 256) of a row share a
// scale. All is told by tables, so that the code knows no number type. A number x of a block is coded by q = x * (1 / scale).
//
// Vectors find codes otherwise than one after another: `rank` of a magnitude counts the thresholds below it, and codes are
//   BITPORT_PLAIN     the rank                    numbers are not negative
//   BITPORT_SIGN      the rank, and 2^(bits-1) for a sign
//   BITPORT_CENTRED   zero + rank, zero - rank, not below 0
// A rank is estimated, at most one too low, by a piece of a line: z = zones[e] + (|q| > borders[e]), with e the lowest 5
// bits of the exponent of max(|q|, lowest); estimate = trunc(|q| * slopes[z] + offsets[z]). Then it is compared: the rank is
// higher by one where the bits of q rotated left by one, as a whole number, are above ranked[estimate].
enum BitportWay : int32_t { BITPORT_PLAIN = 0, BITPORT_SIGN = 1, BITPORT_CENTRED = 2 };

struct BitportMap {
  const float* values;        // what a code means, 2^bits
  const float* thresholds;    // 256, ascending, infinity behind the last: a code (with a sign, a rank) counts those below
  const uint8_t* first;       // [65536]: by the upper 16 bits of a float32, how many thresholds are below all numbers that
                              // begin so; one more at most is below some
  const uint8_t* value_bytes;    // [4][256]: the bytes of values, the lowest of all first
  const uint8_t* ranked_bytes;   // [4][256]: of ranked
  const float *borders, *slopes, *offsets;   // [32], [16], [16]
  const int32_t* zones;       // [32]
  float lowest;
  float largest;              // the magnitude that the scale maps the largest number to
  float scale_of_zeros;       // the scale of a block of zeros
  int32_t bits, block;
  int32_t way;                // BitportWay
  int32_t zero;               // the code nearest to zero
  int32_t positive;           // 1: numbers are not negative, and what is above zero is not rounded to it
};

// Without a map, floats of `type` (F32, BF16).
struct BitportMoment {
  void* data;           // [n, ceil(k * bits / 8)], or [n, k]
  float* scale;         // [n, ceil(k / block)]
  const BitportMap* map;
  int32_t type;
  uint32_t key;         // of the random bits that a BF16 is rounded by
};

// The rules, and their numbers, are those of src/bitport/ops/optimizer_step.py.
enum BitportStepRule : int32_t { BITPORT_ADAM = 0, BITPORT_LION = 1, BITPORT_SGD = 2 };

// One parameter [n, k] of type (F32, BF16, F16), its gradient and its moments.
struct BitportStep {
  void* param;
  const void* grad;
  BitportMoment moments[2];
  int64_t n, k;
  int64_t before;       // written by the function: pieces of work in those before it
  float sign, l2, decay, beta1, rest1, beta2, rest2, rate, correction, eps, nesterov;
  int32_t type, grad_type, count;   // of moments
  int32_t by_chance;    // 1: what has 16 bits is rounded by random bits, 0: to nearest
  uint32_t key;
};

BITPORT_API int32_t bitport_optimizer_step(int32_t rule, BitportStep* steps, int64_t count, int32_t threads, int32_t isa);

// How work reaches other threads: calls body(begin, end, context) on parts of [begin, end) and returns when all are
// done. The default is a pool of OpenMP, where it was compiled with it.
typedef void (*BitportBody)(int64_t begin, int64_t end, void* context);
typedef int32_t (*BitportPool)(int64_t begin, int64_t end, int64_t grain, BitportBody body, void* context);
BITPORT_API void bitport_use_pool(BitportPool pool);

BITPORT_API int32_t bitport_best_isa(void);           // asks for AMX permission once; refused means the next variant
BITPORT_API int32_t bitport_has_isa(int32_t isa);     // 1 if this machine can run it
BITPORT_API const char* bitport_isa_name(int32_t isa);
BITPORT_API const char* bitport_error(int32_t code);  // what a return code means
BITPORT_API const char* bitport_sources(void);        // BITPORT_SOURCES, as whoever compiled this defined it, or ""
