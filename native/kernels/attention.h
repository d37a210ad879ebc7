// What an instruction set brings to attention over a panel: the keys, or the values, of 32 tokens as floats.
#pragma once
#include <cstdint>

namespace bitport {

constexpr int64_t kPanel = 32;   // tokens

// Tokens side by side, their codes dense. A number is code * scale - less, with the scale and the less of its group.
struct TokenCodes {
  const uint8_t* data;
  int64_t tokens, width, group;   // width and group: columns, multiples of 16; a group may be longer than a token
  const float *scale, *less;      // [tokens][groups]
  int64_t wide;
};
using Decode = void (*)(const TokenCodes& codes, float* panel);

// Codes that are decoded fast: integers of 2, 4 and 8 bits, and e4m3.
enum Kind : int32_t { kInt2, kInt4, kInt8, kE4M3, kKinds };

// Rows of q, of a panel and of sums are `wide` floats apart, a multiple of 32, those past their width 0. Scores and weights
// are [rows][kPanel].
struct Attending {
  Decode decode[kKinds];   // null: as rows of a weight
  void (*score)(const float* q, int64_t rows, const float* keys, int64_t wide, float* scores);
  float (*largest)(const float* scores);         // of kPanel; where one is a NaN, any
  float (*weigh)(float* scores, float largest);  // to 2^(score - largest); gives their sum
  // sums += weights * values of `tokens` tokens, where a row's sums are first multiplied by its `keep`
  void (*mix)(const float* weights, const float* keep, int64_t rows, const float* values, int64_t tokens, int64_t wide,
              float* sums);
};

const Attending& attending_on(int32_t isa);

}  // namespace bitport
