// What an x86 processor offers, as its cpuid instruction says. Not by __builtin_cpu_supports: that reads a table of the
// compiler's runtime library, which zig's leaves empty, and older compilers do not know all names.
#pragma once
#include "machine.h"
#if BITPORT_X86
#include <cpuid.h>
#include <cstdint>
#include <initializer_list>

namespace bitport {

// AVX and what includes it only if the operating system saves its registers.
struct Cpu {
  bool amd;
  bool crc;      // pclmul and sse4.1
  bool avx2;     // and fma, f16c
  bool avx512;   // f, bw, vl, dq, vnni
  bool bf16, vbmi;
  bool tiles;    // amx-tile, amx-int8, amx-bf16; whether the system permits them is another question
};

inline Cpu ask_cpu() {
  struct { unsigned a = 0, b = 0, c = 0, d = 0; } zero, one, seven, more;
  const auto has = [](unsigned word, std::initializer_list<int> bits) {
    for (const int bit : bits)
      if (!(word >> bit & 1)) return false;
    return true;
  };
  __get_cpuid(0, &zero.a, &zero.b, &zero.c, &zero.d);
  __get_cpuid(1, &one.a, &one.b, &one.c, &one.d);
  __get_cpuid_count(7, 0, &seven.a, &seven.b, &seven.c, &seven.d);
  if (seven.a >= 1) __get_cpuid_count(7, 1, &more.a, &more.b, &more.c, &more.d);
  unsigned saved = 0, high = 0;
  if (has(one.c, {27})) asm volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  Cpu cpu{};
  cpu.amd = zero.b == 0x68747541;   // "Auth" of AuthenticAMD
  cpu.crc = has(one.c, {1, 19});
  cpu.avx2 = has(saved, {1, 2}) && has(one.c, {12, 28, 29}) && has(seven.b, {5});
  cpu.avx512 = cpu.avx2 && has(saved, {5, 6, 7}) && has(seven.b, {16, 17, 30, 31}) && has(seven.c, {11});
  cpu.bf16 = cpu.avx512 && has(more.a, {5});
  cpu.vbmi = cpu.avx512 && has(seven.c, {1});
  cpu.tiles = has(seven.d, {22, 24, 25});
  return cpu;
}

inline const Cpu& cpu() {
  static const Cpu found = ask_cpu();
  return found;
}

}  // namespace bitport
#endif
