// A float weight to dense codes, scales and zeros, bit-identical to bitport.numerics.quantize. A row is measured, then
// encoded while it is in the cache; if a block has several rows, all of them are measured first.
#include "quantize.h"
#include <atomic>
#include "buffer.h"
#include "engine.h"
#include "number.h"
#include "share.h"
#include "status.h"
#include "tiles.h"

namespace bitport {
namespace {

constexpr int64_t kPiece = 1024;     // columns encoded at once; their codes fill whole bytes
constexpr int64_t kGrain = 1 << 14;  // elements for which another thread pays off

thread_local Buffer block_buffer;

struct Quantizing {
  const BitportFormat& format;
  const char* x;
  int32_t type;
  int64_t n, k;
  uint8_t* codes;
  void *scale, *zero;
  float* scale2;
  const Loops& loops;
  const Engine& engine;
  Loops::Encode encode;
  Scales scales{format, type};

  int64_t columns() const { return ceil_div(k, format.block_k); }   // in blocks
  int64_t strips() const { return ceil_div(n, format.block_n); }
  int64_t width() const { return width_of(type); }
  const char* row_at(int64_t row) const { return x + row * k * width(); }

  void measure(int64_t row, Range* ranges) const { measure(row, format.block_k, ranges); }
  void measure(int64_t row, int64_t block, Range* ranges) const {
    (type == BITPORT_F32 ? loops.measure32 : loops.measure16)(row_at(row), k, block, ranges);
  }

  void choose(int64_t strip, const Range* ranges, Step* steps) const {
    scales.choose(ranges, columns(), scale, zero, strip * columns(), steps);
  }

  // next: a row needed after this one; it is prefetched while encoding leaves the memory idle.
  void write(int64_t row, const Step* steps, int64_t next) const {
    alignas(64) float wide[kPiece];
    alignas(64) uint8_t apart[kPiece];
    const int64_t bits = format.bits;
    uint8_t* to = codes + row * ceil_div(k * bits, 8);
    for (int64_t from = 0; from < k; from += kPiece) {
      const int64_t end = smaller(from + kPiece, k), count = end - from;
      const char* numbers = row_at(row) + from * width();
      if (next < n)
        for (int64_t at = from * width(); at < end * width(); at += 64) __builtin_prefetch(row_at(next) + at);
      uint8_t* dense = to + from * bits / 8;
      uint8_t* bytes = bits == 8 ? dense : apart;
      if (type == BITPORT_F16) {
        engine.widen(numbers, type, count, wide);
        encode(format, wide, BITPORT_F32, from, end, steps, bytes);
      } else {
        encode(format, numbers, type, from, end, steps, bytes);
      }
      if (bits < 8) loops.pack(apart, count, format.bits, dense);
    }
  }

  // Quantizes a strip (a row of blocks).
  bool strip(int64_t at) const {
    const int64_t first = at * format.block_n, end = smaller(format.block_n, n - first) + first;
    char* memory = block_buffer.need(size_t(columns()) * (sizeof(Range) + sizeof(Step)));
    if (!memory) return false;
    Step* steps = reinterpret_cast<Step*>(memory);
    Range* ranges = reinterpret_cast<Range*>(steps + columns());
    for (int64_t i = 0; i < columns(); ++i) ranges[i] = Range();
    for (int64_t row = first; row < end; ++row) measure(row, ranges);
    choose(at, ranges, steps);
    for (int64_t row = first; row < end; ++row) write(row, steps, row + format.block_n);
    return true;
  }

  // For fewer strips than threads: threads share the rows, first to measure, then to write them.
  bool tall(int32_t threads) const {
    const int64_t blocks = strips() * columns();
    Buffer memory;
    char* place = memory.need(size_t(blocks) * sizeof(Step) + size_t(n * columns() + columns()) * sizeof(Range));
    if (!place) return false;
    Step* steps = reinterpret_cast<Step*>(place);
    Range* ranges = reinterpret_cast<Range*>(steps + blocks);
    for (int64_t i = 0; i < n * columns(); ++i) ranges[i] = Range();
    share(n, threads, [&](int64_t row) { measure(row, ranges + row * columns()); });
    for (int64_t at = 0; at < strips(); ++at) {
      Range* merged = ranges + at * format.block_n * columns();
      for (int64_t row = 1; row < smaller(format.block_n, n - at * format.block_n); ++row)
        for (int64_t i = 0; i < columns(); ++i) merged[i].add(merged[row * columns() + i]);
      choose(at, merged, steps + at * columns());
    }
    share(n, threads, [&](int64_t row) { write(row, steps + row / format.block_n * columns(), row + threads); });
    return true;
  }

  // The largest magnitude over all finite blocks; the blocks of a strip are only distinguished if it has non-finite
  // numbers.
  bool measure_all(int32_t threads, float* amax) const {
    std::atomic<uint32_t> most{0};
    std::atomic<bool> failed{false};
    share(strips(), threads, [&](int64_t at) {
      const int64_t first = at * format.block_n, end = smaller(first + format.block_n, n);
      Range whole;
      for (int64_t row = first; row < end; ++row) measure(row, k, &whole);
      uint32_t found = 0;
      const auto finite = [&](const Range& range) {
        const float size = scales.amax(range);
        if (size == size && bits_of_float(size) > found) found = bits_of_float(size);
        return size == size;
      };
      if (!finite(whole)) {
        Range* ranges = reinterpret_cast<Range*>(block_buffer.need(size_t(columns()) * sizeof(Range)));
        if (!ranges) { failed = true; return; }
        for (int64_t i = 0; i < columns(); ++i) ranges[i] = Range();
        for (int64_t row = first; row < end; ++row) measure(row, ranges);
        for (int64_t i = 0; i < columns(); ++i) finite(ranges[i]);
      }
      for (uint32_t seen = most; found > seen && !most.compare_exchange_weak(seen, found);) {}
    });
    *amax = float_of_bits(most);
    return !failed;
  }

  bool run(int32_t threads) {
    if (n * k < 2 * kGrain) threads = 1;
    if (format.global) {
      float amax;
      if (!measure_all(threads, &amax)) return false;
      scales.measured(amax);
      *scale2 = scales.global();
    }
    if (strips() < threads) return tall(threads);
    const int64_t together = kGrain / (smaller(format.block_n, n) * k) + 1;   // strips
    std::atomic<bool> failed{false};
    share(ceil_div(strips(), together), threads, [&](int64_t i) {
      for (int64_t at = i * together; at < smaller((i + 1) * together, strips()); ++at)
        if (!strip(at)) failed = true;
    });
    return !failed;
  }
};

int32_t check(const BitportFormat& f, int32_t x_type, int64_t n, int64_t k) {
  if (n < 0 || k <= 0 || n > kMost || k > kMost || f.bits < 1 || f.bits > 8) return kBadShape;
  if (f.block_n <= 0 || f.block_k <= 0) return kBadGroup;
  if (!is_float(x_type) || f.scale_type == BITPORT_U8 || f.scale_type < BITPORT_F32 || f.scale_type > BITPORT_E4M3)
    return kBadType;
  if (f.kind < BITPORT_INTEGER || f.kind > BITPORT_CODEBOOK || !(f.largest > 0 && f.largest <= 0x1p16f)) return kBadType;
  if (f.rule < BITPORT_FLOOR || f.rule > BITPORT_RCEIL || f.mantissa < 0 || f.mantissa > 22) return kBadType;
  const bool zero = f.zero_type >= 0;
  if (zero && (f.kind != BITPORT_INTEGER || !is_float(f.scale_type))) return kBadType;
  if (zero && f.zero_type != BITPORT_U8 && f.zero_type != f.scale_type) return kBadType;
  return f.global && f.scale_type != BITPORT_E4M3 ? kBadType : kOk;
}

}  // namespace
}  // namespace bitport

int32_t bitport_quantize(const BitportFormat* format, const void* x, int32_t x_type, int64_t count, int64_t n, int64_t k,
                         const BitportPlaces* to, int32_t threads, int32_t isa) {
  using namespace bitport;
  if (!format || !to) return kNullPointer;
  if (const int32_t code = check(*format, x_type, n, k)) return code;
  if (count < 0 || count > kMost || to->codes_apart < 0 || to->scale_apart < 0 || to->zero_apart < 0) return kBadShape;
  if (isa < 0) isa = bitport_best_isa();
  if (!bitport_has_isa(isa)) return kNoIsa;
  const Loops& loops = loops_of(isa);
  const Loops::Encode encode = loops.encode(*format);
  if (!encode) return kBadType;
  if (n == 0 || count == 0) return kOk;
  if (!x || !to->codes || !to->scale || (format->zero_type >= 0 && !to->zero) || (format->global && !to->scale2) ||
      (format->kind == BITPORT_CODEBOOK && !format->thresholds))
    return kNullPointer;
  BitportFormat f = *format;
  f.block_n = smaller(f.block_n, n);
  f.block_k = smaller(f.block_k, k);
  const auto quantize = [&](int64_t at, int32_t its_threads) {
    Quantizing work{f, static_cast<const char*>(x) + at * n * k * width_of(x_type), x_type, n, k,
                    to->codes + at * to->codes_apart, static_cast<char*>(to->scale) + at * to->scale_apart,
                    to->zero ? static_cast<char*>(to->zero) + at * to->zero_apart : nullptr,
                    to->scale2 ? to->scale2 + at : nullptr, loops, engine_for(isa, BITPORT_F32, 1), encode};
    return work.run(its_threads);
  };
  std::atomic<bool> failed{false};
  if (n * k >= 2 * kGrain) {
    for (int64_t at = 0; at < count && !failed; ++at)
      if (!quantize(at, threads)) failed = true;
  } else {   // too small to be shared
    const int64_t together = kGrain / (n * k) + 1;
    share(ceil_div(count, together), count < 2 * together ? 1 : threads, [&](int64_t i) {
      for (int64_t at = i * together; at < smaller((i + 1) * together, count); ++at)
        if (!quantize(at, 1)) failed = true;
    });
  }
  return failed ? kNoMemory : kOk;
}
