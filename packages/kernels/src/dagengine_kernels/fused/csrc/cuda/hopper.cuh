// sm_90's own instructions, one function each: barriers in shared memory, copies by tensor map, matrix products of a
// warpgroup, and the conversions of their 16-bit operands. HALF_FLOAT: fp16 instead of bf16. Knows no attention.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define MINUS_INF __int_as_float(0xff800000)

struct alignas(64) TensorMap { char opaque[128]; };

__device__ __forceinline__ u32 smem_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}
__device__ __forceinline__ void barrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nwait:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra wait;\n}\n" ::"r"(bar), "r"(parity) : "memory");
}
// Two barriers at the cost of one, when both are done.
__device__ __forceinline__ void barriers_wait(u32 one, u32 one_parity, u32 other, u32 other_parity) {
    asm volatile(
        "{\n.reg .pred a, b;\nwait:\nmbarrier.try_wait.parity.shared::cta.b64 a, [%0], %1;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 b, [%2], %3;\nand.pred a, a, b;\n"
        "@!a bra wait;\n}\n" ::"r"(one), "r"(one_parity), "r"(other), "r"(other_parity) : "memory");
}
// What of a box lies outside of a page's rows comes as zeros.
__device__ __forceinline__ void load_box(u32 to, const TensorMap* map, u32 bar, int column, int row, int head, int page) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to), "l"(map), "r"(bar), "r"(column), "r"(row), "r"(head), "r"(page)
        : "memory");
}
// A box of a matrix, whose lines leave L2 as the policy says.
__device__ __forceinline__ void load_box(u32 to, const TensorMap* map, u32 bar, int column, int row, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(map), "r"(bar), "r"(column), "r"(row), "l"(policy)
        : "memory");
}
// A box of a matrix, to the same place of all blocks of the cluster that `blocks` has a bit for, and to a barrier of each.
__device__ __forceinline__ void load_box_to_blocks(u32 to, const TensorMap* map, u32 bar, int column, int row, u16 blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(map), "r"(bar), "r"(column), "r"(row), "h"(blocks)
        : "memory");
}
__device__ __forceinline__ void load_box(u32 to, const TensorMap* map, u32 bar, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4}], [%2];" ::"r"(to), "l"(map), "r"(bar), "r"(column), "r"(row)
        : "memory");
}
// A box to a matrix; what lies outside of it is not written. A thread's stores are closed, then awaited, together.
__device__ __forceinline__ void store_box(const TensorMap* map, u32 from, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
                 "r"(column), "r"(row)
                 : "memory");
}
__device__ __forceinline__ void close_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void await_stores_having_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void await_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// What threads wrote to shared memory is seen by the copies and products that are started behind this.
__device__ __forceinline__ void show_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Four matrices of 8 rows of 16 bytes, lane l's the row that is the (l % 8)th of matrix l / 8.
__device__ __forceinline__ void store_matrices(u32 row, const u32 (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3])
                 : "memory");
}
__device__ __forceinline__ u64 first_to_leave_l2() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ u64 last_to_leave_l2() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Of the blocks of a cluster: all threads have come here; what they wrote before is seen unless they came having read only.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_arrive_having_read() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ __forceinline__ u32 address_in(u32 address, u32 rank) {
    u32 r;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
    return r;
}
// At a barrier of any block of the cluster, its address from `address_in`.
__device__ __forceinline__ void barrier_arrive_in_cluster(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ float4 load_from_cluster(u32 address) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
    return v;
}

// Descriptors of 128-byte swizzled tiles, [half][key][64 columns]: the low word holds the address and the stride between
// halves in units of 16 bytes, so that an offset is added to it; the high word the stride between 8 keys and the swizzle.
__device__ __forceinline__ u32 describe(u32 address, u32 leading_bytes) { return address >> 4 | leading_bytes >> 4 << 16; }
__device__ __forceinline__ u64 descriptor(u32 low) {
    u64 r;
    asm("mov.b64 %0, {%1, %2};" : "=l"(r) : "r"(low), "r"(1u << 30 | 1024 >> 4));
    return r;
}

#if HALF_FLOAT
#define OPERANDS "f16.f16"
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ float2 unpack(u32 x) {
    float2 r;
    asm("{\n.reg .f16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}" : "=f"(r.x), "=f"(r.y) : "r"(x));
    return r;
}
#else
#define OPERANDS "bf16.bf16"
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ float2 unpack(u32 x) {
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xFFFF0000u));
}
#endif

__device__ __forceinline__ float exp2_fast(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ float tanh_fast(float x) {   // tanh.approx is wrong by up to 5e-4, too much times a cap of 50
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.f + exp2_fast(2.885390082f * x)));
    return 1.f - 2.f * r;
}

__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void mma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }
template <int N>
__device__ __forceinline__ void hold(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

#define F8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])

// d[64, N] (+)= a[64, 16] b[16, N]: a in registers, b in shared memory. TRANSPOSED: b is stored with N contiguous.
template <int TRANSPOSED>
__device__ __forceinline__ void mma(float (&d)[32], const u32 (&a)[4], u64 b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." OPERANDS
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31},"
        " {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n"
        : F8(d, 0), F8(d, 8), F8(d, 16), F8(d, 24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(TRANSPOSED));
}
template <int TRANSPOSED>
__device__ __forceinline__ void mma(float (&d)[64], const u32 (&a)[4], u64 b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." OPERANDS
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
        " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
        " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63},"
        " {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}\n"
        : F8(d, 0), F8(d, 8), F8(d, 16), F8(d, 24), F8(d, 32), F8(d, 40), F8(d, 48), F8(d, 56)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(TRANSPOSED));
}

// d[64, N] += a[64, 16] b[16, N], N twice the length of d: both in shared memory, with the inputs contiguous.
#define WITH_SHARED(SIZE, REGISTERS, A, B, ...)                                                                            \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" SIZE "k16.f32." OPERANDS " {" REGISTERS "}, " A ", " B ", 1, 1, 1, 0, 0;\n" \
                 : __VA_ARGS__ : "l"(a), "l"(b))
#define R8(a, b, c, d, e, f, g, h) "%" #a ", %" #b ", %" #c ", %" #d ", %" #e ", %" #f ", %" #g ", %" #h
__device__ __forceinline__ void mma(float (&d)[4], u64 a, u64 b) {
    WITH_SHARED("8", "%0, %1, %2, %3", "%4", "%5", "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]));
}
__device__ __forceinline__ void mma(float (&d)[8], u64 a, u64 b) {
    WITH_SHARED("16", R8(0, 1, 2, 3, 4, 5, 6, 7), "%8", "%9", F8(d, 0));
}
__device__ __forceinline__ void mma(float (&d)[16], u64 a, u64 b) {
    WITH_SHARED("32", R8(0, 1, 2, 3, 4, 5, 6, 7) ", " R8(8, 9, 10, 11, 12, 13, 14, 15), "%16", "%17", F8(d, 0), F8(d, 8));
}
__device__ __forceinline__ void mma(float (&d)[32], u64 a, u64 b) {
    WITH_SHARED("64",
                R8(0, 1, 2, 3, 4, 5, 6, 7) ", " R8(8, 9, 10, 11, 12, 13, 14, 15) ", "
                R8(16, 17, 18, 19, 20, 21, 22, 23) ", " R8(24, 25, 26, 27, 28, 29, 30, 31),
                "%32", "%33", F8(d, 0), F8(d, 8), F8(d, 16), F8(d, 24));
}
// And d[64, 256] (+)= a[64, 16] b[16, 256].
__device__ __forceinline__ void mma(float (&d)[128], u64 a, u64 b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." OPERANDS " {"
        R8(0, 1, 2, 3, 4, 5, 6, 7) ", " R8(8, 9, 10, 11, 12, 13, 14, 15) ", "
        R8(16, 17, 18, 19, 20, 21, 22, 23) ", " R8(24, 25, 26, 27, 28, 29, 30, 31) ", "
        R8(32, 33, 34, 35, 36, 37, 38, 39) ", " R8(40, 41, 42, 43, 44, 45, 46, 47) ", "
        R8(48, 49, 50, 51, 52, 53, 54, 55) ", " R8(56, 57, 58, 59, 60, 61, 62, 63) ", "
        R8(64, 65, 66, 67, 68, 69, 70, 71) ", " R8(72, 73, 74, 75, 76, 77, 78, 79) ", "
        R8(80, 81, 82, 83, 84, 85, 86, 87) ", " R8(88, 89, 90, 91, 92, 93, 94, 95) ", "
        R8(96, 97, 98, 99, 100, 101, 102, 103) ", " R8(104, 105, 106, 107, 108, 109, 110, 111) ", "
        R8(112, 113, 114, 115, 116, 117, 118, 119) ", " R8(120, 121, 122, 123, 124, 125, 126, 127) "}, "
        "%128, %129, p, 1, 1, 0, 0;\n}\n"
        : F8(d, 0), F8(d, 8), F8(d, 16), F8(d, 24), F8(d, 32), F8(d, 40), F8(d, 48), F8(d, 56),
          F8(d, 64), F8(d, 72), F8(d, 80), F8(d, 88), F8(d, 96), F8(d, 104), F8(d, 112), F8(d, 120)
        : "l"(a), "l"(b), "r"(accumulate));
}
#undef R8
#undef WITH_SHARED
