// Attention over keys and values in few bits, read once: panel by panel (attention.h), with a running maximum and sums
// that are scaled down when it grows. A work item is one head of keys, up to kRows of the query rows that use it, and
// kRange tokens; finally the items of a row are merged, so that the result does not depend on the number of threads.
#include <cfloat>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include "attention.h"
#include "buffer.h"
#include "engine.h"
#include "number.h"
#include "rows.h"
#include "share.h"

namespace bitport {
namespace {

constexpr int64_t kRows = 64, kRange = 2048;
constexpr int64_t kPieces = 64;   // items that occupy the threads: these take all tokens, as each range needs its own sums
constexpr float kLog2E = 1.44269504f;

void plain_score(const float* q, int64_t rows, const float* keys, int64_t wide, float* scores) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t t = 0; t < kPanel; ++t) {
      float sum = 0;
      for (int64_t i = 0; i < wide; ++i) sum += q[r * wide + i] * keys[t * wide + i];
      scores[r * kPanel + t] = sum;
    }
}

float plain_largest(const float* scores) {
  float most = -INFINITY;
  for (int64_t t = 0; t < kPanel; ++t) most = scores[t] > most ? scores[t] : most;
  return most;
}

float plain_weigh(float* scores, float largest) {
  float sum = 0;
  for (int64_t t = 0; t < kPanel; ++t) sum += scores[t] = std::exp2(scores[t] - largest);
  return sum;
}

void plain_mix(const float* weights, const float* keep, int64_t rows, const float* values, int64_t tokens, int64_t wide,
               float* sums) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < wide; ++i) {
      float sum = sums[r * wide + i] * keep[r];
      for (int64_t t = 0; t < tokens; ++t) sum += weights[r * kPanel + t] * values[t * wide + i];
      sums[r * wide + i] = sum;
    }
}

constexpr Attending scalar_attending{{}, plain_score, plain_largest, plain_weigh, plain_mix};

int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// The lowest finite mask values stay finite: a row with no others attends to all of its tokens equally. The mask is
// tested rather than the product: g++ 14 assumes that the product is infinite only if the mask is.
float in_log2(float mask) {
  return mask <= -FLT_MAX / kLog2E && mask != -INFINITY ? -FLT_MAX : mask * kLog2E;
}

int64_t groups_of(const BitportTokens& t) { return t.block > 1 || t.group >= t.width ? 1 : ceil_div(t.width, t.group); }

int64_t rounded_up(int64_t width) { return ceil_div(width, 32) * 32; }

const char* moved(const void* data, int64_t numbers, int32_t type) {
  return static_cast<const char*>(data) + numbers * width_of(type);
}

// Null: these tokens are decoded like rows of a weight.
Decode decoder(const Attending& attend, const BitportTokens& t) {
  const bool even = t.width % 16 == 0, e4m3 = !t.integer && t.bits == 8 && t.table[0x38] == 1.0f && t.table[0x40] == 2.0f;
  if (!even || !(e4m3 || (t.integer && (t.bits == 2 || t.bits == 4 || t.bits == 8)))) return nullptr;
  return attend.decode[e4m3 ? kE4M3 : t.bits == 2 ? kInt2 : t.bits == 4 ? kInt4 : kInt8];
}

// Views tokens of a head, from token `first` on, as rows of a weight.
BitportTiles rows_of(const BitportTokens& t, int64_t sequence, int64_t head, int64_t first) {
  static constexpr float ones[kPanel] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                         1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  BitportTiles w{nullptr, ones, nullptr, nullptr, t.table, kPanel, t.width, t.width, t.bits, t.integer, BITPORT_F32, 0};
  w.codes = t.codes + sequence * t.codes_step[0] + head * t.codes_step[1] + first * ceil_div(t.width * t.bits, 8);
  if (t.block > 1) return w;
  w.group = t.group;
  w.scale_type = t.scale_type;
  w.zero_type = t.zero_type;
  const int64_t groups = bitport::groups_of(w);
  w.scale = moved(t.scale, sequence * t.scale_step[0] + head * t.scale_step[1] + first * groups, t.scale_type);
  if (t.zero) w.zero = moved(t.zero, sequence * t.zero_step[0] + head * t.zero_step[1] + first * groups, t.zero_type);
  return w;
}

class Piece {
 public:
  Piece(const BitportAttention& a, int32_t isa, int64_t item, int64_t range, int64_t ranges, int64_t shares)
      : a_(a), isa_(isa), attend_(attending_on(isa)), engine_(engine_for(isa, BITPORT_F32, 1)) {
    first_ = item % ranges * range;
    end_ = first_ + range;
    const int64_t share = item / ranges % shares, pair = item / ranges / shares;
    head_ = pair % a.groups;
    sequence_ = pair / a.groups;
    first_row_ = share * kRows;
    rows_ = smaller(kRows, rows_of_head(a) - first_row_);
  }

  static int64_t rows_of_head(const BitportAttention& a) { return a.heads / a.groups * a.rows; }

  // Number of floats of scratch memory: a panel, scores, rows of q unscaled and multiplied by the scales of a block,
  // keep.
  static int64_t room(const BitportAttention& a) {
    const int64_t keys = rounded_up(a.keys.width), values = rounded_up(a.values.width);
    const int64_t groups = most(groups_of(a.keys), groups_of(a.values));
    return most(keys, values) * kPanel + kRows * (kPanel + 2 * keys + 2) + 2 * kPanel * groups;
  }

  // Writes sums [rows][wide], and the largest score and the sum of weights of each row [rows][2].
  void run(float* memory, float* sums, float* state) {
    const int64_t wide = rounded_up(a_.keys.width), out = rounded_up(a_.values.width);
    panel_ = memory;
    scores_ = panel_ + most(wide, out) * kPanel;
    q_ = scores_ + kRows * kPanel;
    scaled_ = q_ + kRows * wide;
    keep_ = scaled_ + kRows * wide;
    less_ = keep_ + kRows;
    group_scale_ = less_ + kRows;
    group_less_ = group_scale_ + kPanel * most(groups_of(a_.keys), groups_of(a_.values));
    load_queries(wide);
    std::memset(sums, 0, size_t(rows_ * out) * sizeof(float));
    for (int64_t r = 0; r < rows_; ++r) state[2 * r] = -INFINITY, state[2 * r + 1] = 0;
    const int64_t all = a_.quantized + a_.dense, last = a_.first_dense + a_.quantized;
    for (int64_t t = first_, end = smaller(seen_at_most(), end_); t < end;) {
      const bool packed = t >= a_.first_dense && t < last;
      const int64_t stop = smaller(end, t < a_.first_dense ? a_.first_dense : packed ? last : all);
      const int64_t at = packed ? t - a_.first_dense : t < a_.first_dense ? t : t - a_.quantized, block = a_.keys.block;
      int64_t count = smaller(kPanel, stop - t);
      if (packed && block > 1) count = smaller(count, block - at % block);
      const int64_t row = first_shown(first_seeing(t), t, count), rows = rows_ - row;
      if (!rows) {
        t += count;
        continue;
      }
      const float* q = q_;
      if (packed && block > 1) q = scale_queries(at / block, wide);
      load(a_.keys, packed, at, count, wide);
      attend_.score(q + row * wide, rows, panel_, wide, scores_ + row * kPanel);
      soften(row, t, count, q == q_ ? nullptr : less_, state);
      load(a_.values, packed, at, count, out);
      attend_.mix(scores_ + row * kPanel, keep_ + row, rows, panel_, count, out, sums + row * out);
      t += count;
    }
  }

  int64_t rows() const { return rows_; }

 private:
  int64_t query_head(int64_t row) const { return head_ * (a_.heads / a_.groups) + (first_row_ + row) / a_.rows; }
  int64_t query_row(int64_t row) const { return (first_row_ + row) % a_.rows; }

  // The number of tokens that the last of these rows sees.
  int64_t seen_at_most() const {
    const int64_t tokens = a_.quantized + a_.dense, last = query_row(0) + rows_ - 1;
    return a_.causal && last < a_.rows ? tokens - a_.rows + last + 1 : tokens;
  }

  // The first of these rows that sees a token from t on, or an earlier one: of several heads all are taken.
  int64_t first_seeing(int64_t t) const {
    const int64_t earlier = a_.quantized + a_.dense - a_.rows, row = query_row(0);
    return a_.causal && row + rows_ <= a_.rows ? most(0, t - earlier - row) : 0;
  }

  // The first of these rows, from `row` on, to which a mask of bool shows any of `count` tokens; rows_ if there is none.
  int64_t first_shown(int64_t row, int64_t first, int64_t count) const {
    if (!a_.mask || a_.mask_type == BITPORT_F32) return row;
    for (; row < rows_; ++row) {
      const uint8_t* mask = static_cast<const uint8_t*>(a_.mask) + mask_at(row, first);
      uint8_t any = 0;
      for (int64_t t = 0; t < count; ++t) any |= mask[t * a_.mask_step[3]];
      if (any) break;
    }
    return row;
  }

  int64_t mask_at(int64_t row, int64_t token) const {
    return sequence_ * a_.mask_step[0] + query_head(row) * a_.mask_step[1] + query_row(row) * a_.mask_step[2] +
           token * a_.mask_step[3];
  }

  void load_queries(int64_t wide) {
    const int64_t width = a_.keys.width;
    const float scale = a_.scale * kLog2E;
    std::memset(q_, 0, size_t(rows_ * wide) * sizeof(float));
    const int64_t start = (sequence_ * a_.heads + head_ * (a_.heads / a_.groups)) * a_.rows + first_row_;
    for (int64_t r = 0; r < rows_; ++r) {
      engine_.widen(moved(a_.q, (start + r) * width, a_.type), a_.type, width, q_ + r * wide);
      for (int64_t i = 0; i < width; ++i) q_[r * wide + i] *= scale;
    }
  }

  // q k = sum of (q scale) (code - zero): returns the rows times the scales of a block; less_ is the contribution of
  // the zeros.
  const float* scale_queries(int64_t block, int64_t wide) {
    const BitportTokens& k = a_.keys;
    const int64_t scale_at = sequence_ * k.scale_step[0] + head_ * k.scale_step[1] + block * k.width;
    const int64_t zero_at = sequence_ * k.zero_step[0] + head_ * k.zero_step[1] + block * k.width;
    for (int64_t r = 0; r < rows_; ++r) less_[r] = 0;
    std::memset(scaled_, 0, size_t(rows_ * wide) * sizeof(float));
    for (int64_t i = 0; i < k.width; ++i) {
      const float scale = load_number(k.scale, k.scale_type, scale_at + i);
      const float shift = k.zero ? load_number(k.zero, k.zero_type, zero_at + i) + k.table[0] : 0.0f;
      for (int64_t r = 0; r < rows_; ++r) {
        const float q = scaled_[r * wide + i] = q_[r * wide + i] * scale;
        less_[r] += q * shift;
      }
    }
    return scaled_;
  }

  void load(const BitportTokens& t, bool packed, int64_t first, int64_t count, int64_t wide) {
    if (wide != t.width) std::memset(panel_, 0, size_t(kPanel * wide) * sizeof(float));
    if (packed) {
      const BitportTiles w = rows_of(t, sequence_, head_, first);
      const Decode decode = decoder(attend_, t);
      if (decode) decode(scaled(w, count, wide), panel_);
      else write_rows(isa_, w, true, 0, count, wide, panel_);
    } else {
      const char* from = moved(t.dense, sequence_ * t.dense_step[0] + head_ * t.dense_step[1] + first * t.width, a_.type);
      for (int64_t i = 0; i < count; ++i)
        engine_.widen(from + i * t.width * width_of(a_.type), a_.type, t.width, panel_ + i * wide);
    }
    // Leftovers of another panel may be NaN, which a weight of 0 would not cancel.
    if (count < kPanel) std::memset(panel_ + count * wide, 0, size_t((kPanel - count) * wide) * sizeof(float));
  }

  TokenCodes scaled(const BitportTiles& w, int64_t count, int64_t wide) {
    const int64_t numbers = count * bitport::groups_of(w);
    engine_.widen(w.scale, w.scale_type, numbers, group_scale_);
    if (w.zero) engine_.widen(w.zero, w.zero_type, numbers, group_less_);
    const float middle = w.integer ? bitport::middle(w) : 0.0f;
    for (int64_t i = 0; i < numbers; ++i) group_less_[i] = (w.zero ? group_less_[i] : middle) * group_scale_[i];
    return {w.codes, count, w.k, w.group, group_scale_, group_less_, wide};
  }

  // Converts scores of tokens [first, first + count), of rows from `row` on, to softmax weights.
  void soften(int64_t row, int64_t first, int64_t count, const float* less, float* state) {
    for (int64_t r = row; r < rows_; ++r) {
      float* const s = scores_ + r * kPanel;
      if (less)
        for (int64_t t = 0; t < kPanel; ++t) s[t] -= less[r];
      int64_t seen = count;
      if (a_.causal) seen = smaller(seen, a_.quantized + a_.dense - a_.rows + query_row(r) + 1 - first);
      if (a_.mask) {
        const int64_t at = mask_at(r, first);
        if (a_.mask_type == BITPORT_F32) {
          const float* mask = static_cast<const float*>(a_.mask) + at;
          for (int64_t t = 0; t < seen; ++t) s[t] += in_log2(mask[t * a_.mask_step[3]]);
        } else {
          const uint8_t* mask = static_cast<const uint8_t*>(a_.mask) + at;
          const bool hides = a_.mask_step[3] != 1 || (seen > 0 && std::memchr(mask, 0, size_t(seen)));
          for (int64_t t = 0; hides && t < seen; ++t) s[t] += mask[t * a_.mask_step[3]] ? 0.0f : -INFINITY;
        }
      }
      for (int64_t t = seen < 0 ? 0 : seen; t < kPanel; ++t) s[t] = -INFINITY;
      const float before = state[2 * r], here = attend_.largest(s), most = here > before ? here : before;
      keep_[r] = 1;
      if (most == -INFINITY) {   // without a number there is no maximum: all weights are 0, and a NaN is kept in the sum
        float sum = 0;
        for (int64_t t = 0; t < kPanel; ++t) sum += s[t] = std::isnan(s[t]) ? s[t] : 0.0f;
        state[2 * r + 1] += sum;
        continue;
      }
      if (most > before) keep_[r] = std::exp2(before - most);
      state[2 * r] = most;
      state[2 * r + 1] = state[2 * r + 1] * keep_[r] + attend_.weigh(s, most);
    }
  }

  const BitportAttention& a_;
  const int32_t isa_;
  const Attending& attend_;
  const Engine& engine_;
  int64_t first_, end_, head_, sequence_, first_row_, rows_;
  float *panel_, *scores_, *q_, *scaled_, *keep_, *less_, *group_scale_, *group_less_;
};

// Merges the ranges of one row, with the given strides, into a row of y.
void put_together(const BitportAttention& a, const Engine& engine, const float* sums, const float* state, int64_t ranges,
                  int64_t sums_apart, int64_t state_apart, int64_t row) {
  float most = -INFINITY;
  for (int64_t i = 0; i < ranges; ++i) most = state[i * state_apart] > most ? state[i * state_apart] : most;
  alignas(64) float part[256];   // a slice of the width
  for (int64_t first = 0; first < a.values.width; first += 256) {
    const int64_t count = smaller(256, a.values.width - first);
    float sum = 0;
    std::memset(part, 0, sizeof(part));
    for (int64_t i = 0; i < ranges; ++i) {
      const float* here = state + i * state_apart;
      const float keep = here[0] == most ? 1.0f : std::exp2(here[0] - most);
      sum += here[1] * keep;
      for (int64_t c = 0; c < count; ++c) part[c] += sums[i * sums_apart + first + c] * keep;
    }
    for (int64_t c = 0; c < count; ++c) part[c] = sum == 0 ? 0.0f : part[c] / sum;
    char* to = static_cast<char*>(a.y) + (row * a.values.width + first) * width_of(a.type);
    engine.store(part, count, nullptr, to, a.type);
  }
}

bool outside(int64_t value, int64_t least) { return value < least || value > kMost; }

int32_t check_tokens(const BitportAttention& a, const BitportTokens& t, bool keys) {
  if (outside(t.width, 1) || outside(t.block, 1) || (t.block > 1 && !keys)) return kBadShape;
  for (const auto* step : {t.codes_step, t.scale_step, t.zero_step, t.dense_step})
    if (step[0] < 0 || step[1] < 0) return kBadShape;
  if (a.dense && !t.dense) return kNullPointer;
  if (!a.quantized) return kOk;
  const BitportTiles w{t.codes, t.scale, t.zero,    nullptr,      t.table, 1, t.width, t.block > 1 ? t.width : t.group,
                       t.bits,  t.integer, t.scale_type, t.zero_type};
  return check_weight(&w);
}

int32_t check(const BitportAttention* a, int32_t isa) {
  if (!a) return kNullPointer;
  for (const int64_t size : {a->batch, a->heads, a->rows, a->first_dense, a->quantized, a->dense})
    if (outside(size, 0)) return kBadShape;
  if (a->groups < 1 || a->heads % a->groups || a->first_dense > a->dense) return kBadShape;
  if (a->quantized + a->dense == 0 || outside(a->quantized + a->dense, 1)) return kBadShape;
  if (!is_float(a->type)) return kBadType;
  if (const int32_t code = check_tokens(*a, a->keys, true)) return code;
  if (const int32_t code = check_tokens(*a, a->values, false)) return code;
  if (outside(a->batch * a->heads, 0) || outside(a->batch * a->heads * a->rows, 0)) return kBadShape;
  if (a->mask) {
    if (a->mask_type != BITPORT_F32 && a->mask_type != BITPORT_U8) return kBadType;
    for (const int64_t step : a->mask_step)
      if (step < 0) return kBadShape;
  }
  if (isa >= 0 && !bitport_has_isa(isa)) return kNoIsa;
  return a->batch * a->heads * a->rows == 0 || (a->q && a->y) ? kOk : kNullPointer;
}

}  // namespace

const Attending& attending_on(int32_t isa) {
#if BITPORT_X86
  extern const Attending avx2_attending, avx512_attending;
  if (isa >= BITPORT_AVX512_VNNI) return avx512_attending;
  if (isa == BITPORT_AVX2) return avx2_attending;
#elif BITPORT_ARM
  extern const Attending neon_attending;
  if (isa >= BITPORT_NEON) return neon_attending;
#endif
  (void)isa;
  return scalar_attending;
}

}  // namespace bitport

int32_t bitport_attention(const BitportAttention* attention, int32_t threads, int32_t isa) {
  using namespace bitport;
  if (const int32_t code = check(attention, isa)) return code;
  const BitportAttention& a = *attention;
  if (a.batch * a.heads * a.rows == 0) return kOk;
  if (isa < 0) isa = bitport_best_isa();
  const int64_t tokens = a.quantized + a.dense, rows = Piece::rows_of_head(a), out = rounded_up(a.values.width);
  const int64_t shares = ceil_div(rows, kRows), pairs = a.batch * a.groups;
  const int64_t range = pairs * shares < kPieces ? kRange : tokens, ranges = ceil_div(tokens, range);
  const int64_t items = pairs * shares * ranges, one = smaller(kRows, rows);
  constexpr int64_t kMostSums = int64_t(1) << 40;
  if (outside(items, 1) || outside(items * one, 1) || out > kMostSums / (items * one)) return kBadShape;
  static thread_local Buffer results;   // [items][rows][out], then [items][rows][2]
  const int64_t sums_apart = one * out, state_apart = one * 2;
  float* const sums = reinterpret_cast<float*>(results.need(size_t(items * (sums_apart + state_apart)) * sizeof(float)));
  if (!sums) return kNoMemory;
  float* const state = sums + items * sums_apart;
  constexpr double kGrain = 1 << 16;   // elements of keys and values for which, with up to 8 rows, a second thread pays off
  const double elements = double(pairs) * double(tokens) * double(a.keys.width + a.values.width);
  if (threads < 1 || elements * double(ceil_div(rows, 8)) < kGrain) threads = 1;
  const Engine& engine = engine_for(isa, BITPORT_F32, 1);
  const auto finish = [&](int64_t item, int64_t count) {   // item: the first of the ranges of `count` rows
    const int64_t place = item / ranges, row = place / shares * rows + place % shares * kRows;
    for (int64_t at = 0; at < count; ++at)
      put_together(a, engine, sums + item * sums_apart + at * out, state + item * state_apart + at * 2, ranges,
                   sums_apart, state_apart, row + at);
  };
  std::atomic<bool> failed{false};
  share(items, threads, [&](int64_t item) {
    float* const memory = reinterpret_cast<float*>(own_buffer.need(size_t(Piece::room(a)) * sizeof(float)));
    if (!memory) { failed = true; return; }
    Piece piece(a, isa, item, range, ranges, shares);
    piece.run(memory, sums + item * sums_apart, state + item * state_apart);
    if (ranges == 1) finish(item, piece.rows());
  });
  if (!failed && ranges > 1)
    for (int64_t item = 0; item < items; item += ranges)
      finish(item, Piece(a, isa, item, range, ranges, shares).rows());
  results.trim();
  return failed ? kNoMemory : kOk;
}
