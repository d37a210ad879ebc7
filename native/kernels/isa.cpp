// Detects the instruction sets of this machine, and whether the operating system permits tile registers.
#include "activation.h"
#include "engine.h"
#if BITPORT_X86
#include "avx512_bf16.h"
#include "cpu.h"
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif BITPORT_ARM
#include "neon.h"
#if defined(__APPLE__)
#include <sys/sysctl.h>
#else
#include <sys/auxv.h>
#endif
#endif

namespace {

#if BITPORT_X86
// Linux enables the 8 KiB of tile state (feature 18) only for processes that request it. Threads started later inherit
// it. Elsewhere they are not used.
bool tiles_permitted() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

int32_t detect() {
  const bitport::Cpu& cpu = bitport::cpu();
  if (!cpu.avx2) return BITPORT_SCALAR;
  if (!cpu.avx512) return BITPORT_AVX2;
  if (!cpu.bf16) return BITPORT_AVX512_VNNI;
  return cpu.tiles && tiles_permitted() ? BITPORT_AMX : BITPORT_AVX512_BF16;
}
#elif BITPORT_ARM && defined(__APPLE__)
bool has(const char* feature) {
  int32_t found = 0;
  size_t size = sizeof found;
  return sysctlbyname(feature, &found, &size, nullptr, 0) == 0 && found;
}

int32_t detect() {
  if (!has("hw.optional.arm.FEAT_DotProd")) return BITPORT_NEON;
  return has("hw.optional.arm.FEAT_I8MM") && has("hw.optional.arm.FEAT_BF16") ? BITPORT_NEON_MATRIX : BITPORT_NEON_DOT;
}
#elif BITPORT_ARM
int32_t detect() {
  constexpr unsigned long kDotProducts = 1 << 20, kMatrices = 3 << 13;   // ASIMDDP; I8MM and BF16 of the second word
  if (!(getauxval(AT_HWCAP) & kDotProducts)) return BITPORT_NEON;
  return (getauxval(AT_HWCAP2) & kMatrices) == kMatrices ? BITPORT_NEON_MATRIX : BITPORT_NEON_DOT;
}
#else
int32_t detect() { return BITPORT_SCALAR; }
#endif

#if BITPORT_ARM
constexpr int32_t kFirst = BITPORT_NEON;   // the lowest of this architecture above scalar
#else
constexpr int32_t kFirst = BITPORT_AVX2;
#endif

}  // namespace

int32_t bitport_best_isa(void) {
  static const int32_t best = detect();
  return best;
}

int32_t bitport_has_isa(int32_t isa) { return isa == BITPORT_SCALAR || (isa >= kFirst && isa <= bitport_best_isa()); }

const char* bitport_isa_name(int32_t isa) {
  static const char* const names[] = {"scalar", "avx2", "avx512_vnni", "avx512_bf16", "amx", "neon", "neon_dot", "neon_matrix"};
  return isa >= 0 && isa < BITPORT_ISAS ? names[isa] : "unknown";
}

namespace bitport {

#if BITPORT_X86
// Its rate is twice that of float32 on AMD; half of it on the Intel processors that were measured, which have tile
// registers for bfloat16: there it is only used if the ISA is requested by name.
bool fast_bf16() {
  static const bool fast = bitport_best_isa() == BITPORT_AMX || cpu().amd;
  return fast;
}
#endif

const Engine& engine_for(int32_t isa, int32_t x_type, int64_t m) {
#if BITPORT_X86
  const bool bf16 = x_type == BITPORT_BF16;
  if (isa == BITPORT_AMX && bf16) return amx_engine;
  if (isa >= BITPORT_AVX512_BF16 && bf16 && (m <= kVectorRows || fast_bf16())) return avx512_bf16_engine;
  if (isa >= BITPORT_AVX512_VNNI) return avx512_engine;
  if (isa == BITPORT_AVX2) return avx2_engine;
#elif BITPORT_ARM
  if (isa >= BITPORT_NEON_MATRIX && x_type == BITPORT_BF16 && m > kNeonRows) return neon_matrix_engine;
  if (isa >= BITPORT_NEON) return neon_engine;
#endif
  (void)isa, (void)x_type, (void)m;
  return scalar_engine;
}

Activate activate_for(int32_t isa) {
#if BITPORT_X86
  if (isa >= BITPORT_AVX512_VNNI) return avx512_activate;
  if (isa == BITPORT_AVX2) return avx2_activate;
#elif BITPORT_ARM
  if (isa >= BITPORT_NEON) return neon_activate;
#endif
  (void)isa;
  return scalar_activate;
}

}  // namespace bitport
