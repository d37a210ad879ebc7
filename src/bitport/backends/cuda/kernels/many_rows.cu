// y = x W^T for an int4 or int8 weight, on the tensor cores of sm_90 by warpgroup products (wgmma).
//
//   x      [m, k]           16-bit floats              y     [m, n]  of x's type, with bias [n] added if there is one
//   codes  [n, k BITS / 8]  4-bit codes: the even column in the low half of a byte
//   scale  [n, groups]      of x's type                zero  [n, groups]  bytes; MIDPOINT if null
//
// W = (code - zero) * scale, rounded once to x's type: the difference is exact in it. If a row has one scale, the
// difference itself is the operand, and the scale multiplies the sums. Sums are in float32.
//
// A block computes BN = 64 * WARPGROUPS columns of y, i.e. rows of W, by BM rows. W is the first operand: each thread
// decodes its part from shared memory into registers while the products of the previous step run. x is the second, read
// from shared memory: the 64 columns of a step are 128 bytes, swizzled as wgmma requires. Both are prefetched STAGES - 2
// steps ahead.
//
// K is split among the SPLITS blocks of a cluster. Each leaves its sums in its own shared memory, then reduces some of
// the rows over all splits, in their order: no second kernel, no workspace, deterministic results.
//
// Compiled with BITS, FLIP (0x80 if the top bit of a code is inverted, else 0), BM, WARPGROUPS, STAGES, SPLITS, BLOCKS
// (per multiprocessor), PER_STEP (scales per 64 columns: 1, or 2 for groups of 32; 0: one for the row) and HALF (x is
// float16, not bfloat16). WGMMA(d, a, b) is the instruction for BM rows: it names every register.

#define BN (64 * WARPGROUPS)
#define THREADS (128 * WARPGROUPS)
#define WARPS (THREADS / 32)
#define BK 64
#define X_BYTES (BM * 2 * BK)
#define ROW_BYTES (BK * BITS / 8) // bytes of codes per row and step
#define CODE_BYTES (BN * ROW_BYTES)
#define AHEAD (STAGES - 2)
#define ENTRIES (PER_STEP ? PER_STEP : 1)
#define PITCH (BN + 4) // row stride of the sums in floats, padded against bank conflicts

// Two weights; ``number`` and ``zero`` are converted codes and zero points
DEVICE u32 weight_of(u32 number, u32 zero, u32 scale) {
  const u32 difference = minus(number, zero);
  return PER_STEP ? times(difference, scale) : difference;
}

// Selector ``own`` picks the bytes of quarter q from the 16 or 8 codes in a and b.
#if BITS == 4 // columns 2q and 2q + 1 of 16 to ``near``, those 8 further on to ``far``
DEVICE void decode(u32 a, u32 b, u32 own, u32 zero, u32 scale, u32& near, u32& far) {
  const u32 bytes = pick(a, b, own), even = as_numbers(bytes), odd = as_numbers(bytes >> 4);
  near = weight_of(pick(even, odd, 0x5410), zero, scale);
  far = weight_of(pick(even, odd, 0x7632), zero, scale);
}
#else // columns 2q and 2q + 1 of 8
DEVICE void decode(u32 a, u32 b, u32 own, u32 zero, u32 scale, u32& both) {
  both = weight_of(as_numbers(pick(a, b, own) ^ FLIP * 0x10001), zero, scale);
}
#endif

extern "C" __global__ void
#if SPLITS > 1
__cluster_dims__(1, 1, SPLITS)
#endif
__launch_bounds__(THREADS, BLOCKS) many_rows(
    const u16* __restrict__ x, const u8* __restrict__ codes, const u16* __restrict__ scale,
    const u8* __restrict__ zero, const u16* __restrict__ bias, u16* __restrict__ y,
    int m, int n, int k, int groups, int steps_per_group) {
  const u32 shared_x = (shared_address() + 1023) & ~1023u;
  const u32 shared_codes = shared_x + STAGES * X_BYTES;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int n0 = blockIdx.x * BN, m0 = blockIdx.y * BM;
  const int steps = k / BK, per_split = (steps + SPLITS - 1) / SPLITS;
  const int first = min(steps, (int)blockIdx.z * per_split), count = min(steps, first + per_split) - first;

  // What a thread copies, 16 bytes at a time. Rows past the end are zeros whose results are dropped: if they repeated the
  // last row, most blocks would contend for one cache line.
  constexpr int TOGETHER = THREADS / 8, COPIES = (BM + TOGETHER - 1) / TOGETHER;
  constexpr int PARTS = ROW_BYTES / 16, CODE_COPIES = BN * PARTS / THREADS;
  const int x_row = thread / 8, x_part = thread % 8, code_row = thread / PARTS, code_part = thread % PARTS;
  const u32 x_to = shared_x + x_row * 128 + ((x_part ^ (x_row & 7)) << 4);
  const u32 code_to = shared_codes + code_row * ROW_BYTES + code_part * 16;
  const int row_bytes = k / 8 * BITS;
  const u16* x_from = x + (u64)m0 * k + first * BK;
  const u8* code_from = codes + (u64)n0 * row_bytes + first * ROW_BYTES;
  const int x_rows = m - m0, code_rows = n - n0; // rows that exist

  auto copy = [&](int step, int slot) {
    const bool more = step < count; // steps past the end multiply zeros
#pragma unroll
    for (int j = 0; j < COPIES; j++) {
      const int row = x_row + j * TOGETHER;
      const u32 offset = min(row, x_rows - 1) * k + x_part * 8;
      if (BM % TOGETHER == 0 || x_row < BM)
        copy16(x_to + slot * X_BYTES + j * TOGETHER * 128, x_from + offset, more && row < x_rows);
    }
    x_from += BK;
#pragma unroll
    for (int j = 0; j < CODE_COPIES; j++) {
      const int row = code_row + j * (BN / CODE_COPIES);
      const u32 offset = min(row, code_rows - 1) * row_bytes + code_part * 16;
      copy16(code_to + slot * CODE_BYTES + j * (CODE_BYTES / CODE_COPIES), code_from + offset, more && row < code_rows);
    }
    code_from += ROW_BYTES;
    copies_end_group();
  };

  // a thread's two rows of W, among the 16 of its warp, and their scales and zeros
  const int warp_row = warp * 16 + lane / 4, quarter = lane % 4;
  // the picked codes go to bytes 0 and 2
  const u32 own = BITS == 4 ? quarter | (4 + quarter) << 8 : 2 * quarter | (2 * quarter + 1) << 8;
  u32 entry[2];
  u32 scales[2][ENTRIES], zeros[2][ENTRIES], next_scales[2][ENTRIES], next_zeros[2][ENTRIES];
#pragma unroll
  for (int r = 0; r < 2; r++)
    entry[r] = min(warp_row + 8 * r, n - 1 - n0) * groups + first / steps_per_group * PER_STEP;
  scale += (u64)n0 * groups;
  if (zero) zero += (u64)n0 * groups;
  int left = steps_per_group - first % steps_per_group; // steps for which the current scales apply

  auto read_entries = [&]() {
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
      for (int i = 0; i < ENTRIES; i++)
        next_scales[r][i] = read_scale(scale + entry[r] + i), next_zeros[r][i] = zero ? read_zero(zero + entry[r] + i) : MIDPOINT;
      entry[r] += PER_STEP;
    }
  };
  auto take_entries = [&]() {
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
      for (int i = 0; i < ENTRIES; i++) {
        scales[r][i] = pick(next_scales[r][i], 0, 0x1010);
        zeros[r][i] = as_zeros(next_zeros[r][i] * 0x10001);
      }
    }
  };

  float sums[BM / 2];
#pragma unroll
  for (int i = 0; i < BM / 2; i++) sums[i] = 0;
  u32 weights[2][4][4];
  int slot = 0, free = AHEAD;

  auto multiply = [&](int step, u32(&a)[4][4]) {
    wait_for_all_copies_but<AHEAD - 1>();
    let_products_see_copies();
    __syncthreads(); // the step has arrived for all threads, and all are done with the step before the previous one
    copy(step + AHEAD, free);
    if (left == 0) {
      take_entries();
      left = steps_per_group;
      if (step + left < count) read_entries();
    }
    left--;
    const u32 codes_at = shared_codes + slot * CODE_BYTES + warp_row * ROW_BYTES;
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
      for (int piece = 0; piece < ROW_BYTES / 16; piece++) {
        u32 words[4];
        read16(words, codes_at + r * 8 * ROW_BYTES + piece * 16);
        const int entry = piece * ENTRIES / (ROW_BYTES / 16);
        const u32 z = zeros[r][entry], s = scales[r][entry];
#if BITS == 4
        decode(words[0], words[1], own, z, s, a[2 * piece][r], a[2 * piece][2 + r]);
        decode(words[2], words[3], own, z, s, a[2 * piece + 1][r], a[2 * piece + 1][2 + r]);
#else
        decode(words[0], words[1], own, z, s, a[piece][r]);
        decode(words[2], words[3], own, z, s, a[piece][2 + r]);
#endif
      }
    }
    // descriptor: groups of 8 rows of x are 1024 bytes apart; 16 columns are 32 of the 128 swizzled bytes
    const u64 tile = (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)1 << 16 | (shared_x + slot * X_BYTES) >> 4;
    products_begin_group();
#pragma unroll
    for (int part = 0; part < 4; part++) WGMMA(sums, a[part], tile + 2 * part);
    products_end_group();
    wait_for_all_products_but<1>();
    slot = slot + 1 == STAGES ? 0 : slot + 1, free = free + 1 == STAGES ? 0 : free + 1;
  };

#pragma unroll
  for (int step = 0; step < AHEAD; step++) copy(step, step);
  if (count > 0 || PER_STEP == 0) { // an empty split also multiplies its sums by the row's scale
    read_entries();
    take_entries();
    if (left < count) read_entries(); // always one group ahead
  }
  for (int step = 0; step < count; step += 2) { // one buffer is decoded while the products of the other run
    multiply(step, weights[0]);
    multiply(step + 1, weights[1]);
  }
  wait_for_all_products_but<0>();
  wait_for_all_copies_but<0>();
  __syncthreads();

  // store the sums by rows of x: a thread holds pairs of adjacent rows of x, for two rows of W
  const float by[2] = {PER_STEP ? 1.f : widen(scales[0][0] & 0xFFFF), PER_STEP ? 1.f : widen(scales[1][0] & 0xFFFF)};
#pragma unroll
  for (int i = 0; i < BM / 2; i++) {
    const int row = i / 4 * 8 + quarter * 2 + i % 2, column = warp_row + i / 2 % 2 * 8;
    write_shared(shared_x + (row * PITCH + column) * 4, sums[i] * by[i / 2 % 2]);
  }
  meet_cluster();
  const int rows = BM / SPLITS, mine = blockIdx.z * rows;
  for (int at = thread; at < rows * (BN / 4); at += THREADS) {
    const int row = mine + at / (BN / 4), column = at % (BN / 4) * 4;
    const u32 here = shared_x + (row * PITCH + column) * 4;
    float each[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int split = 0; split < SPLITS; split++) {
      float part[4];
      read16_of(split, part, here);
#pragma unroll
      for (int i = 0; i < 4; i++) each[i] += part[i];
    }
    if (m0 + row < m && n0 + column < n) write_results(y, bias, m0 + row, n0 + column, n, each);
  }
  meet_cluster(); // other blocks may still read this block's sums
}
