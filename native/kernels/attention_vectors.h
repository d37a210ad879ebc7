// attention.h in vectors. Loops over arrays meant for registers are unrolled explicitly: g++ else keeps them in memory. A
// file that includes this defines V, a vector of kWidth floats, INLINE and TARGET, and
//   all(number)  load(floats)  store(floats, v)  madd(a, b, c)  larger(limit, x)   a NaN in x is kept
//   whole(x)     two_to(x)                           x rounded to an integer; 2^x of an integer from -127 (gives 0) to 0
//   sums(vectors)  the sums of kWidth vectors, as a vector    sum_of(v)  most_of(v)  reductions of one vector
//   numbers<Kind>(codes)                                     kWidth codes as floats

namespace bitport {
namespace {

// Groups of `Vectors` vectors, or of any number if 0: short loops of unknown length cost as much as their work.
template <Kind Of, int64_t Vectors>
TARGET void decode_groups(const TokenCodes& c, float* panel) {
  constexpr int64_t kBits = Of == kInt2 ? 2 : Of == kInt4 ? 4 : 8, kBytes = kWidth * kBits / 8;
  const uint8_t* from = c.data;
  const float *scale = c.scale, *less = c.less;
  for (int64_t t = 0; t < c.tokens; ++t, panel += c.wide)
    for (int64_t first = 0; first < c.width; ++scale, ++less) {
      const V by = all(*scale), minus = all(-*less);
      const int64_t vectors = Vectors ? Vectors : (c.group < c.width - first ? c.group : c.width - first) / kWidth;
      for (int64_t i = 0; i < vectors; ++i)
        store(panel + first + i * kWidth, madd(numbers<Of>(from + i * kBytes), by, minus));
      first += vectors * kWidth;
      from += vectors * kBytes;
    }
}

template <Kind Of>
TARGET void decode(const TokenCodes& c, float* panel) {
  const int64_t group = c.group < c.width ? c.group : c.width;
  if (c.width % group) return decode_groups<Of, 0>(c, panel);
  if (group == 32) return decode_groups<Of, 32 / kWidth>(c, panel);
  if (group == 64) return decode_groups<Of, 64 / kWidth>(c, panel);
  if (group == 128) return decode_groups<Of, 128 / kWidth>(c, panel);
  decode_groups<Of, 0>(c, panel);
}

// As many pairs of rows and tokens as sums() takes.
template <int64_t Rows>
TARGET void score_of(const float* q, const float* keys, int64_t wide, float* scores) {
  constexpr int64_t kTokens = kWidth / Rows;
  for (int64_t token = 0; token < kPanel; token += kTokens) {
    V sum[kWidth];
    for (V& s : sum) s = all(0.0f);
    for (int64_t i = 0; i < wide; i += kWidth) {
      V x[Rows];
      for (int64_t r = 0; r < Rows; ++r) x[r] = load(q + r * wide + i);
#pragma GCC unroll 16
      for (int64_t t = 0; t < kTokens; ++t) {
        const V y = load(keys + (token + t) * wide + i);
        for (int64_t r = 0; r < Rows; ++r) sum[r * kTokens + t] = madd(x[r], y, sum[r * kTokens + t]);
      }
    }
    float found[kWidth];
    store(found, sums(sum));
    for (int64_t r = 0; r < Rows; ++r)
      for (int64_t t = 0; t < kTokens; ++t) scores[r * kPanel + token + t] = found[r * kTokens + t];
  }
}

TARGET void score(const float* q, int64_t rows, const float* keys, int64_t wide, float* scores) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) score_of<4>(q + r * wide, keys, wide, scores + r * kPanel);
  for (; r + 2 <= rows; r += 2) score_of<2>(q + r * wide, keys, wide, scores + r * kPanel);
  for (; r < rows; ++r) score_of<1>(q + r * wide, keys, wide, scores + r * kPanel);
}

TARGET float largest(const float* scores) {
  V most = load(scores);
  for (int64_t t = kWidth; t < kPanel; t += kWidth) most = larger(most, load(scores + t));
  return most_of(most);
}

// 2^f for |f| <= 1/2: powers of ln 2 over factorials, within 2^-27.
constexpr float kPowers[] = {1.525273380e-5f, 1.540353039e-4f, 1.333355815e-3f, 9.618129108e-3f, 5.550410866e-2f,
                             2.402265070e-1f, 6.931471806e-1f, 1.0f};

TARGET float weigh(float* scores, float most) {
  V sum = all(0.0f);
  for (int64_t t = 0; t < kPanel; t += kWidth) {
    const V x = larger(all(-127.0f), load(scores + t) - all(most)), n = whole(x), f = x - n;
    V p = all(kPowers[0]);
    for (int64_t i = 1; i < 8; ++i) p = madd(p, f, all(kPowers[i]));
    p = p * two_to(n);
    store(scores + t, p);
    sum = sum + p;
  }
  return sum_of(sum);
}

// Updates Rows by Columns vectors of the sums.
template <int64_t Rows, int64_t Columns>
TARGET void mix_of(const float* weights, const float* keep, const float* values, int64_t tokens, int64_t wide, float* sums) {
  V sum[Rows][Columns];
#pragma GCC unroll 16
  for (int64_t r = 0; r < Rows; ++r)
#pragma GCC unroll 16
    for (int64_t c = 0; c < Columns; ++c) sum[r][c] = load(sums + r * wide + c * kWidth) * all(keep[r]);
  for (int64_t t = 0; t < tokens; ++t)
#pragma GCC unroll 16
    for (int64_t r = 0; r < Rows; ++r) {
      const V by = all(weights[r * kPanel + t]);
#pragma GCC unroll 16
      for (int64_t c = 0; c < Columns; ++c) sum[r][c] = madd(by, load(values + t * wide + c * kWidth), sum[r][c]);
    }
#pragma GCC unroll 16
  for (int64_t r = 0; r < Rows; ++r)
#pragma GCC unroll 16
    for (int64_t c = 0; c < Columns; ++c) store(sums + r * wide + c * kWidth, sum[r][c]);
}

template <int64_t Rows>
TARGET void mix_rows(const float* weights, const float* keep, const float* values, int64_t tokens, int64_t wide, float* sums) {
  constexpr int64_t kMany = (kWidth == 16 ? 16 : 8) / Rows;
  int64_t i = 0;
  for (; i + kMany * kWidth <= wide; i += kMany * kWidth) mix_of<Rows, kMany>(weights, keep, values + i, tokens, wide, sums + i);
  for (; i < wide; i += 2 * kWidth) mix_of<Rows, 2>(weights, keep, values + i, tokens, wide, sums + i);
}

TARGET void mix(const float* weights, const float* keep, int64_t rows, const float* values, int64_t tokens, int64_t wide,
                float* sums) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) mix_rows<4>(weights + r * kPanel, keep + r, values, tokens, wide, sums + r * wide);
  for (; r + 2 <= rows; r += 2) mix_rows<2>(weights + r * kPanel, keep + r, values, tokens, wide, sums + r * wide);
  for (; r < rows; ++r) mix_rows<1>(weights + r * kPanel, keep + r, values, tokens, wide, sums + r * wide);
}

}  // namespace
}  // namespace bitport
