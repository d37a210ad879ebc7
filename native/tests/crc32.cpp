// Checksums against division bit by bit, of messages of every length around what is processed at a time.
#include "../kernels/bitport_kernels.h"
#include "numbers.h"
#include "tests.h"

namespace {

uint32_t divided(const uint8_t* at, int64_t size, uint32_t before) {
  uint32_t sum = ~before;
  for (int64_t i = 0; i < size; ++i) {
    sum ^= at[i];
    for (int bit = 0; bit < 8; ++bit) sum = sum >> 1 ^ (sum & 1 ? 0xedb88320u : 0);
  }
  return ~sum;
}

}  // namespace

void try_crc32(uint64_t seed) {
  EXPECT(bitport_crc32("123456789", 9, 0) == 0xcbf43926u, "the check value of this checksum");
  EXPECT(bitport_crc32(nullptr, 0, 7) == 7, "of nothing");
  Random random(seed);
  for (int64_t size = 1; size < 400; ++size)
    for (const Place place : {Place::heap, Place::skewed, Place::fenced}) {
      Exact<uint8_t> message(size, place);
      for (int64_t i = 0; i < size; ++i) message[i] = uint8_t(below(random, 256));
      const uint32_t before = size % 2 ? uint32_t(random()) : 0;
      const uint32_t wanted = divided(message.data(), size, before);
      EXPECT(bitport_crc32(message.data(), size, before) == wanted, "%lld bytes", (long long)size);
      ++cases;
    }
}
