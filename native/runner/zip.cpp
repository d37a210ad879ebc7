#include "zip.h"
#include <algorithm>

namespace bitport::runner {
namespace {

constexpr uint32_t kLocal = 0x04034b50, kCentral = 0x02014b50, kEnd = 0x06054b50, kEnd64 = 0x06064b50, kLocator = 0x07064b50;
constexpr uint64_t kEndBytes = 22, kLocatorBytes = 20, kCentralBytes = 46, kLocalBytes = 30, kLongestComment = 65535;
constexpr uint64_t kFull = 0xffffffff;   // a 32-bit field whose value is in the 64-bit extra field

struct Directory {
  uint64_t offset = 0, size = 0, count = 0;
};

Directory directory_of(Bytes file) {
  if (file.size < kEndBytes) fail("too short for a package (", file.size, " bytes)");
  const uint64_t first = file.size - std::min(file.size, kEndBytes + kLongestComment);
  for (uint64_t at = file.size - kEndBytes + 1; at-- > first;) {
    if (file.number<uint32_t>(at) != kEnd || at + kEndBytes + file.number<uint16_t>(at + 20) != file.size) continue;
    Directory found{file.number<uint32_t>(at + 16), file.number<uint32_t>(at + 12), file.number<uint16_t>(at + 10)};
    if (at >= kLocatorBytes && file.number<uint32_t>(at - kLocatorBytes) == kLocator) {
      const uint64_t there = file.number<uint64_t>(at - kLocatorBytes + 8);
      if (there > at || file.number<uint32_t>(there) != kEnd64) fail("the zip directory is damaged");
      found = {file.number<uint64_t>(there + 48), file.number<uint64_t>(there + 40), file.number<uint64_t>(there + 32)};
    }
    if (found.offset > at || found.size > at - found.offset) fail("the zip directory is damaged");
    return found;
  }
  fail("no zip directory at its end: it is no package, or it is cut off");
}

// Reads the 64-bit values of a record's extra field for those of its three fields that are saturated, in this order.
void widen(Bytes extra, uint64_t& size, uint64_t& packed, uint64_t& offset) {
  for (uint64_t at = 0; extra.size - at >= 4;) {
    const Bytes block = extra.part(at + 4, extra.number<uint16_t>(at + 2));
    if (extra.number<uint16_t>(at) == 1) {
      uint64_t within = 0;
      for (uint64_t* field : {&size, &packed, &offset})
        if (*field == kFull) { *field = block.number<uint64_t>(within); within += 8; }
      return;
    }
    at += 4 + block.size;
  }
}

}  // namespace

Zip::Zip(Bytes file, const std::string& where) : where_(where) {
  about(where, [&] {
    const Directory directory = directory_of(file);
    const Bytes records = file.part(directory.offset, directory.size), before = file.part(0, directory.offset);
    uint64_t at = 0;
    for (uint64_t i = 0; i < directory.count; ++i) {
      const Bytes record = records.part(at, kCentralBytes);
      if (record.number<uint32_t>(0) != kCentral) fail("entry ", i, " of the zip directory is damaged");
      const uint64_t name_bytes = record.number<uint16_t>(28), extra_bytes = record.number<uint16_t>(30);
      const std::string name(records.part(at + kCentralBytes, name_bytes).text());
      uint64_t packed = record.number<uint32_t>(20), size = record.number<uint32_t>(24), offset = record.number<uint32_t>(42);
      widen(records.part(at + kCentralBytes + name_bytes, extra_bytes), size, packed, offset);
      if (record.number<uint16_t>(8) & 1) fail(name, " is encrypted");
      if (record.number<uint16_t>(10) || packed != size) fail(name, " is compressed; packages hold their parts as they are");
      const Bytes local = before.part(offset, kLocalBytes);
      const uint64_t local_name = local.number<uint16_t>(26), local_extra = local.number<uint16_t>(28);
      if (local.number<uint32_t>(0) != kLocal || before.part(offset + kLocalBytes, local_name).text() != name)
        fail("the header in front of ", name, " is damaged");
      const Bytes bytes = before.part(offset + kLocalBytes + local_name + local_extra, size);
      if (!entries_.emplace(name, Entry{bytes, record.number<uint32_t>(16)}).second) fail(name, " is there twice");
      at += kCentralBytes + name_bytes + extra_bytes + record.number<uint16_t>(32);
    }
    if (at != directory.size) fail("the zip directory is longer than its entries");
  });
}

Bytes Zip::checked(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) fail(where_, ": ", name, " is missing");
  if (crc32(found->second.bytes) != found->second.crc) fail(where_, ": ", name, " is damaged: its checksum is wrong");
  return found->second.bytes;
}

}  // namespace bitport::runner
