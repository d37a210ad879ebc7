// y = x W^T + bias: validates the arguments, lays out the rows of x, and distributes the tiles of the weight over
// threads.
#include "activation.h"
#include "engine.h"
#include "number.h"
#include "pass.h"
#include "round.h"
#include "status.h"
#include "sweep.h"
#include "tiles.h"

namespace bitport {
namespace {

thread_local Buffer call_buffer;

constexpr int64_t kWidened = 256;   // numbers that are widened at a time

// Loops that compilers make vectors of.
float sum_of(const float* x, int64_t count) {
  float part[16] = {};
  for (; count >= 16; count -= 16, x += 16)
    for (int i = 0; i < 16; ++i) part[i] += x[i];
  for (int64_t i = 0; i < count; ++i) part[i] += x[i];
  for (int i = 0; i < 8; ++i) part[i] += part[i + 8];
  for (int i = 0; i < 4; ++i) part[i] += part[i + 4];
  return (part[0] + part[2]) + (part[1] + part[3]);
}

struct Call : Product {
  const Engine& engine;
  const Activate activate;
  const float* bias_values;
  float* sums_of_x = nullptr;   // Job::sums, or null
  Job job;
  mutable std::atomic<bool> failed{false};   // out of memory
  bool streams = false;
  const RoundedRows* const rounded;   // or null: x is as it is
  const float* const factors;         // one for each row of sums, or null

  Call(const Product& product, const Engine& chosen, const RoundedRows* rounded)
      : Product(product), engine(chosen), activate(activate_for(product.isa)), rounded(rounded),
        factors(rounded && !rounded->in_blocks ? rounded->factors : nullptr) {}

  bool late() const { return engine.look_up && groups_of(weight) == 1; }
  int64_t summed() const { return summed_columns(weight, engine.bf16); }
  size_t item() const { return engine.bf16 ? 2 : 4; }   // bytes per element of a laid-out row
  size_t row_bytes() const { return size_t(steps_of(weight)) * 32 * item(); }
  Sweep plan() const {
    return {m,      tiles_of(weight), steps_of(weight) * 32, engine.depth, row_bytes(), item(), panel_bytes(),
            threads, engine.multiply_ahead != nullptr, engine.at_once};
  }
  Pass pass_plan() const {
    return {m, tiles_of(weight), steps_of(weight) * 32, engine.depth, engine.passing, row_bytes(), column_bytes(), threads};
  }
  // Of a panel. A byte more than the weights, since the factors of 128 columns, a float for each row, may follow them.
  size_t column_bytes() const { return 32 * item() + 1; }
  size_t panel_bytes() const { return aligned(size_t(engine.depth) * column_bytes()); }

  void lay_out(const Job& rows, int64_t row) const {
    const size_t item = this->item(), next = size_t(job.block) * 32 * item;
    const void* const values = rounded ? rounded->row(row) : static_cast<const char*>(x) + row * weight.k * width_of(x_type);
    if (!values) { failed = true; return; }
    const int32_t type = rounded ? (engine.bf16 ? BITPORT_BF16 : BITPORT_F32) : x_type;
    const char* from = static_cast<const char*>(values);
    char* to = static_cast<char*>(rows.rows) + size_t(rows.at(row, 0)) * item;
    for (int64_t k = 0; k < weight.k; k += 32, from += 32 * width_of(type), to += next) {
      const int64_t count = weight.k - k < 32 ? weight.k - k : 32;
      if (count < 32) std::memset(to, 0, 32 * item);
      if (!engine.bf16) engine.widen(from, type, count, reinterpret_cast<float*>(to));
      else if (count == 32) std::memcpy(to, from, 64);   // compile-time size
      else std::memcpy(to, from, size_t(count) * 2);
    }
    if (sums_of_x) sum_up(row, static_cast<const char*>(values), type);
  }

  void sum_up(int64_t row, const char* values, int32_t type) const {
    alignas(64) float wide[kWidened];
    float* const to = sums_of_x + row * pieces_of(weight, summed());
    for (Pieces piece(weight, summed(), 0); piece.begin < weight.k; piece.next()) {
      float sum = 0;
      for (int64_t k = piece.begin; k < piece.end; k += kWidened) {
        const int64_t count = smaller(kWidened, piece.end - k);
        engine.widen(values + k * width_of(type), type, count, wide);
        sum += sum_of(wide, count);
      }
      to[piece.index] = sum;
    }
  }

  void store(int64_t tile, int64_t row, int64_t rows, float* sum) const {
    if (weight.scale2 || factors)
      for (int64_t r = 0; r < rows; ++r) {
        const float scale = (factors ? factors[row + r] : 1.0f) * (weight.scale2 ? *weight.scale2 : 1.0f);
        for (int64_t i = 0; i < 32; ++i) sum[r * 32 + i] *= scale;
      }
    const int64_t n = tile * 32, count = weight.n - n < 32 ? weight.n - n : 32;
    const int64_t next = weight.n * width_of(y_type);
    char* to = static_cast<char*>(y) + row * next + n * width_of(y_type);
    const float* bias_at = bias_values ? bias_values + n : nullptr;
    if (!then) {
      if (streams && count == 32)
        for (int64_t r = 0; r < rows; ++r, to += next) engine.stream(sum + r * 32, bias_at, to, y_type);
      else
        for (int64_t r = 0; r < rows; ++r, to += next) engine.store(sum + r * 32, count, bias_at, to, y_type);
      return;
    }
    const char* const y_at = static_cast<char*>(y);
    for (int64_t r = 0; r < rows; r += kActivated) {   // a few rows, while they are in L1
      const int64_t few = rows - r < kActivated ? rows - r : kActivated;
      const char* factor = times ? static_cast<const char*>(times) + (to - y_at) : nullptr;
      activate({then, bias_at, factor, y_type, weight.n, count}, sum + r * 32, few);
      for (int64_t i = 0; i < few; ++i, to += next) engine.store(sum + (r + i) * 32, count, nullptr, to, y_type);
    }
  }

  void run_fused(int64_t first, int64_t last) {
    const size_t panels = 4 * panel_bytes();
    char* memory = own_buffer.need(panels + size_t(ceil_div(m, 32)) * 4096);
    if (!memory) { failed = true; return; }
    float* sum = reinterpret_cast<float*>(memory + panels);
    start();
    for (int64_t tile = first; tile < last; ++tile) {
      engine.fused(job, tile, memory, sum);
      store(tile, 0, m, sum);
    }
    stop();
  }

  // The interface that sweep() and pass() call.
  void start() const { if (engine.begin) engine.begin(); }
  void stop() const { if (engine.end) engine.end(); }
  Job placed(int64_t row, char* memory) const {
    Job own = job;
    own.rows = memory;
    own.first = row;
    return own;
  }
  Job laid_out(int64_t row, int64_t rows, char* memory) const {
    if (!memory) return job;
    const Job own = placed(row, memory);
    for (const int64_t end = row + rows; row < end; ++row) lay_out(own, row);
    return own;
  }
  void lay_out_all(const Job& own, int64_t first, int64_t rows) const {
    const bool much = rows * weight.k >= (rounded ? kFewNumbers : 4 * kFewNumbers);   // rounding takes longer than copying
    const int64_t together = rounded ? 1 : 16;
    share(ceil_div(rows, together), much ? threads : 1, [&](int64_t i) {
      for (int64_t r = i * together, end = smaller(r + together, rows); r < end; ++r) lay_out(own, first + r);
    });
  }
  void unpack(const Panel& panel) const { (late() ? engine.look_up : engine.decode)(weight, panel); }
  void multiply(const Job& own, const Panel& panel, int64_t row, int64_t rows, float* sum, const Panel* next) const {
    if (next) engine.multiply_ahead(own, panel, row, rows, sum, *next, late());
    else engine.multiply(own, panel, row, rows, sum);
  }
  void done(int64_t tile, int64_t row, int64_t rows, float* sum) const {
    if (late()) engine.finish(job, tile, row, rows, sum);
    store(tile, row, rows, sum);
  }

  bool run(bool fused) {
    if (!fused && engine.passing) return pass(pass_plan(), static_cast<char*>(job.rows), *this) && !failed;
    lay_out_all(job, job.first, m - job.first);
    if (!fused) return sweep(plan(), *this) && !failed;
    share_ranges(tiles_of(weight), threads, [&](int64_t first, int64_t last) { run_fused(first, last); });
    return !failed;
  }
};

// Whether unscaled sums of x times table values of up to 2^16 stay in the range of float32 for any K: all of x must be
// below 2^80, and so it is when rounded. float16 always is.
bool sums_stay_in_range(const void* x, int32_t type, int64_t count) {
  constexpr uint16_t kLimit = (127 + 80) << 7;   // as the upper half of a float
  uint16_t most = 0;
  const auto take = [&](uint32_t upper) {
    const uint16_t size = upper & 0x7fff;
    most = size > most ? size : most;
  };
  if (type == BITPORT_BF16)
    for (int64_t i = 0; i < count; ++i) take(static_cast<const uint16_t*>(x)[i]);
  if (type == BITPORT_F32)
    for (int64_t i = 0; i < count; ++i) take(bits_of_float(static_cast<const float*>(x)[i]) >> 16);
  return most < kLimit;
}

}  // namespace

int32_t linear_of_floats(const Product& product, const Engine& engine, const RoundedRows* rounded) {
  const BitportTiles& w = product.weight;
  const int64_t m = product.m;
  const bool fused = engine.fuses && engine.fuses(w, m) && sums_stay_in_range(product.x, product.x_type, m * w.k);
  Call call(product, engine, rounded);
  const bool tiles_of_rows = engine.bf16 && !fused;   // a tile register takes 16 rows, whatever m is
  const bool passes = engine.passing && !fused;
  const int64_t block = passes ? engine.passing : m < 32 && !tiles_of_rows ? m : 32;
  const int64_t apart = fused || passes ? 0 : call.plan().rows_apart();   // rows that each thread lays out in its own memory
  const int64_t rows = passes ? call.pass_plan().laid_out() : ceil_div(m - apart, block) * block;
  const size_t row_bytes = aligned(size_t(rows) * call.row_bytes());
  const size_t sum_bytes = w.zero && (fused || call.late()) ? aligned(size_t(m * pieces_of(w, call.summed())) * 4) : 0;
  char* memory = call_buffer.need(row_bytes + sum_bytes + (product.bias ? size_t(w.n) * 4 : 0));
  if (!memory) return kNoMemory;
  if (sum_bytes) call.sums_of_x = reinterpret_cast<float*>(memory + row_bytes);
  call.bias_values = product.bias ? reinterpret_cast<float*>(memory + row_bytes + sum_bytes) : nullptr;
  if (product.bias) engine.widen(product.bias, product.y_type, w.n, reinterpret_cast<float*>(memory + row_bytes + sum_bytes));

  call.streams = engine.stream && !fused && lines_past_caches(product);
  call.job = Job{&w, memory, call.sums_of_x, m, block, rounded && rounded->in_blocks ? rounded->factors : nullptr, apart};
  const bool enough = call.run(fused);
  call_buffer.trim();
  return enough ? kOk : kNoMemory;
}

int32_t linear_as_is(const Product& product) {
  if (takes_digits(product)) {
    bool taken = false;
    const int32_t code = linear_digits(product, &taken);
    if (taken) return code;
  }
  return linear_of_floats(product, engine_for(product.isa, product.x_type, product.m), nullptr);
}

int32_t check_product(const BitportTiles* w, int32_t x_type, int64_t m, int32_t then, const void* times, int32_t isa) {
  if (const int32_t code = check_weight(w)) return code;
  if (m < 0 || m > kMost) return kBadShape;
  if (x_type < BITPORT_F32 || x_type > BITPORT_F16) return kBadType;
  if (then < BITPORT_NOTHING || then > BITPORT_SILU || (times && !then)) return kBadThen;
  return isa >= 0 && !bitport_has_isa(isa) ? kNoIsa : kOk;
}

}  // namespace bitport

int32_t bitport_linear(const BitportTiles* w, const void* x, int32_t x_type, int64_t m, const void* bias, int32_t then,
                       const void* times, void* y, int32_t threads, int32_t isa) {
  using namespace bitport;
  if (const int32_t code = check_product(w, x_type, m, then, times, isa)) return code;
  return multiply_checked(w, x, x_type, m, bias, then, times, y, threads, isa, linear_as_is);
}
