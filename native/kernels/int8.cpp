// y = round(x) W^T + bias in integers: rounds the rows of x and distributes the tiles of the weight over threads.
#include "activation.h"
#include "int8.h"
#include "number.h"
#include "pass.h"
#include "status.h"
#include "sweep.h"

namespace bitport {
namespace {

constexpr size_t kTileBytes = 1024;    // a tile register reads 16 rows of codes, whatever m is

thread_local Buffer call_buffer;

struct Int8Call : Product {
  const Int8Engine& engine;
  const Activate activate;
  decltype(Engine::store) const store;
  const int32_t act;
  const bool fused, passes, stays_int, streams;
  Int8Job job, ones;         // ones: a single row of them
  float* sums;
  Rounding* roundings;       // per row
  Rounding all;              // the rounding of every row, for BITPORT_INT8_TENSOR
  const float* bias_values;
  float* one_results;        // results for the row of ones, or null
  std::atomic<bool> failed{false};

  Int8Call(const Product& product, const Int8Engine& chosen, int32_t act)
      : Product(product), engine(chosen), activate(activate_for(product.isa)),
        store(engine_for(product.isa, BITPORT_F32, product.m).store), act(act), fused(chosen.fuses(product.weight, product.m)),
        passes(!fused && chosen.passing),
        stays_int(!fused && chosen.stays_int && chosen.stays_int(product.weight)),
        streams(!fused && chosen.streams && lines_past_caches(product)) {}

  const char* row_at(int64_t row) const { return static_cast<const char*>(x) + row * weight.k * width_of(x_type); }
  size_t panel_bytes() const { return size_t(engine.stretch * engine.item) * 32; }

  size_t row_bytes() const { return size_t(int8_steps(weight) * kInt8Step); }   // of a laid-out row
  Sweep plan() const {
    return {m,       tiles_of(weight), weight.k, engine.stretch, row_bytes(), 1, panel_bytes(),
            threads, engine.multiply_ahead != nullptr, engine.at_once};
  }

  Pass pass_plan() const {
    return {m, tiles_of(weight), weight.k, engine.stretch, engine.passing, row_bytes(), size_t(engine.item) * 32, threads};
  }

  // Divides the memory of the call; without memory, only returns the required size.
  size_t cut(char* memory, bool zeros) {
    const int64_t block = passes ? engine.passing : smaller(m, 32), apart = fused || passes ? 0 : plan().rows_apart();
    const int64_t rows = passes ? pass_plan().laid_out() : ceil_div(m - apart, block) * block;
    const int64_t stretch = stays_int ? kInt32Columns : passes ? pass_plan().span() : engine.stretch;
    const int64_t pieces = pieces_of(weight, stretch);
    size_t used = 0;
    const auto take = [&](size_t bytes) {
      char* at = memory ? memory + used : nullptr;
      used += aligned(bytes);
      return at;
    };
    int8_t* codes = reinterpret_cast<int8_t*>(take(size_t(rows) * row_bytes() + kTileBytes));
    sums = reinterpret_cast<float*>(take(size_t(m * pieces) * 4));
    roundings = reinterpret_cast<Rounding*>(take(size_t(m) * sizeof(Rounding)));
    float* bias_at = reinterpret_cast<float*>(take(bias ? size_t(weight.n) * 4 : 0));
    int8_t* one_codes = reinterpret_cast<int8_t*>(take(zeros ? row_bytes() : 0));
    const int64_t one_pieces = pieces_of(weight, engine.stretch);
    float* one_sums = reinterpret_cast<float*>(take(zeros ? size_t(one_pieces) * 4 : 0));
    float* results = reinterpret_cast<float*>(take(zeros ? size_t(tiles_of(weight)) * 128 : 0));
    if (!memory) return used;
    one_results = zeros ? results : nullptr;
    bias_values = bias ? bias_at : nullptr;
    if (bias)
      for (int64_t j = 0; j < weight.n; ++j) bias_at[j] = load_number(bias, x_type, j);
    job = {&weight, codes, sums, m, block, stretch, apart};
    if (zeros) {
      std::memset(one_codes, 1, size_t(weight.k));
      std::memset(one_codes + weight.k, 0, row_bytes() - size_t(weight.k));
      ones = {&weight, one_codes, one_sums, 1, 1, engine.stretch};
      for (Pieces piece(weight, engine.stretch, 0); piece.begin < weight.k; piece.next())
        one_sums[piece.index] = float(piece.end - piece.begin);
    }
    return used;
  }

  // Calls work on every row, with several threads if there is enough to do.
  template <class Work>
  void each_row(int64_t first, int64_t rows, const Work& work) const {
    constexpr int64_t kAlone = 1 << 16;   // numbers
    share_ranges(rows, rows * weight.k > kAlone ? threads : 1, [&](int64_t row, int64_t end) {
      for (; row < end; ++row) work(first + row);
    });
  }

  // The rounding for all of x.
  Rounding measure() {
    each_row(0, m, [&](int64_t row) {   // roundings temporarily hold the ranges
      engine.range(row_at(row), x_type, weight.k, &roundings[row].scale, &roundings[row].zero);
    });
    float low = 0, high = 0;   // a NaN is propagated
    for (int64_t row = 0; row < m; ++row) {
      const Rounding own = roundings[row];
      if (own.scale < low || own.scale != own.scale) low = own.scale;
      if (own.zero > high || own.zero != own.zero) high = own.zero;
    }
    return rounding_of(low, high, x_type, BITPORT_INT8_TENSOR);
  }

  void round_row(const Int8Job& rows, int64_t row) const {
    const int64_t k_end = weight.k, filled = int64_t(row_bytes());
    const char* from = row_at(row);
    if (act == BITPORT_INT8_TENSOR) {
      roundings[row] = all;
    } else {
      float low, high;
      engine.range(from, x_type, k_end, &low, &high);
      roundings[row] = rounding_of(low, high, x_type, act);
    }
    int8_t* to = rows.rows + (codes_at(rows, row, 0) - rows.rows);
    const int64_t next = job.block * kInt8Step;
    for (Pieces piece(weight, job.stretch, 0); piece.begin < k_end; piece.next()) {
      const int64_t k = piece.begin;
      sums[piece.index * m + row] =
          float(engine.round(from + k * width_of(x_type), x_type, piece.end - k, roundings[row],
                             to + k / kInt8Step * next, k % kInt8Step, next));
    }
    const int64_t written = ceil_div(k_end, 16) * 16;
    std::memset(to + written / kInt8Step * next + written % kInt8Step, 0, size_t(filled - written));
  }

  void multiply_ones() {
    share_ranges(tiles_of(weight), threads, [&](int64_t tile, int64_t end) {
      char* panel = own_buffer.need(aligned(panel_bytes()));
      if (!panel) { failed = true; return; }
      for (; tile < end; ++tile) engine.fused(ones, tile, panel, one_results + tile * 32);
    });
  }

  void finish(int64_t tile, int64_t row, int64_t rows, float* sum) const {
    const float* one_sums = one_results ? one_results + tile * 32 : nullptr;
    const int64_t n = tile * 32, count = smaller(weight.n - n, 32);
    const float* own_bias = bias_values ? bias_values + n : nullptr;
    char* to = static_cast<char*>(y) + (row * weight.n + n) * width_of(x_type);
    const int64_t next = weight.n * width_of(x_type);
    if (!then) {
      for (int64_t r = 0; r < rows; ++r, to += next)
        engine.finish(sum + r * 32, one_sums, roundings[row + r], count, own_bias, to, x_type, streams && count == 32);
      return;
    }
    const char* factor = times ? static_cast<const char*>(times) + (to - static_cast<char*>(y)) : nullptr;
    for (int64_t first = 0; first < rows; first += kActivated) {
      const int64_t last = smaller(first + kActivated, rows);
      for (int64_t r = first; r < last; ++r)
        engine.finish(sum + r * 32, one_sums, roundings[row + r], 32, nullptr, sum + r * 32, BITPORT_F32, false);
      activate({then, own_bias, factor ? factor + first * next : nullptr, x_type, weight.n, count}, sum + first * 32,
               last - first);
      for (int64_t r = first; r < last; ++r, to += next) store(sum + r * 32, count, nullptr, to, x_type);
    }
  }

  void run_fused(int64_t first, int64_t last) {
    const size_t panel = aligned(panel_bytes());
    char* memory = own_buffer.need(panel + size_t(ceil_div(m, 32) * 32) * 128);
    if (!memory) { failed = true; return; }
    float* sum = reinterpret_cast<float*>(memory + panel);
    start();
    for (int64_t tile = first; tile < last; ++tile) {
      engine.fused(job, tile, memory, sum);
      finish(tile, 0, m, sum);
    }
    stop();
  }

  // The interface that sweep() and pass() call.
  void start() const { if (engine.begin) engine.begin(weight); }
  void stop() const { if (engine.end) engine.end(); }
  Int8Job placed(int64_t row, char* memory) const {
    Int8Job own = job;
    own.rows = reinterpret_cast<int8_t*>(memory);
    own.first = row;
    return own;
  }
  Int8Job laid_out(int64_t row, int64_t rows, char* memory) const {
    if (!memory) return job;
    const Int8Job own = placed(row, memory);
    for (const int64_t end = row + rows; row < end; ++row) round_row(own, row);
    return own;
  }
  void lay_out_all(const Int8Job& own, int64_t first, int64_t rows) const {
    each_row(first, rows, [&](int64_t row) { round_row(own, row); });
  }
  void unpack(const Panel& panel) const { engine.unpack(weight, panel); }
  void multiply(const Int8Job& own, const Panel& panel, int64_t row, int64_t rows, float* sum, const Panel* next) const {
    if (next) engine.multiply_ahead(own, panel, row, rows, sum, *next);
    else engine.multiply(own, panel, row, rows, sum);
  }
  void done(int64_t tile, int64_t row, int64_t rows, float* sum) const {
    if (stays_int) engine.settle(job, tile, row, rows, sum);
    finish(tile, row, rows, sum);
  }

  bool run() {
    if (passes) return pass(pass_plan(), reinterpret_cast<char*>(job.rows), *this) && !failed;
    lay_out_all(job, job.first, m - job.first);
    if (!fused) return sweep(plan(), *this) && !failed;
    share_ranges(tiles_of(weight), threads, [&](int64_t first, int64_t last) { run_fused(first, last); });
    return !failed;
  }
};

}  // namespace

int32_t linear_int8(const Product& product, int32_t act, const float* act_scale) {
  Int8Call call(product, int8_engine_for(product.isa, product.weight), act);
  const bool zeros = act == BITPORT_INT8_ROW_ASYM;
  char* memory = call_buffer.need(call.cut(nullptr, zeros));
  if (!memory) return kNoMemory;
  call.cut(memory, zeros);
  if (act == BITPORT_INT8_TENSOR) call.all = act_scale ? Rounding{*act_scale, 0} : call.measure();
  if (zeros) call.multiply_ones();
  const bool enough = call.run();
  call_buffer.trim();
  return enough ? kOk : kNoMemory;
}

const Int8Engine& int8_engine_for(int32_t isa, const BitportTiles& weight) {
#if BITPORT_X86
  const bool steps_fit = weight.group % 32 == 0 || weight.group >= weight.k;   // within a step of a tile register
  if (isa == BITPORT_AMX && steps_fit) return amx_int8_engine;
  if (isa >= BITPORT_AVX512_VNNI) return avx512_int8_engine;
  if (isa == BITPORT_AVX2) return avx2_int8_engine;
#elif BITPORT_ARM
  if (isa == BITPORT_NEON_MATRIX) return neon_matrix_int8_engine;
  if (isa == BITPORT_NEON_DOT) return neon_dot_int8_engine;
  if (isa == BITPORT_NEON) return neon_int8_engine;
#endif
  (void)isa, (void)weight;
  return scalar_int8_engine;
}

}  // namespace bitport
