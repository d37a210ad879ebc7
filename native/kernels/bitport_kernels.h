// CPU kernels of bitport: plain C++17 behind a C ABI, without torch or Python. One library holds the code for every
// ISA; the variant is chosen at run time.
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

// Within an architecture, each ISA includes those listed before it; scalar code runs everywhere.
enum BitportIsa : int32_t {
  BITPORT_SCALAR = 0,
  BITPORT_AVX2 = 1, BITPORT_AVX512_VNNI = 2, BITPORT_AVX512_BF16 = 3, BITPORT_AMX = 4,   // x86
  BITPORT_NEON = 5, BITPORT_NEON_DOT = 6,   // 64-bit ARM: Armv8.0, and with int8 dot products
  BITPORT_NEON_MATRIX = 7,                  // and with int8 and bfloat16 matrix products
  BITPORT_ISAS = 8   // number of ISAs
};

// How x is rounded before the product. To integers, for integer weights: per row to int8 or to uint8 with a zero point,
// or per tensor to int8. To floats: e4m3 with a scale per row, per tensor or per block of 128; e4m3 or e2m1 in blocks
// of 32 with power-of-two scales; e2m1 in blocks of 16 with e4m3 scales and a global scale.
enum BitportAct : int32_t {
  BITPORT_AS_IS = 0, BITPORT_INT8_ROW = 1, BITPORT_INT8_ROW_ASYM = 2, BITPORT_INT8_TENSOR = 3,
  BITPORT_FP8_ROW = 4, BITPORT_FP8_TENSOR = 5, BITPORT_MXFP8 = 6, BITPORT_MXFP4 = 7, BITPORT_NVFP4 = 8,
  BITPORT_FP8_128 = 9
};

// Applied to the sums before they are rounded to y: nothing, z * Phi(z) (exact GELU), its tanh approximation, or
// z * sigmoid(z).
enum BitportThen : int32_t { BITPORT_NOTHING = 0, BITPORT_GELU = 1, BITPORT_GELU_TANH = 2, BITPORT_SILU = 3 };

// A weight [n, k] of 1 to 8 bits in tiles of 32 rows by 32 columns. Both dimensions are padded to a multiple of 32:
// columns with code 0, rows with code 0 and scale 0.
//
// A tile has 16 lines of 64 codes. Line 8h + p holds rows 16h .. 16h+15 and columns 4p .. 4p+3; code number
//   q = 32 (c / 2) + 2 r + c % 2      is the one at row 16h + r, column 4p + c:
// two lines of column pairs, the bfloat16 layout of AMX. The bits of a code are split, from the lowest, into digits of 8,
// 4, 2 and 1 bits, those that add up to `bits`; each digit has its own plane of 16 lines of 8 * digit bytes. With
// D = 64 * digit / 8 bytes per line, byte j holds the digits of codes j, j + D, j + 2D .., in its lowest bits first; for
// 1-bit digits, bit q of the 64-bit line belongs to code q.
//
//   codes  [n/32][k/32][planes, widest digit first], 128 * bits bytes per tile
//   scale  [n/32][groups][32] of scale_type (any but U8), groups = ceil(k / group); group is a multiple of 16, or at
//          least k (a single group)
//   zero   like scale, of zero_type (U8, F32, BF16, F16), or null
//   table  the value of each code, 2^bits floats: for integers code - 2^(bits-1), at 1 bit -1/2 and 1/2; other types have
//          up to 4 bits, or 6 with values exact in bfloat16, or are float8 (e4m3 or e5m2)
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

// y [m, n] = then(x W^T + bias) * times. x, y and times [m, n] have x_type (F32, BF16, F16) and contiguous rows; bias
// has x_type or is null; times must be null with BITPORT_NOTHING. threads: the maximum number to use (1: the calling
// thread only). isa < 0: the best one of this machine. Returns 0 or an error code (see bitport_error).
BITPORT_API int32_t bitport_linear(const BitportTiles* w, const void* x, int32_t x_type, int64_t m, const void* bias,
                                   int32_t then, const void* times, void* y, int32_t threads, int32_t isa);

// The same with x rounded. act_scale: one number, the scale for BITPORT_INT8_TENSOR and BITPORT_FP8_TENSOR and the
// global scale for BITPORT_NVFP4; null to compute it from x. A separate function, so that a program that never rounds x
// does not have to link the kernels that do.
BITPORT_API int32_t bitport_dyn_linear(const BitportTiles* w, const void* x, int32_t x_type, int64_t m, int32_t act,
                                       const float* act_scale, const void* bias, int32_t then, const void* times, void* y,
                                       int32_t threads, int32_t isa);

// y [count, k] of y_type: the rows of the weight selected by ids. An id outside 0 .. n-1 is an error.
BITPORT_API int32_t bitport_rows(const BitportTiles* w, const int64_t* ids, int64_t count, void* y, int32_t y_type,
                                 int32_t threads);

// The same for a weight that is only looked up, with each row contiguous: w->codes dense as bitport_pack takes them,
// scale and zero [n][groups].
BITPORT_API int32_t bitport_dense_rows(const BitportTiles* w, const int64_t* ids, int64_t count, void* y, int32_t y_type,
                                       int32_t threads);

// Writes to sums[0] and sums[1], in float64, the sums of squares of x and of x - weight; x [n, k] of x_type, rows
// contiguous.
BITPORT_API int32_t bitport_distance(const BitportTiles* w, const void* x, int32_t x_type, double* sums, int32_t threads);

// Keys or values of the tokens of several sequences: first_dense tokens as floats, then `quantized` ones, then the other
// dense ones. The steps are the strides of sequences and of heads; the tokens of a head are contiguous.
//   codes  [tokens][ceil(width * bits / 8)] dense, lowest bits first; steps in bytes
//   scale  [tokens][groups], groups = ceil(width / group), with group as in BitportTiles; or, with block > 1 (keys only),
//          [ceil(tokens / block)][width]: one scale per column for every `block` tokens
//   zero   like scale, or null
//   table  as in BitportTiles
//   dense  [tokens][width] of the type of q, or null if there are none
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

// y [batch][heads][rows][width of values] = softmax(q K^T * scale + mask) V. q and y have the same type (F32, BF16,
// F16). Query head h uses key and value head h / (heads / groups). mask [batch][heads][rows][tokens] with strides
// mask_step (0: broadcast along that axis), or null: numbers (F32) that are added to the scores, or bytes (U8), of which
// 0 hides a token. causal: row i sees tokens up to and including tokens - rows + i. A row that sees no token yields zeros.
struct BitportAttention {
  BitportTokens keys, values;
  const void* q;
  void* y;
  const void* mask;
  int64_t mask_step[4];
  int64_t batch, heads, groups, rows, first_dense, quantized, dense;   // dense: all of them, first_dense among these
  float scale;
  int32_t causal, type, mask_type;
};
BITPORT_API int32_t bitport_attention(const BitportAttention* attention, int32_t threads, int32_t isa);

// Converts codes dense along k, lowest bits first, [n, ceil(k * bits / 8)] bytes, to tiles and back.
BITPORT_API int32_t bitport_pack(const uint8_t* dense, int32_t bits, int64_t n, int64_t k, uint8_t* tiles,
                                 int32_t threads);
BITPORT_API int32_t bitport_unpack(const uint8_t* tiles, int32_t bits, int64_t n, int64_t k, uint8_t* dense,
                                   int32_t threads);

// How a weight is quantized: the number formats and scales of numerics/format.py.
enum BitportKind : int32_t { BITPORT_INTEGER = 0, BITPORT_FLOAT = 1, BITPORT_CODEBOOK = 2 };
enum BitportRule : int32_t { BITPORT_FLOOR = 0, BITPORT_CEIL = 1, BITPORT_EVEN = 2, BITPORT_RCEIL = 3 };

struct BitportFormat {
  const float* thresholds;    // codebook: 2^bits - 1; a code is the number of thresholds below x
  int64_t block_n, block_k;   // rows and columns that share a scale; both at least 1
  float largest;              // the magnitude to which a symmetric scale maps the largest element
  int32_t kind, bits;
  int32_t mantissa;           // mantissa bits of a float; for an integer, of its largest power of two
  int32_t nan_code;           // float or codebook: the code of every element of a block without a scale
  int32_t scale_type;         // any but U8
  int32_t rule;               // rounding of E8M0 scales (BitportRule)
  int32_t zero_type;          // integers: U8 or scale_type; -1 for none
  int32_t global;             // 1: a scale for the whole matrix on top of E4M3 scales
  int32_t has_zero;           // 1: some code, with its zero point, can mean 0; else a block of zeros has scale 0
};

// Where several quantized matrices go. codes: dense along k, lowest bits first, [n, ceil(k * bits / 8)] bytes; scale and
// zero: [ceil(n / block_n), ceil(k / block_k)]; scale2: one number. zero and scale2 are null if the format has none. The
// next matrix is `apart` bytes further, its scale2 is the next number.
struct BitportPlaces {
  uint8_t* codes;
  void *scale, *zero;
  float* scale2;
  int64_t codes_apart, scale_apart, zero_apart;
};

// Rounds `count` matrices x [count, n, k] of x_type (F32, BF16, F16), contiguous, to nearest.
BITPORT_API int32_t bitport_quantize(const BitportFormat* format, const void* x, int32_t x_type, int64_t count, int64_t n,
                                     int64_t k, const BitportPlaces* to, int32_t threads, int32_t isa);

// How an optimizer moment is stored in codes of 4 or 8 bits: blocks of up to 256 numbers of a row share a scale. Tables
// describe the number type, so the code does not depend on it. A number x is coded by q = x * (1 / scale).
//
// Vector code finds codes differently than scalar code: the `rank` of a magnitude is the number of thresholds below it,
// and the code is
//   BITPORT_PLAIN     the rank                    numbers are not negative
//   BITPORT_SIGN      the rank, plus 2^(bits-1) if negative
//   BITPORT_CENTRED   zero + rank, or zero - rank clamped at 0
// A piecewise linear estimate of the rank is at most one too low: z = zones[e] + (|q| > borders[e]), with e the lowest 5
// bits of the exponent of max(|q|, lowest); estimate = trunc(|q| * slopes[z] + offsets[z]). A comparison corrects it: the
// rank is one higher if the bits of q rotated left by one, as an unsigned integer, exceed ranked[estimate].
enum BitportWay : int32_t { BITPORT_PLAIN = 0, BITPORT_SIGN = 1, BITPORT_CENTRED = 2 };

struct BitportMap {
  const float* values;        // value of each code, 2^bits
  const float* thresholds;    // 256, ascending, infinity at the end: a code (with a sign, a rank) counts those below
  const uint8_t* first;       // [65536]: by the upper 16 bits of a float32, how many thresholds are below all float32
                              // that begin with them; at most one more is below some
  const uint8_t* value_bytes;    // [4][256]: the bytes of values, least significant first
  const uint8_t* ranked_bytes;   // [4][256]: the same for ranked
  const float *borders, *slopes, *offsets;   // [32], [16], [16]
  const int32_t* zones;       // [32]
  float lowest;
  float largest;              // the magnitude to which the scale maps the largest number
  float scale_of_zeros;       // the scale of a block of zeros
  int32_t bits, block;
  int32_t way;                // BitportWay
  int32_t zero;               // the code nearest to zero
  int32_t positive;           // 1: numbers are not negative, and nonzero ones are never rounded to 0
};

// Without a map, the moment consists of floats of `type` (F32, BF16).
struct BitportMoment {
  void* data;           // [n, ceil(k * bits / 8)], or [n, k]
  float* scale;         // [n, ceil(k / block)]
  const BitportMap* map;
  int32_t type;
  uint32_t key;         // key of the random bits for stochastic rounding to BF16
};

// The update rules and their coefficients are those of src/bitport/ops/optimizer_step.py.
enum BitportStepRule : int32_t { BITPORT_ADAM = 0, BITPORT_LION = 1, BITPORT_SGD = 2 };

// One parameter [n, k] of type (F32, BF16, F16), its gradient and its moments.
struct BitportStep {
  void* param;
  const void* grad;
  BitportMoment moments[2];
  int64_t n, k;
  int64_t before;       // set by the function: work items in the preceding steps
  float sign, l2, decay, beta1, rest1, beta2, rest2, rate, correction, eps, nesterov;
  int32_t type, grad_type, count;   // count: number of moments
  int32_t by_chance;    // 1: 16-bit results are rounded stochastically, 0: to nearest
  uint32_t key;
};

BITPORT_API int32_t bitport_optimizer_step(int32_t rule, BitportStep* steps, int64_t count, int32_t threads, int32_t isa);

// How work is distributed to threads: calls body(begin, end, context) on parts of [begin, end) and returns when all are
// done. The default uses OpenMP if compiled with it.
typedef void (*BitportBody)(int64_t begin, int64_t end, void* context);
typedef int32_t (*BitportPool)(int64_t begin, int64_t end, int64_t grain, BitportBody body, void* context);
BITPORT_API void bitport_use_pool(BitportPool pool);

// The crc32 of zlib, of `size` bytes that follow others whose crc32 is `before`, 0 if none do.
BITPORT_API uint32_t bitport_crc32(const void* data, int64_t size, uint32_t before);

BITPORT_API int32_t bitport_best_isa(void);           // requests AMX permission once; if refused, the next best
BITPORT_API int32_t bitport_has_isa(int32_t isa);     // 1 if this machine can run it
BITPORT_API const char* bitport_isa_name(int32_t isa);
BITPORT_API const char* bitport_error(int32_t code);  // what a return code means
BITPORT_API const char* bitport_sources(void);        // BITPORT_SOURCES as defined at compile time, or ""
