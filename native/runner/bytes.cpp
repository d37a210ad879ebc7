#include "bytes.h"
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cerrno>
#include "../kernels/bitport_kernels.h"

namespace bitport::runner {

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

uint32_t crc32(Bytes bytes) { return bitport_crc32(bytes.data, int64_t(bytes.size), 0); }

}  // namespace bitport::runner
