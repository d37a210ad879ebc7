#include "bytes.h"
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <array>
#include <cerrno>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace bitport::runner {
namespace {

// table[k][b]: the contribution of byte b to the checksum, k bytes before the end.
using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables tables() {
  Tables made{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t sum = b;
    for (int bit = 0; bit < 8; ++bit) sum = sum >> 1 ^ (sum & 1 ? 0xedb88320u : 0);
    made[0][b] = sum;
  }
  for (size_t k = 1; k < made.size(); ++k)
    for (size_t b = 0; b < 256; ++b) made[k][b] = made[k - 1][b] >> 8 ^ made[0][made[k - 1][b] & 255];
  return made;
}

constexpr Tables kTables = tables();

#if defined(__x86_64__)
// Folds a multiple of 64 bytes, 64 at a time, by carry-less products. Bits that are n bits before the end contribute
// their product with x^n mod P: `far` moves the halves of a register by 512 bits, `near` by 128 (bit-reversed, like
// everything in this checksum). The remaining 16 bytes have the same remainder as the whole, and are left to the
// tables.
__attribute__((target("pclmul,sse4.1"))) void fold(const uint8_t* at, const uint8_t* end, uint32_t sum, uint8_t* left) {
  const auto load = [](const uint8_t* from) __attribute__((target("pclmul,sse4.1"))) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  };
  const auto moved = [](__m128i x, __m128i by) __attribute__((target("pclmul,sse4.1"))) {
    return _mm_xor_si128(_mm_clmulepi64_si128(x, by, 0x00), _mm_clmulepi64_si128(x, by, 0x11));
  };
  const __m128i far = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), near = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
  __m128i x[4];
  for (int i = 0; i < 4; ++i) x[i] = load(at + 16 * i);
  x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128(int(sum)));
  for (at += 64; at != end; at += 64)
    for (int i = 0; i < 4; ++i) x[i] = _mm_xor_si128(moved(x[i], far), load(at + 16 * i));
  for (int i = 1; i < 4; ++i) x[i] = _mm_xor_si128(moved(x[i - 1], near), x[i]);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(left), x[3]);
}

bool folds() { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }
#endif

uint32_t by_tables(const uint8_t* at, const uint8_t* end, uint32_t sum) {
  for (; end - at >= 8; at += 8) {   // eight bytes at a time, each with its own table
    uint64_t word;
    std::memcpy(&word, at, 8);
    word ^= sum;
    sum = 0;
    for (int k = 0; k < 8; ++k) sum ^= kTables[7 - k][word >> 8 * k & 255];
  }
  for (; at != end; ++at) sum = sum >> 8 ^ kTables[0][(sum ^ *at) & 255];
  return sum;
}

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) fail(path, ": ", std::strerror(errno));
  struct stat about{};
  if (fstat(file, &about) || !S_ISREG(about.st_mode)) {
    close(file);
    fail(path, ": not a file");
  }
  bytes_.size = uint64_t(about.st_size);
  void* const pages = bytes_.size ? mmap(nullptr, bytes_.size, PROT_READ, MAP_PRIVATE, file, 0) : nullptr;
  const int reason = errno;
  close(file);
  if (pages == MAP_FAILED) fail(path, ": cannot be mapped: ", std::strerror(reason));
  bytes_.data = static_cast<const uint8_t*>(pages);
}

MappedFile::~MappedFile() {
  if (bytes_.size) munmap(const_cast<uint8_t*>(bytes_.data), bytes_.size);
}

uint32_t crc32(Bytes bytes) {
  uint32_t sum = ~0u;
  const uint8_t *at = bytes.data, *const end = at + bytes.size;
#if defined(__x86_64__)
  if (bytes.size >= 64 && folds()) {
    uint8_t left[16];
    const uint8_t* const whole = at + bytes.size / 64 * 64;
    fold(at, whole, sum, left);
    sum = by_tables(left, left + 16, 0);
    at = whole;
  }
#endif
  return ~by_tables(at, end, sum);
}

}  // namespace bitport::runner
