// The directory of a .pt2 file, which is a zip archive. Entries lie in it as they are (stored, never compressed), so one is
// a part of the mapped file.
//
//   [local header, name, bytes] ... [central directory: one record per entry] [end record, behind a 64-bit one in large files]
//
// Only the central directory is believed, and only if every entry lies before it, no two have one name, and the local
// header in front of an entry names the same.
#pragma once
#include <map>
#include <string>
#include "bytes.h"

namespace bitport::runner {

class Zip {
 public:
  Zip(Bytes file, const std::string& where);

  struct Entry {
    Bytes bytes;
    uint32_t crc = 0;
  };
  const std::map<std::string, Entry>& entries() const { return entries_; }
  // The bytes of an entry, after its checksum was found right.
  Bytes checked(const std::string& name) const;

 private:
  std::string where_;
  std::map<std::string, Entry> entries_;
};

}  // namespace bitport::runner
