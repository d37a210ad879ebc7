// The checksum of a message: its remainder, as a polynomial over GF(2), divided by P. The first bit of a byte is the
// lowest, and has the highest power of x, so that numbers here have bit k of a polynomial of degree 31 in bit 31 - k.
#include "cpu.h"
#include "engine.h"
#include <array>
#include <cstring>
#if BITPORT_X86
#include <immintrin.h>
#define TARGET __attribute__((target("pclmul,sse4.1")))
#elif BITPORT_ARM
#include <arm_acle.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(__clang__)
#define TARGET __attribute__((target("crc")))
#else
#define TARGET __attribute__((target("+crc")))
#endif
#endif

namespace bitport {
namespace {

constexpr uint32_t kP = 0xedb88320;   // without x^32

constexpr uint32_t times_x(uint32_t sum) { return sum >> 1 ^ (sum & 1 ? kP : 0); }

// table[k][b]: the remainder of byte b with k bytes of zeros and 32 bits behind it.
using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables tables() {
  Tables made{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t sum = b;
    for (int bit = 0; bit < 8; ++bit) sum = times_x(sum);
    made[0][b] = sum;
  }
  for (size_t k = 1; k < made.size(); ++k)
    for (size_t b = 0; b < 256; ++b) made[k][b] = made[k - 1][b] >> 8 ^ made[0][made[k - 1][b] & 255];
  return made;
}

constexpr Tables kTables = tables();

uint32_t by_tables(const uint8_t* at, const uint8_t* end, uint32_t sum) {
  for (; end - at >= 8; at += 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    word ^= sum;
    sum = 0;
    for (int k = 0; k < 8; ++k) sum ^= kTables[size_t(7 - k)][word >> 8 * k & 255];
  }
  for (; at != end; ++at) sum = sum >> 8 ^ kTables[0][(sum ^ *at) & 255];
  return sum;
}

#if BITPORT_X86
constexpr int64_t kFolded = 64;   // bytes at a time

// x^n mod P. A product of two numbers with their bits reversed comes out shifted right by one, hence the shift.
constexpr int64_t x_to(int n) {
  uint32_t power = 1u << 31;
  for (; n; --n) power = times_x(power);
  return int64_t(power) << 1;
}

constexpr int64_t kFirst = x_to(512 + 32), kLast = x_to(512 - 32);

TARGET inline __m128i load(const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }

// Adds whatever is 512 bits in front of a register to it, as a polynomial of the same remainder: the product of its
// first 64 bits, which are 64 bits further in front of the last one, with x^(512 + 32), and of its last with x^(512 - 32).
TARGET inline __m128i folded(__m128i in_front, __m128i here) {
  const __m128i by = _mm_set_epi64x(kLast, kFirst);
  const __m128i first = _mm_clmulepi64_si128(in_front, by, 0x00), last = _mm_clmulepi64_si128(in_front, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(first, last), here);
}

// Writes the `last` bytes of a message with the remainder of the one from `at` to `end`, a multiple of them.
TARGET void fold(const uint8_t* at, const uint8_t* end, uint32_t sum, uint8_t (&last)[kFolded]) {
  __m128i x[4];
  for (int i = 0; i < 4; ++i) x[i] = load(at + 16 * i);
  x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128(int32_t(sum)));
  for (at += kFolded; at != end; at += kFolded)
    for (int i = 0; i < 4; ++i) x[i] = folded(x[i], load(at + 16 * i));
  for (int i = 0; i < 4; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(last + 16 * i), x[i]);
}

uint32_t checksum(const uint8_t* at, const uint8_t* end, uint32_t sum) {
  if (cpu().crc && end - at >= 2 * kFolded) {
    uint8_t last[kFolded];
    const uint8_t* const whole = at + (end - at) / kFolded * kFolded;
    fold(at, whole, sum, last);
    sum = by_tables(last, last + kFolded, 0);
    at = whole;
  }
  return by_tables(at, end, sum);
}
#elif BITPORT_ARM
// This architecture divides by P itself; its first version need not.
bool divides() {
#if defined(__APPLE__)
  return true;
#else
  return getauxval(AT_HWCAP) >> 7 & 1;   // CRC32
#endif
}

TARGET uint32_t by_words(const uint8_t* at, const uint8_t* end, uint32_t sum) {
  for (; end - at >= 8; at += 8) {
    uint64_t word;
    __builtin_memcpy(&word, at, 8);
    sum = __crc32d(sum, word);
  }
  for (; at != end; ++at) sum = __crc32b(sum, *at);
  return sum;
}

uint32_t checksum(const uint8_t* at, const uint8_t* end, uint32_t sum) {
  static const bool own = divides();
  return own ? by_words(at, end, sum) : by_tables(at, end, sum);
}
#else
uint32_t checksum(const uint8_t* at, const uint8_t* end, uint32_t sum) { return by_tables(at, end, sum); }
#endif

}  // namespace
}  // namespace bitport

uint32_t bitport_crc32(const void* data, int64_t size, uint32_t before) {
  const uint8_t* const at = static_cast<const uint8_t*>(data);
  return ~bitport::checksum(at, at + size, ~before);
}
