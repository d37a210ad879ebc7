// What this machine can do at best: how fast it reads memory, and how fast each of its multiply units runs on operands
// that stay in registers. Usage: limits THREADS MEGABYTES SECONDS; prints lines "name figure", GB/s or 10^9 ops/s.
// With a fourth argument, any, it only reads memory, anew for every line of its input.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define X86 1
#else
#define X86 0
#endif

using Clock = std::chrono::steady_clock;

static double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The rate of all threads together: each does `work` (returns how much it did) until the time is over.
static double rate(int threads, double seconds, const std::function<double(int)>& work) {
  std::vector<std::thread> all;
  std::vector<double> rates(threads);
  std::atomic<int> ready{0};
  for (int t = 0; t < threads; t++)
    all.emplace_back([&, t] {
      work(t);   // first touch, clocks up
      ready++;
      while (ready.load() < threads) std::this_thread::yield();
      const auto start = Clock::now();
      double done = 0;
      do done += work(t); while (seconds_since(start) < seconds);
      rates[t] = done / seconds_since(start);
    });
  for (auto& each : all) each.join();
  double sum = 0;
  for (double each : rates) sum += each;
  return sum;
}

static volatile int64_t sink;

static void read_plain(const char* p, size_t size) {
  int64_t sum[8] = {};
  const int64_t* v = reinterpret_cast<const int64_t*>(p);
  for (size_t i = 0; i < size / 8; i += 8)
    for (int j = 0; j < 8; j++) sum[j] += v[i + j];
  sink = sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
}

#if X86
static bool bit(int leaf, int sub, int reg, int at) {
  unsigned r[4] = {};
  return __get_cpuid_count(leaf, sub, &r[0], &r[1], &r[2], &r[3]) && (r[reg] >> at & 1);
}

// Prefetching by hand keeps more lines under way than the hardware's own prefetcher does.
__attribute__((target("avx512f"))) static void read_avx512(const char* p, size_t size) {
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  for (size_t i = 0; i < size; i += 256) {
    for (int j = 0; j < 4; j++) _mm_prefetch(p + i + 4096 + 64 * j, _MM_HINT_T0);
    a = _mm512_add_epi64(a, _mm512_loadu_si512(p + i));
    b = _mm512_add_epi64(b, _mm512_loadu_si512(p + i + 64));
    c = _mm512_add_epi64(c, _mm512_loadu_si512(p + i + 128));
    d = _mm512_add_epi64(d, _mm512_loadu_si512(p + i + 192));
  }
  sink = _mm512_reduce_add_epi64(_mm512_add_epi64(_mm512_add_epi64(a, b), _mm512_add_epi64(c, d)));
}

constexpr int kRounds = 20000;

// What is multiplied: a processor that multiplies zeros draws less power and keeps a higher clock than with any real product.
// Floats of both signs around 1, with every bit of their mantissa in use; bytes of all values.
enum Kind { kBytes, kFloat32, kBfloat16 };
template <Kind kKind> static const char* numbers() {
  constexpr int kSize = 4096;
  alignas(64) static char data[kSize];
  static const bool filled = [] {
    uint32_t state = 1;
    for (int i = 0; i < kSize; i += 4) {
      state = state * 1664525u + 1013904223u;
      uint32_t bits = state ^ state >> 15;
      if (kKind == kFloat32) bits = 0x3f000000u | (bits & 0x80ffffffu);
      if (kKind == kBfloat16) bits = 0x3f003f00u | (bits & 0x80ff80ffu);
      memcpy(data + i, &bits, 4);
    }
    return true;
  }();
  (void)filled;
  return data;
}

// Eight or more independent sums hide the latency of the unit. The empty asm keeps what a step computes of `one` alone
// from being computed once for all.
#define SUMS 12
#define UNIT(name, isa, type, kind, zero, step)                       \
  __attribute__((target(isa))) static void name() {                  \
    type sum[SUMS], one;                                              \
    memcpy(&one, numbers<kind>(), sizeof one);                        \
    for (auto& each : sum) each = zero;                               \
    for (int i = 0; i < kRounds; i++) {                               \
      _Pragma("GCC unroll 12") for (int j = 0; j < SUMS; j++) {       \
        sum[j] = step;                                                \
        asm volatile("" : "+x"(one));                                 \
      }                                                               \
    }                                                                 \
    for (int j = 1; j < SUMS; j++) asm volatile("" ::"x"(sum[j]));    \
    asm volatile("" ::"x"(sum[0]));                                   \
  }
UNIT(avx2_f32, "avx2,fma", __m256, kFloat32, _mm256_setzero_ps(), _mm256_fmadd_ps(one, one, sum[j]))
UNIT(avx2_int8, "avx2", __m256i, kBytes, _mm256_setzero_si256(),
     _mm256_add_epi32(sum[j], _mm256_madd_epi16(_mm256_maddubs_epi16(one, one), one)))
UNIT(avx512_f32, "avx512f", __m512, kFloat32, _mm512_setzero_ps(), _mm512_fmadd_ps(one, one, sum[j]))
UNIT(avx512_int8, "avx512f,avx512vnni", __m512i, kBytes, _mm512_setzero_si512(), _mm512_dpbusd_epi32(sum[j], one, one))
UNIT(avx512_bf16, "avx512f,avx512bf16", __m512, kBfloat16, _mm512_setzero_ps(),
     _mm512_dpbf16_ps(sum[j], (__m512bh)one, (__m512bh)one))
#undef UNIT

#define TILES __attribute__((target("amx-tile,amx-int8,amx-bf16")))
struct __attribute__((packed)) TileShape {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// Two tiles of each operand loaded from the first-level cache for four products, as a kernel does.
template <bool kBf16> TILES static void tiles() {
  TileShape shape;
  for (int i = 0; i < 8; i++) shape.rows[i] = 16, shape.bytes[i] = 64;
  asm volatile("" ::"r"(&shape) : "memory");   // g++ 12 believes that the configuration is never read
  _tile_loadconfig(&shape);
  const char* data = numbers<kBf16 ? kBfloat16 : kBytes>();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int i = 0; i < kRounds / 16; i++) {
    _tile_loadd(4, data, 64);
    _tile_loadd(5, data + 1024, 64);
    _tile_loadd(6, data + 2048, 64);
    _tile_loadd(7, data + 3072, 64);
    if constexpr (kBf16) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    } else {
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
  }
  _tile_release();
}
constexpr double kTileOps = kRounds / 16 * 4 * 2.0 * 16 * 16;   // times the depth of a tile
#endif

struct Unit {
  const char* name;
  bool present;
  void (*run)();
  double ops;   // multiplications and additions of one run
};

int main(int argc, char** argv) {
  if (argc != 4 && argc != 5) return fprintf(stderr, "usage: limits THREADS MEGABYTES SECONDS [again]\n"), 2;
  const int threads = atoi(argv[1]);
  const size_t each = (size_t(atoi(argv[2])) << 20) / threads & ~size_t(4095);
  const double seconds = atof(argv[3]);
  std::vector<char*> parts(threads);
  for (auto& part : parts) {   // with room behind for prefetches
    constexpr size_t kPage = size_t(2) << 20;   // large ones are read faster, where the system gives them
    part = static_cast<char*>(aligned_alloc(kPage, (each + 8192 + kPage - 1) / kPage * kPage));
    if (!part) return fprintf(stderr, "no memory for the buffer\n"), 1;
#if defined(__linux__)
    madvise(part, each + 8192, MADV_HUGEPAGE);
#endif
    memset(part, 1, each + 8192);
  }
#if X86
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f"), avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  const auto print_read = [&] {
    double read = rate(threads, seconds, [&](int t) { return read_plain(parts[t], each), double(each); });
#if X86
    if (avx512)
      read = std::max(read, rate(threads, seconds, [&](int t) { return read_avx512(parts[t], each), double(each); }));
#endif
    printf("read %.2f\n", read / 1e9);
  };
  if (argc == 5) {
    for (int c; (c = getchar()) != EOF;)
      if (c == '\n') print_read(), fflush(stdout);
    return 0;
  }
  print_read();
#if X86
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  const bool tile = bit(7, 0, 3, 24) && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  const double lanes = 2.0 * kRounds * SUMS;
  const Unit units[] = {
      {"avx2_f32", avx2, avx2_f32, lanes * 8},
      {"avx2_int8", avx2, avx2_int8, lanes * 32},
      {"avx512_f32", avx512, avx512_f32, lanes * 16},
      {"avx512_int8", avx512 && __builtin_cpu_supports("avx512vnni"), avx512_int8, lanes * 64},
      {"avx512_bf16", avx512 && bit(7, 1, 0, 5), avx512_bf16, lanes * 32},
      {"amx_bf16", tile && bit(7, 0, 3, 22), tiles<true>, kTileOps * 32},
      {"amx_int8", tile && bit(7, 0, 3, 25), tiles<false>, kTileOps * 64},
  };
  for (const Unit& unit : units)
    if (unit.present)
      printf("%s %.2f\n", unit.name, rate(threads, seconds, [&](int) { return unit.run(), unit.ops; }) / 1e9);
#endif
}
