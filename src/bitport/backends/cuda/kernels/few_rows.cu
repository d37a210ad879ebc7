// y = x W^T for an int4 or int8 weight and 1 to 8 rows of x, bound by reading the weight. sm_80 and newer.
//
//   x      [m, k]           16-bit floats           y     [m, n]  of x's type, with bias [n] added if there is one
//   codes  [n, k BITS / 8]  4-bit codes: the even column in the low half of a byte
//   scale  [n, k / GROUP]   of x's type             zero  [n, k / GROUP]  bytes; MIDPOINT if null
//
// W = (code - zero) * scale; x and codes are aligned to 16 bytes. Sums are in float32.
//
// A step is 64 bytes of a row of W: STEP = 512 / BITS columns, and k is a multiple of it. A block computes BN =
// 16 TILES ACROSS columns of y, i.e. rows of W. Groups of ALONG warps share the same columns and divide the steps of k
// among them; STEPS consecutive steps of each of these warps form a stage. W and x are prefetched STAGES - 1 stages ahead,
// and a thread multiplies the part of W that it has copied itself. k is further split among the SPLITS blocks of a
// cluster. The sums of the warps, then those of the blocks, are added in a fixed order, so results are deterministic. No
// global memory but y is written.
//
// W is the first operand of mma.m16n8k16; x is the second, with 8 rows: missing ones repeat the last. Lane (g, t) =
// (lane / 4, lane % 4) holds, of rows g and g + 8 of 16, the t-th 16 bytes of a step: OWN = STEP / 4 columns. Each 8 of
// these (the p-th) correspond to one 16-byte piece of x and take two products, each with two pairs of columns as k =
// {2 t, 2 t + 1} and {2 t + 8, 2 t + 9}: the order of columns within k is free as long as W and x share it. In shared
// memory pieces are in the order (p, t), so that lanes read consecutive ones.
//
// The scale: if GROUP is a multiple of STEP, or 0 for the whole row, it multiplies the sums of a step. If GROUP is
// another multiple of OWN, a lane's codes share one scale, which multiplies the weight: rounded once, to x's type.
//
// Compiled with BITS, FLIP (0x80 if the top bit of an 8-bit code is inverted, else 0), TILES, ACROSS, ALONG, STEPS,
// STAGES, SPLITS, GROUP, HALF (x is float16, not bfloat16) and CLUSTERS: 0 for devices before sm_90, where SPLITS is 1
// and the kernel begins when the previous one has ended. From sm_90 on it may begin earlier (programmatic dependent
// launch): the weight is read at once; x and the bias are read, and y is written, after the previous kernel has ended.

#define THREADS (32 * ACROSS * ALONG)
#define BN (16 * TILES * ACROSS)
#define STEP (512 / BITS)
#define OWN (STEP / 4)
#define OWN_PIECES (OWN / 8)             // pieces of x per lane in a step
#define STEP_PIECES (STEP / 8)           // pieces of a row of x in a step
#define STAGE_STEPS (ALONG * STEPS)
#define STAGE_PIECES (STAGE_STEPS * STEP_PIECES)
#define X_PITCH (STAGE_PIECES + 4)       // row stride of x in pieces, padded against bank conflicts
#define PIECES (2 * TILES * STEPS)       // 16-byte pieces of codes per thread in a stage
#define PITCH (BN + 4)                   // row stride of the sums in floats, padded likewise
#define FOLD (GROUP % STEP != 0)
#define UNIT (FOLD ? OWN : STEP)         // columns per entry; an entry is a scale and a zero
#define ENTRIES (STEP / UNIT)            // entries per step
#define CHAINS 2                         // independent chains of products

// The operands of a lane's p-th piece of x: the q-th pair of its codes, and the columns of the piece that belong to them.
// Pairs 0 and 1 are one product, 2 and 3 the other.
#if BITS == 4 // columns q and q + 4
DEVICE u32 codes_of(const u32 (&words)[4], int p, int q) { return words[p] >> (4 * q); }

DEVICE u32 columns_of(const u32 (&piece)[4], int q) {
  return pick(piece[q / 2], piece[q / 2 + 2], q % 2 ? 0x7632 : 0x5410);
}
#else // columns 2 q and 2 q + 1
DEVICE u32 codes_of(const u32 (&words)[4], int p, int q) {
  return pick(words[2 * p + q / 2] ^ FLIP * 0x01010101u, 0, q % 2 ? 0x4342 : 0x4140);
}

DEVICE u32 columns_of(const u32 (&piece)[4], int q) { return piece[q]; }
#endif

extern "C" __global__ void __launch_bounds__(THREADS) few_rows(
    const u16* x, const u8* codes, const u16* scale, const u8* zero, const u16* bias, u16* y, int m, int n, int k) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
  const int across = warp / ALONG, along = warp % ALONG;
  const int rank = blockIdx.x % SPLITS, n0 = blockIdx.x / SPLITS * BN;
  const int all = k / STEP, per_split = (all + SPLITS - 1) / SPLITS;
  const int first = rank * per_split < all ? rank * per_split : all;
  const int steps = (first + per_split < all ? first + per_split : all) - first;
  const int stages = (steps + STAGE_STEPS - 1) / STAGE_STEPS;

  // Shared memory: ring buffers of codes and x, reused for the sums once all products are done; entries; and the sums of
  // all blocks for the results that this block reduces. The rings have no more slots than there are stages.
  const int most = (per_split + STAGE_STEPS - 1) / STAGE_STEPS, slots = most < STAGES ? most : STAGES;
  const int code_bytes = slots * PIECES * THREADS * 16, ring_bytes = code_bytes + slots * m * X_PITCH * 16;
  const int sum_bytes = ALONG * m * PITCH * 4, entry_pitch = (GROUP ? per_split * ENTRIES : 1) | 1;
  u8* const shared = shared_memory();
  u8* const own_codes = shared + thread * 16;
  u8* const shared_x = shared + code_bytes;
  float* const sums = (float*)shared;
  u32* const entries = (u32*)(shared + (ring_bytes > sum_bytes ? ring_bytes : sum_bytes));
  u8* const others = (u8*)(entries + BN * entry_pitch);

  let_next_kernel_begin();
  begin_cluster();

  // rows past the end repeat the last; their results are dropped
  const u8* from[TILES][2];
#pragma unroll
  for (int r = 0; r < TILES; r++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = n0 + (across * TILES + r) * 16 + h * 8 + g;
      from[r][h] = codes + (u64)(row < n ? row : n - 1) * (k / 8 * BITS) + (u64)first * 64 + t * 16;
    }
  auto copy_stage_of_codes = [&](int stage, int slot) {
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      const int step = (stage * ALONG + along) * STEPS + s;
      if (step < steps) {
#pragma unroll
        for (int r = 0; r < TILES; r++)
#pragma unroll
          for (int h = 0; h < 2; h++)
            copy_codes(own_codes + (slot * PIECES + (s * TILES + r) * 2 + h) * (THREADS * 16), from[r][h] + step * 64);
      }
    }
  };
  auto copy_stage_of_x = [&](int stage, int slot) {
    u8* const to = shared_x + slot * (m * X_PITCH * 16);
    const u16* const x_from = x + (u64)(first + stage * STAGE_STEPS) * STEP;
    const int left = (steps - stage * STAGE_STEPS) * STEP_PIECES; // pieces left in a row
#pragma unroll 1
    for (u32 i = thread; i < (u32)(m * STAGE_PIECES); i += THREADS) {
      const u32 row = i / STAGE_PIECES, piece = i % STAGE_PIECES, of_lane = piece / OWN_PIECES % 4;
      const u32 place = row * X_PITCH + piece / STEP_PIECES * STEP_PIECES + piece % OWN_PIECES * 4 + of_lane;
      if ((int)piece < left) copy_x(to + place * 16, x_from + (u64)row * k + piece * 8);
    }
  };

  // Entries (scale << 16 | zero) of each row, loaded by READERS threads per row; the first AT_ONCE of each are read early
  constexpr int READERS = THREADS / BN, AT_ONCE = 4;
  static_assert(THREADS % BN == 0, "each row of W has as many readers");
  const int width = GROUP ? steps * ENTRIES : 1, own_row = thread / READERS, own_first = thread % READERS;
  const int groups = GROUP ? k / (GROUP ? GROUP : 1) : 1;
  const u64 entries_from = (u64)(n0 + own_row < n ? n0 + own_row : n - 1) * groups;
  u32 scales[AT_ONCE], zeros[AT_ONCE];
  auto read_entries = [&](int begin) {
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      const int i = begin + j * READERS;
      if (i < width) {
        const u64 at = entries_from + (GROUP ? (u32)(first * ENTRIES + i) / (GROUP ? GROUP / UNIT : 1) : 0);
        scales[j] = read_scale(scale + at);
        zeros[j] = zero ? read_zero(zero + at) : MIDPOINT;
      }
    }
  };
  auto keep_entries = [&](int begin) {
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      const int i = begin + j * READERS;
      if (i < width) entries[own_row * entry_pitch + i] = scales[j] << 16 | zeros[j];
    }
  };

#pragma unroll
  for (int stage = 0; stage < STAGES - 1; stage++) copy_stage_of_codes(stage, stage);
  read_entries(own_first);
  wait_for_kernel_before();
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; stage++) {
    copy_stage_of_x(stage, stage);
    copies_end_group();
  }
  keep_entries(own_first);
#pragma unroll 1
  for (int begin = own_first + AT_ONCE * READERS; begin < width; begin += AT_ONCE * READERS) {
    read_entries(begin);
    keep_entries(begin);
  }

  float total[TILES][4];
#pragma unroll
  for (int r = 0; r < TILES; r++)
#pragma unroll
    for (int i = 0; i < 4; i++) total[r][i] = 0.f;

  int slot = 0;
  for (int stage = 0; stage < stages; stage++) {
    wait_for_all_copies_but<STAGES - 2>();
    __syncthreads(); // the stage has arrived for all threads, and all are done with the previous one
    const int next = stage + STAGES - 1, free = slot == 0 ? STAGES - 1 : slot - 1;
    if (next < stages) {
      copy_stage_of_codes(next, free);
      copy_stage_of_x(next, free);
    }
    copies_end_group();
    const u8* const x_here = shared_x + (slot * m + (g < m ? g : m - 1)) * (X_PITCH * 16) + t * 16;
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      const int step = (stage * ALONG + along) * STEPS + s;
      if (step >= steps) continue;
      u32 words[TILES][2][4], zero_of[TILES][2], scale_of[TILES][2];
      float part[CHAINS][TILES][4];
#pragma unroll
      for (int r = 0; r < TILES; r++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          read16(words[r][h], own_codes + (slot * PIECES + (s * TILES + r) * 2 + h) * (THREADS * 16));
          const int row = (across * TILES + r) * 16 + h * 8 + g;
          const u32 entry = entries[row * entry_pitch + (FOLD ? 4 * step + t : GROUP ? step : 0)];
          zero_of[r][h] = as_zeros(pick(entry, 0, 0x4040));
          scale_of[r][h] = pick(entry, 0, 0x3232);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) part[0][r][i] = FOLD ? total[r][i] : 0.f, part[1][r][i] = 0.f;
      }
#pragma unroll
      for (int p = 0; p < OWN_PIECES; p++) {
        u32 weight[TILES][2][4], piece[4];
#pragma unroll
        for (int r = 0; r < TILES; r++)
#pragma unroll
          for (int h = 0; h < 2; h++)
#pragma unroll
            for (int q = 0; q < 4; q++) {
              const u32 difference = minus(as_numbers(codes_of(words[r][h], p, q)), zero_of[r][h]);
              weight[r][h][q] = FOLD ? times(difference, scale_of[r][h]) : difference;
            }
        read16(piece, x_here + ((along * STEPS + s) * STEP_PIECES + p * 4) * 16);
        const u32 b[4] = {columns_of(piece, 0), columns_of(piece, 1), columns_of(piece, 2), columns_of(piece, 3)};
#pragma unroll
        for (int r = 0; r < TILES; r++) {
          const u32(&a)[2][4] = weight[r];
          multiply(part[0][r], a[0][0], a[1][0], a[0][1], a[1][1], b[0], b[1]);
          multiply(part[1][r], a[0][2], a[1][2], a[0][3], a[1][3], b[2], b[3]);
        }
      }
#pragma unroll
      for (int r = 0; r < TILES; r++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float sum = part[0][r][i] + part[1][r][i];
          total[r][i] = FOLD ? sum : sum * widen(scale_of[r][i / 2] & 0xFFFF) + total[r][i];
        }
    }
    slot = slot == STAGES - 1 ? 0 : slot + 1;
  }

  // Store the sums of the warps
  __syncthreads();
#pragma unroll
  for (int r = 0; r < TILES; r++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = 2 * t + i % 2, column = (across * TILES + r) * 16 + i / 2 * 8 + g;
      if (row < m) sums[(along * m + row) * PITCH + column] = total[r][i];
    }
  __syncthreads();

  // A unit is 4 consecutive results; the blocks of the cluster take turns reducing 4 units each
  constexpr int ROW_UNITS = BN / 4;
  const int units = m * ROW_UNITS, own_units = (m * (BN / 16) + SPLITS - 1) / SPLITS * 4;
  wait_for_cluster(); // all blocks have started, so their shared memory exists
#pragma unroll 1
  for (u32 unit = thread; unit < (u32)units; unit += THREADS) {
    const int row = unit / ROW_UNITS, column = unit % ROW_UNITS * 4;
    float value[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int j = 0; j < ALONG; j++) {
      float part[4];
      read16(part, (const u8*)(sums + (j * m + row) * PITCH + column));
#pragma unroll
      for (int i = 0; i < 4; i++) value[i] += part[i];
    }
    if (SPLITS > 1)
      write16_in(unit / 4 % SPLITS, others + (rank * own_units + unit / (4 * SPLITS) * 4 + unit % 4) * 16, value);
    else if (n0 + column < n)
      write_results(y, bias, row, n0 + column, n, value);
  }
  if (SPLITS == 1) return;
  arrive_at_cluster();
  wait_for_cluster(); // all blocks have written, and none exits before that
#pragma unroll 1
  for (int i = thread; i < own_units; i += THREADS) {
    const int unit = i / 4 * 4 * SPLITS + rank * 4 + i % 4, row = unit / ROW_UNITS, column = unit % ROW_UNITS * 4;
    if (unit >= units || n0 + column >= n) continue;
    float value[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int j = 0; j < SPLITS; j++) {
      float part[4];
      read16(part, others + (j * own_units + i) * 16);
#pragma unroll
      for (int c = 0; c < 4; c++) value[c] += part[c];
    }
    write_results(y, bias, row, n0 + column, n, value);
  }
}
