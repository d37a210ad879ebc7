// Damages a package in thousands of ways and reads it: each must be read or rejected with a Failure. Anything else (a
// crash, another exception, a sanitizer report) ends this program with an error.
//
//   mutate PACKAGE.pt2 COUNT SEED
//
// Damage targets what readers parse: the zip directory, local headers, the manifest, the header of the weights, the
// tables of the code. Half of the time checksums are repaired, as an attacker would do.
#include <unistd.h>
#include <sys/mman.h>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>
#include "../program.h"

using namespace bitport::runner;

namespace {

using File = std::vector<uint8_t>;
struct Stretch { uint64_t begin, end; };

struct Mutations {
  std::mt19937_64 random;
  File whole;
  std::map<std::string, Zip::Entry> entries;

  uint64_t below(uint64_t limit) { return limit ? random() % limit : 0; }

  Stretch somewhere() {
    auto each = entries.begin();
    std::advance(each, below(entries.size()));
    const uint64_t begin = uint64_t(each->second.bytes.data - whole.data()), size = each->second.bytes.size;
    switch (below(4)) {
      case 0: return {whole.size() - std::min<uint64_t>(whole.size(), 2048), whole.size()};   // the directory
      case 1: return {begin - std::min<uint64_t>(begin, 80), begin};                          // its local header
      case 2: return {begin, begin + std::min<uint64_t>(size, 256)};
      default: return {begin, begin + size};
    }
  }

  void write(File& file, uint64_t at, uint64_t value, uint64_t bytes) {
    for (uint64_t i = 0; i < bytes && at + i < file.size(); ++i) file[at + i] = uint8_t(value >> 8 * i);
  }

  void damage(File& file, const Stretch& where) {
    static constexpr uint64_t kEdges[] = {0, 1, 0x7f, 0xff, 0x7fff, 0xffff, 0x7fffffff, 0xffffffff, uint64_t(1) << 40,
                                          ~uint64_t(0) >> 1, ~uint64_t(0), ~uint64_t(0) - 15};
    static constexpr char kTokens[] = "{}[]\",:-0123456789eE.\\u";
    const uint64_t at = where.begin + below(where.end - where.begin);
    switch (below(7)) {
      case 0: file[at] ^= uint8_t(1 << below(8)); break;
      case 1: file[at] = uint8_t(random()); break;
      case 2: write(file, at, kEdges[below(std::size(kEdges))], uint64_t(1) << below(4)); break;
      case 3: write(file, at & ~uint64_t(7), kEdges[below(std::size(kEdges))], 8); break;
      case 4: file[at] = uint8_t(kTokens[below(sizeof kTokens - 1)]); break;
      case 5: file.resize(at); break;
      case 6: file.erase(file.begin() + int64_t(at), file.begin() + int64_t(std::min(at + 1 + below(64), file.size()))); break;
    }
  }

  // Updates the checksums in the directory to match the bytes; only if nothing has moved.
  void repair(File& file) {
    for (const auto& [name, entry] : entries) {
      const uint64_t begin = uint64_t(entry.bytes.data - whole.data());
      const uint32_t sum = crc32({file.data() + begin, entry.bytes.size});
      for (uint64_t at = whole.size() - 4; at-- > begin + entry.bytes.size;) {
        uint32_t there;
        std::memcpy(&there, file.data() + at, 4);
        if (there == entry.crc) { write(file, at, sum, 4); break; }
      }
    }
  }

  File next() {
    File file = whole;
    for (uint64_t i = 1 + below(3); i-- > 0;) {
      Stretch where = somewhere();
      where.end = std::min<uint64_t>(where.end, file.size());
      if (where.begin < where.end) damage(file, where);
    }
    if (file.size() == whole.size() && below(2)) repair(file);
    return file;
  }
};

// Whether it was rejected.
bool refused(const File& file) {
  const int there = memfd_create("mutated", 0);
  if (there < 0 || write(there, file.data(), file.size()) != ssize_t(file.size())) std::abort();
  bool wrong = false;
  try {
    Options options;
    options.verify = file.size() % 2;
    Program(std::string("/proc/self/fd/") + std::to_string(there), options).check();
  } catch (const Failure&) {
    wrong = true;
  }
  close(there);
  return wrong;
}

}  // namespace

int main(int count, char** values) {
  if (count != 4) return std::fprintf(stderr, "usage: mutate PACKAGE.pt2 COUNT SEED\n"), 1;
  const MappedFile file(values[1]);
  Mutations mutations{std::mt19937_64(std::strtoull(values[3], nullptr, 10)), {file.bytes().data, file.bytes().data + file.bytes().size}, {}};
  mutations.entries = Zip({mutations.whole.data(), mutations.whole.size()}, values[1]).entries();
  if (refused(mutations.whole)) return std::fprintf(stderr, "the package is refused as it is\n"), 1;
  long long found = 0, all = std::atoll(values[2]);
  for (long long i = 0; i < all; ++i) found += refused(mutations.next());
  std::printf("%lld of %lld refused\n", found, all);
}
