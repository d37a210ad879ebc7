// A view of memory owned by others, and a file mapped for reading. Every access is bounds-checked, so that no content
// of a file can lead to an invalid address.
#pragma once
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include "failure.h"

namespace bitport::runner {

struct Bytes {
  const uint8_t* data = nullptr;
  uint64_t size = 0;

  Bytes part(uint64_t offset, uint64_t count) const {
    if (offset > size || count > size - offset)
      fail("bytes ", offset, " to ", offset, " + ", count, " are wanted of ", size, ": the file is cut off or damaged");
    return {data + offset, count};
  }

  // A little-endian number.
  template <typename Number>
  Number number(uint64_t offset) const {
    Number value;
    std::memcpy(&value, part(offset, sizeof value).data, sizeof value);
    return value;
  }

  std::string_view text() const { return {reinterpret_cast<const char*>(data), size_t(size)}; }
};

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "files are least significant byte first, as the machine must be");

// A read-only mapping: unused pages are not read, and processes that use the same file share memory. Truncating a
// mapped file kills the process (SIGBUS), as with any mapping: replace a file by renaming another one over it.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  Bytes bytes() const { return bytes_; }

 private:
  Bytes bytes_;
};

uint32_t crc32(Bytes bytes);

}  // namespace bitport::runner
