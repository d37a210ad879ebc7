// The interface between attention and an instruction set: a panel holds the keys, or the values, of 32 tokens as
// floats.
#pragma once
#include <cstdint>

namespace bitport {

constexpr int64_t kPanel = 32;   // tokens

// Contiguous tokens with dense codes. A value is code * scale - less, with the scale and the less of its group.
struct TokenCodes {
  const uint8_t* data;
  int64_t tokens, width, group;   // width and group: columns, multiples of 16; a group may be longer than a token
  const float *scale, *less;      // [tokens][groups]
  int64_t wide;
};
using Decode = void (*)(const TokenCodes& codes, float* panel);

// Codes with fast decoders: integers of 2, 4 and 8 bits, and e4m3.
enum Kind : int32_t { kInt2, kInt4, kInt8, kE4M3, kKinds };

// Rows of q, panels and sums are `wide` floats apart, a multiple of 32, padded with 0. Scores and weights are
// [rows][kPanel].
struct Attending {
  Decode decode[kKinds];   // null: decoded like rows of a weight
  void (*score)(const float* q, int64_t rows, const float* keys, int64_t wide, float* scores);
  float (*largest)(const float* scores);         // of kPanel scores; any value if one is a NaN
  float (*weigh)(float* scores, float largest);  // replaces scores by 2^(score - largest); returns their sum
  // Multiplies the sums of each row by its `keep`, then adds weights * values of `tokens` tokens.
  void (*mix)(const float* weights, const float* keep, int64_t rows, const float* values, int64_t tokens, int64_t wide,
              float* sums);
};

const Attending& attending_on(int32_t isa);

}  // namespace bitport
