// Validation of a weight, texts of the return codes, and the sources that the library was built from.
#include "status.h"
#include "tiles.h"

namespace bitport {

int32_t check_weight(const BitportTiles* w) {
  if (!w) return kNullPointer;
  if (w->n < 0 || w->k <= 0 || w->n > kMost || w->k > kMost || w->bits < 1 || w->bits > 8) return kBadShape;
  if (!w->integer && w->bits > 4 && w->bits != 6 && w->bits != 8) return kBadType;
  if (w->group <= 0 || (w->group % 16 && w->group < w->k)) return kBadGroup;
  if (w->scale_type < BITPORT_F32 || w->scale_type > BITPORT_E4M3 || w->scale_type == BITPORT_U8) return kBadType;
  if (w->zero && (w->zero_type < BITPORT_F32 || w->zero_type > BITPORT_U8 || !w->integer)) return kBadType;
  return w->n == 0 || (w->codes && w->scale && w->table) ? kOk : kNullPointer;
}

}  // namespace bitport

const char* bitport_error(int32_t code) {
  static const char* const texts[] = {
      "ok",
      "a pointer is null",
      "n and m must not be negative, k must be positive, none above 2^31; a code has 1 to 8 bits",
      "the group must be a multiple of 16, or at least k",
      "type: x and y are float32, bfloat16 or float16; scale may also be e8m0 or e4m3; zero, of integers, uint8",
      "how x is rounded: 0 to 9 (BitportAct); to int8 for integer weights only; a scale only where there is one for all of x",
      "a row that the weight does not have",
      "this machine does not have the instruction set asked for",
      "out of memory",
      "what follows the product: 0 to 3 (BitportThen), and a factor only where something does",
      "a step: rules 0 to 2 with the moments they have; parameter and gradient of float32, bfloat16 or float16; moments of "
      "float32, bfloat16 or codes of 4 or 8 bits, all with one block of at most 256, even with 4 bits",
  };
  return code >= 0 && code < 11 ? texts[code] : "unknown code";
}

#if !defined(BITPORT_SOURCES)
#define BITPORT_SOURCES ""
#endif
const char* bitport_sources(void) { return BITPORT_SOURCES; }
