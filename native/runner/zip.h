// The directory of a .pt2 file, which is a zip archive. Its entries are stored, never compressed, so each is a range of
// the mapped file.
//
//   [local header, name, bytes] ... [central directory: one record per entry] [end record, behind a 64-bit one in large files]
//
// Only the central directory is used, and only if every entry is before it, names are unique, and the local header of
// each entry has the same name.
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
  // The bytes of an entry, after verifying its checksum.
  Bytes checked(const std::string& name) const;

 private:
  std::string where_;
  std::map<std::string, Entry> entries_;
};

}  // namespace bitport::runner
