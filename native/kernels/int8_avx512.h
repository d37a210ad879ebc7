// Shared by the 512-bit variants of the products with int8 inputs.
#pragma once
#include "avx512.h"
#include "int8.h"

#define AVX512_VNNI __attribute__((target(AVX512_TARGET ",avx512vnni")))
#define AVX512_VNNI_INLINE AVX512_VNNI __attribute__((always_inline)) static inline

namespace bitport {

// The codes of a line, 4 neighbours in K for each of 16 rows, as needed for dot products of bytes.
template <int Bits>
AVX512_INLINE __m512i read_quads(const uint8_t* tile, int64_t line) {
  if constexpr (Bits == 4) {   // two bytes of a row are columns 0, 2, 1, 3 from the low nibble up
    const __m512i two =
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + line * 32)));
    constexpr int kMerge = 0xa8;   // (first | second) & third
    return _mm512_ternarylogic_epi32(two, _mm512_slli_epi32(two, 12), _mm512_set1_epi32(0x0f0f0f0f), kMerge);
  } else {   // pairs of columns 0 and 1 of 16 rows, then of 2 and 3, are interleaved by row
    const __m512i order = _mm512_set_epi32(0x001f000f, 0x001e000e, 0x001d000d, 0x001c000c, 0x001b000b, 0x001a000a,
                                           0x00190009, 0x00180008, 0x00170007, 0x00160006, 0x00150005, 0x00140004,
                                           0x00130003, 0x00120002, 0x00110001, 0x00100000);
    return _mm512_permutexvar_epi16(order, read_codes<Bits>(tile, line));
  }
}

// Scale and shift of 16 rows.
struct PieceScale { __m512 scale, shift; };

AVX512_INLINE PieceScale piece_scale(const BitportTiles& w, int64_t at) {   // at: position of the first scale
  __m512 scale = load16(w.scale, w.scale_type, at);
  if (w.scale2) scale = _mm512_mul_ps(scale, _mm512_set1_ps(*w.scale2));
  const __m512 zero = w.zero ? load16(w.zero, w.zero_type, at) : _mm512_set1_ps(middle(w));
  return {scale, _mm512_sub_ps(zero, _mm512_set1_ps(float(center(w))))};
}

void avx512_int8_range(const void* x, int32_t type, int64_t count, float* low, float* high);
int32_t avx512_int8_round(const void* x, int32_t type, int64_t count, Rounding rounding, int8_t* to, int64_t from,
                          int64_t next);
void avx512_int8_finish(float* sum, const float* ones, Rounding rounding, int64_t count, const float* bias, void* y,
                        int32_t type, bool stream);
void avx512_int8_fused(const Int8Job& job, int64_t tile, void* panel, float* sum);

#define BITPORT_WITH_BITS(bits, call)                 \
  switch (bits) {                                     \
    case 1: { constexpr int Bits = 1; call; } break;  \
    case 2: { constexpr int Bits = 2; call; } break;  \
    case 3: { constexpr int Bits = 3; call; } break;  \
    case 4: { constexpr int Bits = 4; call; } break;  \
    case 5: { constexpr int Bits = 5; call; } break;  \
    case 6: { constexpr int Bits = 6; call; } break;  \
    case 7: { constexpr int Bits = 7; call; } break;  \
    default: { constexpr int Bits = 8; call; }        \
  }

}  // namespace bitport
