#include "bytes.h"
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <array>
#include <cerrno>

namespace bitport::runner {
namespace {

// table[k][b]: what a byte b does to the sum, k bytes before its end.
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
  for (; end - at >= 8; at += 8) {   // eight bytes at once, each by its own table
    uint64_t word;
    std::memcpy(&word, at, 8);
    word ^= sum;
    sum = 0;
    for (int k = 0; k < 8; ++k) sum ^= kTables[7 - k][word >> 8 * k & 255];
  }
  for (; at != end; ++at) sum = sum >> 8 ^ kTables[0][(sum ^ *at) & 255];
  return ~sum;
}

}  // namespace bitport::runner
