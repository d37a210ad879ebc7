// Names for the operations of the kernels that are an instruction or two; tests/backends/emulated.cpp defines the same
// names for a CPU. Compiled in front of a kernel, with its BITS, HALF (numbers are float16, not bfloat16), SPLITS and
// CLUSTERS (0 for devices before sm_90).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define MIDPOINT (1u << (BITS - 1))
#define MAGIC (HALF ? 0x6400u : 0x4300u) // 1024 (fp16) or 128 (bf16): integers or'ed into the low 10 or 7 bits add to it
#define BOTH(value) ((value) * 0x10001u)

#ifndef EMULATED
#if HALF
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif
#define DEVICE __device__ __forceinline__

extern __shared__ __align__(128) u8 dynamic[];

DEVICE u8* shared_memory() { return dynamic; }

DEVICE u32 address_of(const void* at) { return (u32)__cvta_generic_to_shared(at); }

DEVICE u32 shared_address() { return address_of(dynamic); }

DEVICE void copy_codes(u8* to, const u8* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(address_of(to)), "l"(from) : "memory");
}

DEVICE void copy_x(u8* to, const u16* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address_of(to)), "l"(from) : "memory");
}

// Writes zeros, without reading, if the source is not ``there``
DEVICE void copy16(u32 to, const void* from, bool there) {
  const int bytes = there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

DEVICE void copies_end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int groups> DEVICE void wait_for_all_copies_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}

DEVICE void let_next_kernel_begin() {
#if CLUSTERS
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

DEVICE void wait_for_kernel_before() {
#if CLUSTERS
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Signals only that this block has started: relaxed, so it does not publish writes
DEVICE void begin_cluster() {
#if SPLITS > 1
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

DEVICE void arrive_at_cluster() {
#if SPLITS > 1
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

DEVICE void wait_for_cluster() {
#if SPLITS > 1
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

DEVICE void meet_cluster() {
#if SPLITS > 1
  asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
#else
  __syncthreads();
#endif
}

// Writes to the same address in the shared memory of another block of the cluster
DEVICE void write16_in(int block, u8* to, const float (&value)[4]) {
#if SPLITS > 1
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address_of(to)), "r"(block));
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(there), "f"(value[0]), "f"(value[1]),
               "f"(value[2]), "f"(value[3])
               : "memory");
#endif
}

DEVICE void read16_of(int block, float (&d)[4], u32 at) {
#if SPLITS > 1
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(block));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
               : "r"(there)
               : "memory");
#else
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
               : "r"(at)
               : "memory");
#endif
}

// Weights are constant during the kernel, so their loads are non-coherent
DEVICE u32 read_scale(const u16* at) {
  u16 d;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(d) : "l"(at));
  return d;
}

DEVICE u32 read_zero(const u8* at) {
  u32 d;
  asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(d) : "l"(at));
  return d;
}

DEVICE u32 read_bias(const u16* at) {
  u16 d;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(d) : "l"(at) : "memory");
  return d;
}

DEVICE void read16(u32 (&d)[4], const u8* at) {
  const uint4 read = *reinterpret_cast<const uint4*>(at);
  d[0] = read.x, d[1] = read.y, d[2] = read.z, d[3] = read.w;
}

DEVICE void read16(float (&d)[4], const u8* at) {
  const float4 read = *reinterpret_cast<const float4*>(at);
  d[0] = read.x, d[1] = read.y, d[2] = read.z, d[3] = read.w;
}

DEVICE void read16(u32 (&d)[4], u32 at) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(at));
}

DEVICE void write_shared(u32 at, float value) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(value) : "memory"); }

DEVICE void write4(u16* to, u32 low, u32 high) { *reinterpret_cast<uint2*>(to) = make_uint2(low, high); }

DEVICE void write1(u16* to, u32 value) { *to = (u16)value; }

DEVICE u32 pick(u32 a, u32 b, u32 selector) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

// (value & mask) | MAGIC in both halves
template <u32 mask> DEVICE u32 with_magic(u32 value) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(value), "n"(BOTH(mask)), "r"(BOTH(MAGIC)));
  return d;
}

// Arithmetic on two 16-bit numbers at a time
#if HALF || CLUSTERS
DEVICE u32 minus(u32 a, u32 b) {
  u32 d;
  asm("sub.rn." TYPE "x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

DEVICE u32 times(u32 a, u32 b) {
  u32 d;
  asm("mul.rn." TYPE "x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
#else // before sm_90 bfloat16 has only a b + c: a - b = -1 b + a, and a b = a b + -0
DEVICE u32 times_plus(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

DEVICE u32 minus(u32 a, u32 b) { return times_plus(b, 0xBF80BF80, a); }

DEVICE u32 times(u32 a, u32 b) { return times_plus(a, b, 0x80008000); }
#endif

DEVICE float widen(u32 value) {
  float d;
#if HALF
  asm("cvt.f32.f16 %0, %1;" : "=f"(d) : "h"((u16)value));
#else
  d = __uint_as_float(value << 16);
#endif
  return d;
}

DEVICE u32 narrow(float low, float high) {
  u32 d;
  asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

DEVICE void multiply(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// wgmma: issued by groups of four warps, reads shared memory asynchronously
DEVICE void let_products_see_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE void products_begin_group() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DEVICE void products_end_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int groups> DEVICE void wait_for_all_products_but() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
}
#endif

// Converts codes in the lowest bits of both halves to numbers, offset by a constant that subtracting the converted zero
// point cancels
DEVICE u32 as_numbers(u32 codes) {
#if BITS == 4
  return with_magic<0xF>(codes);
#elif HALF
  return with_magic<0xFF>(codes);
#else // bfloat16 holds 8 bits: code - 128, as (128 + its lower seven bits) - (128 if it has the eighth, else 256)
  return minus(with_magic<0x7F>(codes), with_magic<0x80>(~codes));
#endif
}

// The same for zero points, which may be one more than the largest code
DEVICE u32 as_zeros(u32 zeros) {
#if BITS == 4
  return with_magic<0x1F>(zeros);
#else
  return as_numbers(zeros);
#endif
}

// Writes four consecutive results with their bias, if there is one, and none past column n; ``column`` is a multiple of 4
// below n
DEVICE void write_results(u16* y, const u16* bias, int row, int column, int n, const float (&value)[4]) {
  float each[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    each[i] = value[i] + (bias && column + i < n ? widen(read_bias(bias + column + i)) : 0.f);
  const u32 both[2] = {narrow(each[0], each[1]), narrow(each[2], each[3])};
  u16* const to = y + (u64)row * n + column;
  if (n % 4 == 0) {
    write4(to, both[0], both[1]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (column + i < n) write1(to + i, both[i / 2] >> i % 2 * 16);
}
