// Eight codes at a time, in 64 bits with a byte each (the first one lowest), or dense.
#pragma once
#include <cstdint>

namespace bitport {

constexpr uint64_t low(int bits) { return bits < 64 ? (uint64_t(1) << bits) - 1 : ~uint64_t(0); }

// Spreads the lowest 8 * Bits bits to bytes, Bits to each: halves move apart, then quarters, then eighths.
template <int Bits>
constexpr uint64_t spread(uint64_t v) {
  constexpr uint64_t half = low(4 * Bits), quarter = low(2 * Bits) * 0x100000001u;
  constexpr uint64_t eighth = low(Bits) * 0x1000100010001u;
  v = (v & half) | (v >> 4 * Bits & half) << 32;
  v = (v & quarter) | (v >> 2 * Bits & quarter) << 16;
  return (v & eighth) | (v >> Bits & eighth) << 8;
}

template <int Bits>
constexpr uint64_t gather(uint64_t v) {
  constexpr uint64_t half = low(4 * Bits), quarter = low(2 * Bits) * 0x100000001u;
  constexpr uint64_t eighth = low(Bits) * 0x1000100010001u;
  v = (v & eighth) | (v >> 8 & eighth) << Bits;
  v = (v & quarter) | (v >> 16 & quarter) << 2 * Bits;
  return (v & half) | (v >> 32 & half) << 4 * Bits;
}

}  // namespace bitport
