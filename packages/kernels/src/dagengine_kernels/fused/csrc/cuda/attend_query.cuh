// Rows of the query tile and their turned q, for attend.cu, whose macros, constants and Params it uses.
//
// A thread keeps two rows in the fragments that wgmma takes: of each block of 8 columns the two at 2 * t (t: lane % 4).
// Both elements of a pair that turns together are then in one thread, for either pairing.
#pragma once

// A 4 x 4 transposition of words among the four lanes of a quad: lane t's x[k] becomes lane k's x[t].
__device__ __forceinline__ void quad_transpose(u32 (&x)[4], int t) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 got = __shfl_xor_sync(~0u, t & 1 ? x[i] : x[i + 1], 1);
        if (t & 1) x[i] = got; else x[i + 1] = got;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 got = __shfl_xor_sync(~0u, t & 2 ? x[i] : x[i + 2], 2);
        if (t & 2) x[i] = got; else x[i + 2] = got;
    }
}

// One of the two rows of a thread, 16-row slab `slab` of the query tile, `g` and g + 8 in it. With PAIRED both are of one
// slot, so that they turn by the same cos and sin.
constexpr bool PAIRED = GROUP == 2 || GROUP == 4 || GROUP == 8;
struct Row {
    int index;           // row of the table, -1 for padding
    int slot;
    int head;            // query head within the group
    int position;        // view position
    int reach;           // the last stored position that it sees in the current run; -1: nothing
    float m, l;          // the reference of the exponents, at most SLACK below the largest score so far; the sum
    float limit, base;   // in this run: the score from which m has to grow, and -m in units of the exponent
};

// What a warp's rows see of the current run: the smallest and the largest stored position up to which one does.
struct Sight {
    int low, high;
    __device__ __forceinline__ bool idle() const { return low < 0; }   // no row sees anything
};

// For a row that does not see the run m never grows, and every weight is 0.
__device__ __forceinline__ void set_exponents(Row& row, float unit) {
    row.limit = row.reach < 0 ? -MINUS_INF : row.m + SLACK / unit;
    row.base = row.reach < 0 ? MINUS_INF : -row.m * unit;
}

__device__ __forceinline__ Row make_row(const Params& p, int tile, int slab, int g, int which, int step) {
    Row row;
    if (PAIRED) {
        constexpr int HALF_GROUP = GROUP > 1 ? GROUP / 2 : 1;
        row.slot = slab * (16 / GROUP) + g / HALF_GROUP;
        row.head = g % HALF_GROUP * 2 + which;
    } else {
        row.slot = (slab * 16 + g + 8 * which) / GROUP;
        row.head = (slab * 16 + g + 8 * which) % GROUP;
    }
    const int2 slot = row.slot < SLOTS ? p.slots[tile * SLOTS + row.slot] : make_int2(-1, 0);
    row.index = slot.x;
    row.position = slot.y + step;
    row.reach = -1;
    row.m = NOTHING;
    row.l = 0.f;
    return row;
}

__device__ __forceinline__ const char* query_of(const Params& p, const Row& row, int kv_head) {
    return (const char*)p.q + ((long long)row.index * p.num_kv_heads * GROUP + kv_head * GROUP + row.head) * (D * 2);
}

// The unrotated q of a thread's two rows, in shared memory as its A fragments: [row][D / 32][thread] of 16 bytes.
struct Unrotated {
    u32 base;
    __device__ __forceinline__ void load(const Params& p, const Row& row, int which, int kv_head, int t) const {
#pragma unroll
        for (int i = 0; i < D / 32; ++i) {
            uint4 x = make_uint4(0, 0, 0, 0);
            if (row.index >= 0) x = *(const uint4*)(query_of(p, row, kv_head) + 16 * (4 * i + t));
            u32 words[4] = {x.x, x.y, x.z, x.w};
            quad_transpose(words, t);
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(base + (which * (D / 32) + i) * 2048),
                         "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                         : "memory");
        }
    }
    __device__ __forceinline__ void get(u32 (&x)[D / 8], int which) const {
#pragma unroll
        for (int i = 0; i < D / 32; ++i)
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(x[4 * i]), "=r"(x[4 * i + 1]), "=r"(x[4 * i + 2]), "=r"(x[4 * i + 3])
                         : "r"(base + (which * (D / 32) + i) * 2048));
    }
};

#if ROTARY_DIM > 0
// cos and sin of the columns of block b (8 columns, of which a thread has 2) at a position.
#if INTERLEAVED
typedef float2 Angles;
constexpr int ANGLE_BLOCKS = ROTARY_DIM / 8;
__device__ __forceinline__ Angles angles(const float* table, int b, int t) { return *(const float2*)(table + 8 * b + 2 * t); }
__device__ __forceinline__ void turn_block(u32 (&a)[STEPS_D][4], const u32 (&x)[D / 8], int which, int b, Angles cs) {
    const float2 v = unpack(x[b]);
    a[b / 2][(b & 1) * 2 + which] = pack(v.x * cs.x - v.y * cs.y, v.y * cs.x + v.x * cs.y);
}
#else
typedef float4 Angles;
constexpr int ANGLE_BLOCKS = ROTARY_DIM / 16;
__device__ __forceinline__ Angles angles(const float* table, int b, int t) { return *(const float4*)(table + 16 * b + 4 * t); }
__device__ __forceinline__ void turn_block(u32 (&a)[STEPS_D][4], const u32 (&x)[D / 8], int which, int b, Angles cs) {
    const int c = b + ANGLE_BLOCKS;
    const float2 v = unpack(x[b]), w = unpack(x[c]);
    a[b / 2][(b & 1) * 2 + which] = pack(v.x * cs.x - w.x * cs.y, v.y * cs.z - w.y * cs.w);
    a[c / 2][(c & 1) * 2 + which] = pack(w.x * cs.x + v.x * cs.y, w.y * cs.z + v.y * cs.w);
}
#endif
__device__ __forceinline__ const float* rotation(const Params& p, int reach) {
    return p.rotary + (long long)min(reach, p.rotary_length - 1) * ROTARY_DIM;
}
#endif

// Turn a thread's rows to where they are in the current run, into the A fragments.
__device__ __forceinline__ void turn_rows(
    const Params& p, u32 (&a)[STEPS_D][4], const Unrotated& from, const Row& r0, const Row& r1, int t) {
    if (r0.reach < 0 && r1.reach < 0) return;
    u32 x0[D / 8], x1[D / 8];
    from.get(x0, 0);
    from.get(x1, 1);
#if ROTARY_DIM > 0
    const float* at0 = rotation(p, max(r0.reach, 0));
    const float* at1 = PAIRED ? at0 : rotation(p, max(r1.reach, 0));
#pragma unroll
    for (int b = 0; b < ANGLE_BLOCKS; ++b) {
        const Angles cs = angles(at0, b, t);
        turn_block(a, x0, 0, b, cs);
        turn_block(a, x1, 1, b, PAIRED ? cs : angles(at1, b, t));
    }
#endif
#pragma unroll
    for (int b = ROTARY_DIM / 8; b < D / 8; ++b) {
        a[b / 2][(b & 1) * 2] = x0[b];
        a[b / 2][(b & 1) * 2 + 1] = x1[b];
    }
}

// The last stored position that a row sees in a run; -1 if it sees nothing of it.
__device__ __forceinline__ int reach_of(const Params& p, const Row& row, int2 run) {
    if (row.index < 0) return -1;
    const int delta = run.y < 0 ? run.x : p.deltas[run.y + row.slot];
    return delta == INVISIBLE ? -1 : max(row.position - delta, -1);
}

__device__ __forceinline__ void prefetch(const void* at) { asm volatile("prefetch.global.L1 [%0];" ::"l"(at)); }

__device__ __forceinline__ void prefetch_turn(const Params& p, int reach, int t) {
#if ROTARY_DIM > 0
    if (reach >= 0 && t * 128 < ROTARY_DIM * 4) prefetch((const char*)rotation(p, reach) + t * 128);
#endif
}
