// Dequantizes rows with 128-bit vectors. With up to 4 bits a group has at most 16 different values, which are computed
// once and looked up bytewise.
#include "engine.h"
#include "rows.h"
#if BITPORT_ARM
#include "neon.h"

namespace bitport {
namespace {

struct Group { float32x4_t scale, shift; };

NEON_INLINE float32x4_t times(float32x4_t meant, const Group& by) {
  return vmulq_f32(vsubq_f32(meant, by.shift), by.scale);
}

// The values of codes below 16 as byte planes: planes[b] has byte b of each.
struct Planes { uint8x16_t planes[4]; };

NEON_INLINE Planes planes_of(const float* table, const Group& by, int32_t type) {
  uint8_t numbers[64];
  for (int i = 0; i < 16; i += 4) store4(times(vld1q_f32(table + i), by), numbers, type, i);
  if (type == BITPORT_F32) {
    const uint8x16x4_t bytes = vld4q_u8(numbers);
    return {{bytes.val[0], bytes.val[1], bytes.val[2], bytes.val[3]}};
  }
  const uint8x16x2_t bytes = vld2q_u8(numbers);
  return {{bytes.val[0], bytes.val[1], bytes.val[0], bytes.val[1]}};
}

NEON_INLINE void look_up_16(uint8x16_t codes, const Planes& of, int32_t type, char* y) {
  const uint8x16_t first = vqtbl1q_u8(of.planes[0], codes), second = vqtbl1q_u8(of.planes[1], codes);
  uint8_t* const to = reinterpret_cast<uint8_t*>(y);
  if (type == BITPORT_F32) {
    const uint8x16x4_t all = {{first, second, vqtbl1q_u8(of.planes[2], codes), vqtbl1q_u8(of.planes[3], codes)}};
    vst4q_u8(to, all);
  } else {
    const uint8x16x2_t both = {{first, second}};
    vst2q_u8(to, both);
  }
}

// 16 nibbles, a byte each.
NEON_INLINE uint8x16_t apart(const uint8_t* nibbles) {
  const uint8x8_t pairs = vld1_u8(nibbles);
  return vcombine_u8(vzip1_u8(vand_u8(pairs, vdup_n_u8(15)), vshr_n_u8(pairs, 4)),
                     vzip2_u8(vand_u8(pairs, vdup_n_u8(15)), vshr_n_u8(pairs, 4)));
}

template <bool Nibbles>
void write(const Stretch& s, char* y) {
  float repeated[16];
  if (Nibbles)
    for (int i = 0; i < 16; ++i) repeated[i] = s.table[i & ((1 << s.bits) - 1)];
  const int64_t width = width_of(s.type);
  const float32x4_t least = vdupq_n_f32(s.table[0]);
  int64_t i = 0, group = 0;
  for (int64_t end = s.first; i < s.count; end += smaller(s.group, s.count - end), ++group) {
    const Group by{vdupq_n_f32(s.scale[group]), vdupq_n_f32(s.shift[group])};
    if (Nibbles && end - i >= 16) {
      const Planes planes = planes_of(repeated, by, s.type);
      for (; i + 16 <= end; i += 16) look_up_16(apart(s.codes + i / 2), planes, s.type, y + i * width);
    }
    for (; !Nibbles && i + 8 <= end; i += 8) {
      float meant[8];
      if (s.integer) {
        const uint16x8_t codes = vmovl_u8(vld1_u8(s.codes + i));
        vst1q_f32(meant, vaddq_f32(vcvtq_f32_u32(vmovl_u16(vget_low_u16(codes))), least));
        vst1q_f32(meant + 4, vaddq_f32(vcvtq_f32_u32(vmovl_u16(vget_high_u16(codes))), least));
      } else {
        for (int j = 0; j < 8; ++j) meant[j] = s.table[s.codes[i + j]];
      }
      store4(times(vld1q_f32(meant), by), y, s.type, i);
      store4(times(vld1q_f32(meant + 4), by), y, s.type, i + 4);
    }
    for (; i < end; ++i) {
      const int code = Nibbles ? s.codes[i / 2] >> i % 2 * 4 & 15 : s.codes[i];
      store_number((s.table[code] - s.shift[group]) * s.scale[group], y, s.type, i);
    }
  }
}

}  // namespace

WriteStretch neon_write(int32_t bits) { return are_nibbles(bits) ? write<true> : write<false>; }

}  // namespace bitport
#endif
