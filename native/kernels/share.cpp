#include "share.h"
#if defined(_OPENMP)
#include <omp.h>
#endif

namespace bitport {
namespace {

int32_t openmp(int64_t begin, int64_t end, int64_t, BitportBody body, void* context) {
#if defined(_OPENMP)
  if (!omp_in_parallel()) {
#pragma omp parallel for schedule(static, 1) num_threads(int(end - begin))
    for (int64_t i = begin; i < end; ++i) body(i, i + 1, context);
    return 0;
  }
#endif
  body(begin, end, context);
  return 0;
}

std::atomic<BitportPool> pool{openmp};

}  // namespace

void share_pieces(int64_t count, BitportBody body, void* context) { pool.load()(0, count, 1, body, context); }

}  // namespace bitport

void bitport_use_pool(BitportPool pool) { bitport::pool = pool ? pool : bitport::openmp; }
