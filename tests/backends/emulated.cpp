// Runs a CUDA kernel on a CPU. Threads are fibers, scheduled in a random order; asynchronous copies, and products of
// warp groups, complete as late as allowed; shared memory is initialized with NaN, and one block of a cluster starts
// long after the others. The functions of kernels/device.cu that use assembly on a device are defined here. SOURCE is
// the file that would be compiled for a device; CALL(x, codes, scale, zero, bias, y, sizes) calls the kernel; GROUPS is
// the number of groups in a row. emulate() returns what went wrong, or null.
#define EMULATED
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define __global__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define DEVICE static inline
typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef unsigned long long u64;

struct Place {
  int x, y, z;
};
struct Copy {
  void* to;
  const void* from; // null: zeros
  int group;
};
struct Products { // of 64 rows, 16 per warp, by ``rows`` of x, over 16 columns
  float* sums;
  int rows;
  const u32* first;
  u64 second;
  int group;
};
struct Barrier {
  int members, here;
  long times;
};
struct Fiber {
  ucontext_t state;
  const Barrier* awaited; // or null
  long awaited_times;     // of it, when the fiber began to wait
  Place thread, block;
  int rank; // of the block in the cluster
  bool ended, may_read_x;
  Copy copies[256];
  int waiting, groups; // pending copies, closed groups
  long cluster_times;
  u32 first[4], second[2]; // operands of a product
  Products products[64];
  int multiplying, product_groups; // pending products, closed groups
  bool copies_are_seen, group_begun;
};

static const int MOST_BLOCKS = 8, STACK = 32 << 10, MARGIN = 256;
static const u32 BEGIN = 528; // the address of shared memory, aligned to 16 bytes and no more
static ucontext_t scheduler;
static Fiber *fibers, *fiber;
static int threads, blocks;
static u8* memory[MOST_BLOCKS];
static size_t memory_bytes;
static Barrier block_barriers[MOST_BLOCKS], *warp_barriers, cluster_barrier;
static int ended[MOST_BLOCKS]; // threads that have ended, per block
static const char* wrong;
static const void* given[6]; // x, codes, scale, zero, bias, y
static size_t bytes_given[6];
static int sizes[5]; // m, n, k, and the kernel's other integers

#define threadIdx fiber->thread
#define blockIdx fiber->block

static int min(int a, int b) { return a < b ? a : b; }

static bool waits() { return fiber->awaited && fiber->awaited->times == fiber->awaited_times; }

static void give_way() { swapcontext(&fiber->state, &scheduler); }

static void fail(const char* what) {
  wrong = what;
  give_way();
}

static long arrive(Barrier& barrier) {
  const long times = barrier.times;
  if (++barrier.here == barrier.members) barrier.here = 0, barrier.times++;
  return times;
}

static void wait_for(Barrier& barrier, long times) {
  fiber->awaited = &barrier, fiber->awaited_times = times;
  if (waits()) give_way(); // resumed when it no longer waits
}

static void meet(Barrier& barrier) { wait_for(barrier, arrive(barrier)); }

static void check_shared(const void* at) {
  const u8* const begin = memory[fiber->rank];
  if ((uintptr_t)at % 16) fail("an address in shared memory is no multiple of 16");
  if ((u8*)at < begin || (u8*)at + 16 > begin + memory_bytes) fail("beyond shared memory");
}

static void check_block(int block) {
  if (block >= blocks) fail("a block that is not there");
  if (ended[block] == threads) fail("the memory of a block that has ended");
}

static void check_given(int which, const void* at, int bytes) {
  const u8* const begin = (const u8*)given[which];
  if ((u8*)at < begin || (u8*)at + bytes > begin + bytes_given[which]) fail("beyond what was given");
}

static void copy(int which, void* to, const void* from) {
  check_shared(to);
  if (from) check_given(which, from, 16);
  if ((uintptr_t)from % 16) fail("a copy is not from a multiple of 16");
  if (fiber->waiting == 256) fail("too many copies");
  memset(to, 0xFF, 16);
  fiber->copies[fiber->waiting++] = {to, from, fiber->groups};
}

static u8* at_address(int block, u32 address) {
  u8* const at = memory[block] + (address - BEGIN);
  check_shared(memory[fiber->rank] + ((address - BEGIN) & ~15u));
  return at;
}

static u8* shared_memory() { return memory[fiber->rank]; }
static void copy_codes(u8* to, const u8* from) { copy(1, to, from); }
static void copy_x(u8* to, const u16* from) {
  if (!fiber->may_read_x) fail("x is read before the kernel before has ended");
  copy(0, to, from);
}
static u32 shared_address() { return BEGIN; }
static void copy16(u32 to, const void* from, bool there) {
  const u8* const begin = (const u8*)given[0];
  const bool of_x = from >= begin && from < begin + bytes_given[0];
  copy(of_x ? 0 : 1, at_address(fiber->rank, to), there ? from : nullptr);
}
static void copies_end_group() { fiber->groups++; }
template <int but> static void wait_for_all_copies_but() {
  int kept = 0;
  for (int i = 0; i < fiber->waiting; i++) {
    const Copy each = fiber->copies[i];
    if (each.group < fiber->groups - but)
      each.from ? memcpy(each.to, each.from, 16) : memset(each.to, 0, 16);
    else
      fiber->copies[kept++] = each;
  }
  fiber->waiting = kept;
  fiber->copies_are_seen = false;
}
static void __syncthreads() { meet(block_barriers[fiber->rank]); }
static void let_next_kernel_begin() {}
static void wait_for_kernel_before() { fiber->may_read_x = true; }
static void arrive_at_cluster() { fiber->cluster_times = arrive(cluster_barrier); }
static void begin_cluster() { arrive_at_cluster(); }
static void wait_for_cluster() { wait_for(cluster_barrier, fiber->cluster_times); }
static void meet_cluster() { arrive_at_cluster(), wait_for_cluster(); }
static void read16_of(int block, float (&d)[4], u32 at) {
  check_block(block);
  memcpy(d, at_address(block, at), 16);
}
static void write_shared(u32 at, float value) { memcpy(at_address(fiber->rank, at), &value, 4); }
static void write16_in(int block, u8* to, const float (&value)[4]) {
  check_shared(to), check_block(block);
  if (cluster_barrier.times == 0) fail("written to a block that may not have begun");
  memcpy(memory[block] + (to - shared_memory()), value, 16);
}
static u32 read_scale(const u16* at) {
  check_given(2, at, 2);
  return *at;
}
static u32 read_zero(const u8* at) {
  check_given(3, at, 1);
  return *at;
}
static u32 read_bias(const u16* at) {
  if (!fiber->may_read_x) fail("the bias is read before the kernel before has ended");
  check_given(4, at, 2);
  return *at;
}
template <class Value> static void read16(Value (&d)[4], const u8* at) {
  check_shared(at);
  memcpy(d, at, 16);
}
static void read16(u32 (&d)[4], u32 at) { memcpy(d, at_address(fiber->rank, at), 16); }
static void write1(u16* to, u32 value) {
  if (!fiber->may_read_x) fail("written before the kernel before has ended");
  check_given(5, to, 2);
  *to = (u16)value;
}
static void write4(u16* to, u32 low, u32 high) {
  if ((uintptr_t)to % 8) fail("8 bytes are not written to a multiple of 8");
  write1(to, low), write1(to + 1, low >> 16), write1(to + 2, high), write1(to + 3, high >> 16);
}

static u32 pick(u32 a, u32 b, u32 selector) {
  const uint64_t both = (uint64_t)b << 32 | a;
  u32 d = 0;
  for (int i = 0; i < 4; i++) d |= (u32)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return d;
}

static float widen(u32 value);
static u32 narrow(float low, float high);
template <u32 mask> static u32 with_magic(u32 value);
static u32 minus(u32 a, u32 b) {
  return narrow(widen(a & 0xFFFF) - widen(b & 0xFFFF), widen(a >> 16) - widen(b >> 16));
}
static u32 times(u32 a, u32 b) {
  return narrow(widen(a & 0xFFFF) * widen(b & 0xFFFF), widen(a >> 16) * widen(b >> 16));
}

// Synchronizes the lanes of a warp; each sums its results: rows lane / 4 and lane / 4 + 8, columns 2 (lane % 4) and the
// next one
static void multiply(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const int lane = fiber->thread.x % 32;
  Fiber* const warp = fiber - lane;
  Barrier& barrier = warp_barriers[(warp - fibers) / 32];
  const u32 first[4] = {a0, a1, a2, a3}, second[2] = {b0, b1};
  memcpy(fiber->first, first, sizeof first), memcpy(fiber->second, second, sizeof second);
  meet(barrier);
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++) {
      const u32 a = warp[row * 4 + k % 8 / 2].first[i / 2 + k / 8 * 2], b = warp[column * 4 + k % 8 / 2].second[k / 8];
      sums[i] += widen(a >> k % 2 * 16 & 0xFFFF) * widen(b >> k % 2 * 16 & 0xFFFF);
    }
  }
  meet(barrier);
}

// Queues a product. The operands are read when the lanes of the warp group wait for it, and not earlier
static void multiply_later(float* sums, int rows, const u32 (&a)[4], u64 b) {
  if (!fiber->copies_are_seen) fail("the matrix unit may not see what was copied");
  if (!fiber->group_begun) fail("products begin with a fence");
  if (b >> 62 != 1 || (b >> 32 & 0x3FFF) != 1024 >> 4) fail("x is not laid out as the kernel says");
  if (fiber->multiplying == 64) fail("too many products");
  fiber->products[fiber->multiplying++] = {sums, rows, a, b, fiber->product_groups};
}
#define WGMMA(d, a, b) multiply_later(d, BM, a, b)
static void let_products_see_copies() { fiber->copies_are_seen = true; }
static void products_begin_group() { fiber->group_begun = true; }
static void products_end_group() { fiber->product_groups++, fiber->group_begun = false; }
static float of_x(u64 tile, int row, int column) { // 16-byte units are swizzled within 128 bytes by row % 8
  const u32 at = (u32)(tile & 0x3FFF) * 16 + row / 8 * 1024 + row % 8 * 128 + column * 2;
  u16 value;
  memcpy(&value, at_address(fiber->rank, at ^ (at >> 7 & 7) << 4), 2);
  return widen(value);
}
static void multiply_now(const Products& each) {
  const int lane = fiber->thread.x % 32;
  Fiber* const warp = fiber - lane;
  Barrier& barrier = warp_barriers[(warp - fibers) / 32];
  memcpy(fiber->first, each.first, sizeof fiber->first);
  meet(barrier);
  for (int half = 0; half < 2; half++) { // half of the warp's rows
    float a[16];
    for (int k = 0; k < 16; k++)
      a[k] = widen(warp[lane / 4 * 4 + k % 8 / 2].first[half + k / 8 * 2] >> k % 2 * 16 & 0xFFFF);
    for (int i = 0; i < each.rows / 4; i++) {
      const int row = i / 2 * 8 + lane % 4 * 2 + i % 2;
      float& sum = each.sums[i / 2 * 4 + half * 2 + i % 2];
      for (int k = 0; k < 16; k++) sum += a[k] * of_x(each.second, row, k);
    }
  }
  meet(barrier);
}
template <int but> static void wait_for_all_products_but() {
  int kept = 0;
  for (int i = 0; i < fiber->multiplying; i++) {
    const Products each = fiber->products[i];
    if (each.group < fiber->product_groups - but)
      multiply_now(each);
    else
      fiber->products[kept++] = each;
  }
  fiber->multiplying = kept;
}

#include SOURCE

#if HALF
static float widen(u32 value) {
  const int exponent = value >> 10 & 31;
  const float digits = (float)((exponent ? 1024 : 0) | (value & 1023));
  const float size = ldexpf(digits, (exponent ? exponent : 1) - 25);
  return exponent == 31 ? NAN : value & 0x8000 ? -size : size;
}

static u32 narrowed(float value) { // to nearest, ties to even, by the rounding mode of nearbyintf
  const u32 sign = signbit(value) ? 0x8000 : 0;
  const float size = fabsf(value);
  if (!(size < 65520)) return sign | (size == size ? 0x7C00 : 0x7E00);
  int exponent = size < 0x1p-14f ? -14 : ilogbf(size);
  return sign | (u32)(nearbyintf(ldexpf(size, 10 - exponent)) + (exponent + 14) * 1024);
}
#else
static float widen(u32 value) {
  const u32 wide = value << 16;
  float d;
  memcpy(&d, &wide, 4);
  return d;
}

static u32 narrowed(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  return value == value ? (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 : 0x7FFF;
}
#endif

static u32 narrow(float low, float high) { return narrowed(low) | narrowed(high) << 16; }

template <u32 mask> static u32 with_magic(u32 value) { return (value & BOTH(mask)) | BOTH(MAGIC); }


static void enter() {
  CALL((const u16*)given[0], (const u8*)given[1], (const u16*)given[2], (const u8*)given[3], (const u16*)given[4],
       (u16*)given[5], sizes);
  fiber->ended = true, ended[fiber->rank]++;
  give_way();
}

static void run_cluster(int cluster, const int* grid) {
  const int count = blocks * threads;
  for (int block = 0; block < blocks; block++) {
    memset(memory[block], 0xFF, memory_bytes + MARGIN);
    block_barriers[block] = {threads, 0, 0}, ended[block] = 0;
  }
  for (int warp = 0; warp < count / 32; warp++) warp_barriers[warp] = {32, 0, 0};
  cluster_barrier = {count, 0, 0};
  for (int i = 0; i < count; i++) {
    Fiber& each = fibers[i];
    u8* const stack = (u8*)each.state.uc_stack.ss_sp;
    getcontext(&each.state);
    each.state.uc_stack.ss_sp = stack, each.state.uc_stack.ss_size = STACK, each.state.uc_link = nullptr;
    makecontext(&each.state, enter, 0);
    each.thread = {i % threads}, each.rank = i / threads;
    const int x = grid[2] > 1 ? cluster : cluster * blocks + each.rank;
    each.block = {x % grid[0], x / grid[0], grid[2] > 1 ? each.rank : 0};
    each.awaited = nullptr, each.ended = false, each.may_read_x = BEGINS, each.waiting = each.groups = 0;
    each.multiplying = each.product_groups = 0, each.copies_are_seen = each.group_begun = false;
  }
  int left = count;
  const int late = rand() % blocks, begins = blocks > 1 ? 300 : 0;
  for (int round = 0; left && !wrong; round++) {
    bool all_wait = round >= begins;
    const int begin = rand() % count;
    for (int i = 0; i < count && !wrong; i++) {
      fiber = fibers + (begin + i) % count;
      if (fiber->ended || waits() || (fiber->rank == late && round < begins)) continue;
      swapcontext(&scheduler, &fiber->state);
      left -= fiber->ended, all_wait = false;
    }
    if (all_wait) wrong = "some threads wait for ever";
  }
}

// The blocks of a cluster are adjacent along x, or are all those along z
extern "C" const char* emulate(const int* grid, int cluster, int block_threads, int shared, const void* const* arguments,
                               const int* numbers, int count_of_numbers) {
  memcpy(given, arguments, sizeof given), memcpy(sizes, numbers, count_of_numbers * sizeof(int));
  threads = block_threads, blocks = grid[2] > 1 ? grid[2] : cluster, memory_bytes = shared, wrong = nullptr;
  const size_t m = sizes[0], n = sizes[1], k = sizes[2], entries = n * (GROUPS);
  const size_t bytes[6] = {m * k * 2, n * k / 8 * BITS, entries * 2, entries, n * 2, m * n * 2};
  memcpy(bytes_given, bytes, sizeof bytes);
  const int clusters = grid[0] * grid[1] * grid[2] / blocks;
  const int count = blocks * threads;
  fibers = (Fiber*)calloc(count, sizeof(Fiber));
  warp_barriers = (Barrier*)calloc(count / 32, sizeof(Barrier));
  u8* const stacks = (u8*)malloc((size_t)count * STACK);
  for (int i = 0; i < count; i++) fibers[i].state.uc_stack.ss_sp = stacks + (size_t)i * STACK;
  for (int block = 0; block < blocks; block++)
    memory[block] = (u8*)aligned_alloc(128, (memory_bytes + MARGIN + 127) / 128 * 128);
  for (int each = 0; each < clusters && !wrong; each++) run_cluster(each, grid);
  for (int block = 0; block < blocks; block++) free(memory[block]);
  free(stacks), free(warp_barriers), free(fibers);
  return wrong;
}
