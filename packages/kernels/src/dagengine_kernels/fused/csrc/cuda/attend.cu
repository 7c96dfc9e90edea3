// Attention over a fused plan (fused/plan.py draws its format) on sm_90a: decode and prefill alike.
//
// A stream is one worker: a producer warp walks the worker's works and brings KV tiles from their pages by TMA into two
// rings (K and V); each consumer warpgroup keeps 64 rows of the query tile (turned q in registers, m, l, O) and walks the
// same tiles. q is turned at p - delta whenever a tile belongs to another run than the one before it. A warp takes part in a
// tile of which it sees nothing, or whose boxes are all other slots', in the products only, with weights of 0.
//
// A kernel launched to overlap the one before it waits for that one's end before it reads anything or, where the plan is
// settled, before it reads q and the tiles that may hold rows of this step: those that reach a position of the query tile.
//
//     producer   | tile 0 | tile 1 | tile 2 | ...                     full[s]: bytes arrived, header[s] written
//     consumer     S0 = q K0 | softmax 0, S1 = q K1, O += P0 V0 | ...   empty[s]: every consumer warp has read it
//
// Macros: HEAD_DIM 64|128, GROUP, ROWS 64|128, PAGE 16|64, BOXES (PAGE * BOXES = 64 or 128 keys), STAGES, HALF_FLOAT 0|1
// (fp16 instead of bf16), ROTARY_DIM (0: none; a multiple of 16), INTERLEAVED 0|1, SOFTCAP 0|1, WINDOW 0|1, INVARIANT 0|1
// (a row's m grows when its own scores ask for it, else when those of any row of its warp do: what a work brings to a row
// then depends on the row and the work's KV tiles alone, since tiles that it does not see leave m, l and O as they are).
// Knows no requests; positions only as the integers of the plan.

#include "hopper.cuh"

constexpr int D = HEAD_DIM;
constexpr int KEYS = PAGE * BOXES;
constexpr int SLOTS = ROWS / GROUP;
constexpr int CONSUMERS = ROWS / 64;
constexpr int STREAMS = 2 / CONSUMERS;
constexpr int HALVES = D / 64;
constexpr int HALF_BYTES = KEYS * 128;           // 64 columns of a K or V tile
constexpr int TILE_BYTES = KEYS * D * 2;         // a K or a V tile
constexpr int BOX_BYTES = PAGE * D * 2;
constexpr int S_REGS = KEYS / 2;                 // scores of two rows: per thread KEYS / 2 floats
constexpr int O_REGS = D / 2;
constexpr int STEPS_D = D / 16;
constexpr int STEPS_K = KEYS / 16;
constexpr int INVISIBLE = -2147483647 - 1;
// Flags of a KV tile: PARTIAL: not all of its rows are to be seen; DIRTY: rows of V may hold anything that must not count;
// CHANGES: the next tile of the work is of another run; OWNED: some boxes are for one slot alone.
constexpr int LAST = 1, PARTIAL = 2, CHANGES = 4, OWNED = 8, DIRTY = 16;
constexpr float NOTHING = -1e30f;                 // m of a row that has seen nothing
constexpr float SLACK = 8.f;                     // weights reach 2^SLACK before the row is scaled anew

// A work of the plan and the run that its first tile belongs to, so that q is turned while that tile is on its way.
struct alignas(16) Work { int tile, head, begin, end, part, run, delta, vec; };

struct Params {
    TensorMap kv;              // [pages, 2 * Hkv, PAGE, D], box [1, 1, PAGE, 64], 128-byte swizzle
    const void* q;             // [T, Hq, D], unrotated
    void* out;                 // [T, Hq, D]
    float* lse2_out;           // [T, Hq] or null
    float* o_part;             // [P, GROUP, D]
    float* lse2_part;          // [P, GROUP]
    const float* rotary;       // [rotary_length, ROTARY_DIM / 2, 2]: cos, sin
    const float* sinks;        // [Hq], base e, or null
    const int4* entries;
    const int2* runs;
    const int* deltas;
    const int2* slots;         // [tiles, SLOTS]: table row (-1 pads) and its view position
    const Work* works;
    const int* work_indptr;    // [workers + 1]
    const int* step;           // positions have advanced by this since the plan was made
    float score_scale;         // with SOFTCAP: scale / softcap; else scale * log2(e)
    float cap_log2;            // softcap * log2(e)
    int rotary_length;
    int window;
    int num_kv_heads;
    int settled;               // what is read was complete before, but for q and the rows at the positions of the queries
};

// Of a KV tile: stored positions, and the first and the last slot that sees something of it.
struct alignas(16) Header { int flags, pos_max, pos_min, run, next_run, first_slot, last_slot, padding; };

struct Box {
    int rows, pos0;   // LO | OWNER << 8 | HI << 16, stored position of row 0; of the box where it lies in shared memory
    __device__ __forceinline__ int lo() const { return rows & 0xFF; }
    __device__ __forceinline__ int hi() const { return (u32)rows >> 16; }
    __device__ __forceinline__ bool is_for(int slot) const {   // owner 0: for all
        const int owner = rows >> 8 & 0xFF;
        return owner == 0 || owner == slot + 1;
    }
};

constexpr int RING_BYTES = STAGES * TILE_BYTES;
constexpr int META_BYTES = STAGES * (32 + 16 * BOXES);   // a header, and the boxes twice: K's stage and V's are freed apart
constexpr int SMEM_K = 0, SMEM_V = RING_BYTES, SMEM_META = 2 * RING_BYTES;
constexpr int SMEM_BARRIERS = (SMEM_META + META_BYTES + 15) / 16 * 16;
constexpr int SMEM_Q = (SMEM_BARRIERS + 4 * STAGES * 8 + 1023) / 1024 * 1024;
constexpr int SMEM_STREAM = SMEM_Q + ROWS * D * 2;

// The ring position: stage and the parity of its current phase.
struct Ring {
    int stage = 0;
    u32 parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

struct Shared {
    u32 base;
    Header* headers;
    Box* k_boxes;
    Box* v_boxes;
    __device__ __forceinline__ u32 k(int s) const { return base + SMEM_K + s * TILE_BYTES; }
    __device__ __forceinline__ u32 v(int s) const { return base + SMEM_V + s * TILE_BYTES; }
    __device__ __forceinline__ u32 k_full(int s) const { return base + SMEM_BARRIERS + 8 * s; }
    __device__ __forceinline__ u32 v_full(int s) const { return base + SMEM_BARRIERS + 8 * (STAGES + s); }
    __device__ __forceinline__ u32 k_empty(int s) const { return base + SMEM_BARRIERS + 8 * (2 * STAGES + s); }
    __device__ __forceinline__ u32 v_empty(int s) const { return base + SMEM_BARRIERS + 8 * (3 * STAGES + s); }
};

__device__ __forceinline__ Shared stream(char* memory, int i) {
    char* mine = memory + i * SMEM_STREAM;
    Box* boxes = (Box*)(mine + SMEM_META + 32 * STAGES);
    return Shared{smem_address(mine), (Header*)(mine + SMEM_META), boxes, boxes + STAGES * BOXES};
}

__device__ __forceinline__ void await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Whether a producer has waited for the kernel before this one, and until then the first position of the query tile.
struct Start {
    bool waited;
    int oldest = 0;

    __device__ __forceinline__ void look_at(const Params& p, int tile, int lane) {
        const int step = *p.step;
        oldest = 2147483647;
        for (int slot = lane; slot < SLOTS; slot += 32) {
            const int2 row = p.slots[tile * SLOTS + slot];
            if (row.x >= 0) oldest = min(oldest, row.y + step);
        }
        oldest = __reduce_min_sync(~0u, oldest);
    }
};

// The row of a page that a box begins with. A slice that ends with the page, or begins with it, is moved to the begin or
// the end of its box: the box's other rows, outside the page, come as zeros, and V needs no cleaning. Not where the places
// of a tile's rows must not depend on how many of them there are by now.
__device__ __forceinline__ int first_row(int lo, int hi) {
    if (INVARIANT || hi <= lo) return 0;
    if (lo == 0) return hi - PAGE;
    return hi == PAGE ? lo : 0;
}

// Bring one KV tile, by a whole warp: lane b < BOXES has its entry b; next_run is that of the tile behind it in the work.
// A box without rows is brought as zeros of V.
__device__ __forceinline__ void send(
    const Params& p, const Shared& sh, Ring& ring, Start& start, int head, const int4& entry, int next_run, int flags, int lane) {
    const Box listed{entry.y, entry.z};
    const int s = ring.stage, lo = listed.lo(), hi = listed.hi(), owner = entry.y >> 8 & 0xFF, skipped = first_row(lo, hi);
    const Box box{entry.y - skipped * (1 | 1 << 16), entry.z + skipped};
    const bool mine = lane < BOXES, present = mine && hi > lo;
    const int bytes = __popc(__ballot_sync(~0u, present)) * BOX_BYTES;
    const int pos_min = __reduce_min_sync(~0u, present ? entry.z + lo : 2147483647);
    const int pos_max = __reduce_max_sync(~0u, present ? entry.z + hi - 1 : INVISIBLE);
    const int first_slot = __reduce_min_sync(~0u, present ? owner - 1 : SLOTS);   // -1: the tile is for all
    const int last_slot = __reduce_max_sync(~0u, present && owner ? owner - 1 : -1);
    if (__any_sync(~0u, mine && hi - lo != PAGE)) flags |= PARTIAL;
    if (__any_sync(~0u, present && hi - lo != PAGE && (INVARIANT || (lo > 0 && hi < PAGE)))) flags |= DIRTY;
    if (last_slot >= 0) flags |= OWNED;
    if (next_run != entry.w) flags |= CHANGES;
    if (!start.waited && pos_max >= start.oldest) {
        await_previous();
        start.waited = true;
    }
    barrier_wait(sh.k_empty(s), ring.parity ^ 1);
    if (mine) sh.k_boxes[s * BOXES + lane] = box;
    __syncwarp();
    if (lane == 0) {
        sh.headers[s] = Header{flags, pos_max, pos_min, entry.w, next_run, first_slot, first_slot < 0 ? SLOTS : last_slot};
        barrier_expect(sh.k_full(s), bytes);
    }
    __syncwarp();
    const u32 row = (lane % BOXES) * PAGE * 128;
    if (present)
#pragma unroll
        for (int h = 0; h < HALVES; ++h)
            load_box(sh.k(s) + h * HALF_BYTES + row, &p.kv, sh.k_full(s), h * 64, skipped, head, entry.x);
    barrier_wait(sh.v_empty(s), ring.parity ^ 1);
    if (mine) sh.v_boxes[s * BOXES + lane] = box;
    __syncwarp();
    if (lane == 0) barrier_expect(sh.v_full(s), TILE_BYTES);
    __syncwarp();
    if (mine)
#pragma unroll
        for (int h = 0; h < HALVES; ++h)
            load_box(sh.v(s) + h * HALF_BYTES + row, &p.kv, sh.v_full(s), h * 64, present ? skipped : PAGE,
                     p.num_kv_heads + head, max(entry.x, 0));
    __syncwarp();
    ring.next();
}

// Empty KV tiles (reserved for growth) are left out; a work without any other sends one, so that its rows are written.
__device__ __forceinline__ void produce(const Params& p, const Shared& sh, int worker, int lane) {
    constexpr int WIDTH = 32 / BOXES;
    Ring ring;
    Start start{!p.settled};
    if (start.waited) await_previous();
    const int end_work = p.work_indptr[worker + 1];
    for (int w = p.work_indptr[worker]; w < end_work; ++w) {
        const Work work = p.works[w];
        if (!start.waited) start.look_at(p, work.tile, lane);
        const int head = work.head, begin = work.begin, end = work.end;
        int4 pending = make_int4(-1, 0, 0, work.run);
        bool have = false;
        for (int t0 = begin; t0 < end; t0 += WIDTH) {
            const int tiles = min(WIDTH, end - t0);
            int4 loaded = make_int4(-1, 0, 0, 0);
            if (lane < tiles * BOXES) loaded = p.entries[t0 * BOXES + lane];
            const u32 filled = __ballot_sync(~0u, Box{loaded.y, 0}.hi() > Box{loaded.y, 0}.lo());
            for (int t = 0; t < tiles; ++t) {
                if (!(filled >> (t * BOXES) & ((1u << BOXES) - 1))) continue;
                const int from = t * BOXES + lane % BOXES;
                if (have) send(p, sh, ring, start, head, pending, __shfl_sync(~0u, loaded.w, t * BOXES), 0, lane);
                have = true;
                pending.x = __shfl_sync(~0u, loaded.x, from);
                pending.y = __shfl_sync(~0u, loaded.y, from);
                pending.z = __shfl_sync(~0u, loaded.z, from);
                pending.w = __shfl_sync(~0u, loaded.w, from);
            }
        }
        send(p, sh, ring, start, head, pending, pending.w, LAST, lane);
    }
}

__device__ __forceinline__ void group_sync(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

#include "attend_query.cuh"

__device__ __forceinline__ void mask(
    float (&s)[S_REGS], const Params& p, const Box* boxes, const Row& r0, const Row& r1, int t) {
    const int reach0 = r0.reach, reach1 = r1.reach;
#pragma unroll
    for (int b = 0; b < BOXES; ++b) {
        const Box box = boxes[b];
        const int lo = box.lo(), pos0 = box.pos0, stop = pos0 + box.hi();   // pos0 may be negative: reach - pos0 overflows
        const int hi0 = box.is_for(r0.slot) ? min(reach0, stop - 1) - pos0 + 1 : 0;
        const int hi1 = PAIRED ? hi0 : box.is_for(r1.slot) ? min(reach1, stop - 1) - pos0 + 1 : 0;
#if WINDOW
        const int lo0 = min(max(pos0 + lo, reach0 - p.window + 1), stop) - pos0;
        const int lo1 = min(max(pos0 + lo, reach1 - p.window + 1), stop) - pos0;
#else
        const int lo0 = lo, lo1 = lo;
#endif
#pragma unroll
        for (int n = 0; n < PAGE / 8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int key = 8 * n + 2 * t + i, r = (b * PAGE / 8 + n) * 4 + i;
                if (key < lo0 || key >= hi0) s[r] = MINUS_INF;
                if (key < lo1 || key >= hi1) s[r + 2] = MINUS_INF;
            }
    }
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Write a row: every lane of a quad calls, and stores 16 bytes at a time.
__device__ __forceinline__ void finish(
    const Params& p, const Row& row, const float (&o)[O_REGS], int which, int kv_head, int part, float unit, int t) {
    const float l = quad_sum(row.l);
    float share = l > 0.f ? 1.f / l : 0.f;
    float lse2 = l > 0.f ? fmaf(row.m, unit, log2f(l)) : MINUS_INF;
    if (part >= 0) {
        const long long at = (long long)(part + row.slot) * GROUP + row.head;
        const bool write = row.index >= 0 && l > 0.f;
        if (t == 0 && row.index >= 0) p.lse2_part[at] = lse2;
        float* to = p.o_part + at * D + (t & 1 ? 8 + 2 * (t - 1) : 2 * t);
#pragma unroll
        for (int n = 0; n < D / 8; n += 2) {   // lanes 0 and 2 store block n, lanes 1 and 3 block n + 1
            const float ax = o[4 * n + 2 * which] * share, ay = o[4 * n + 2 * which + 1] * share;
            const float bx = o[4 * n + 4 + 2 * which] * share, by = o[4 * n + 5 + 2 * which] * share;
            const float gx = __shfl_xor_sync(~0u, t & 1 ? ax : bx, 1), gy = __shfl_xor_sync(~0u, t & 1 ? ay : by, 1);
            if (write) *(float4*)(to + 8 * n) = t & 1 ? make_float4(gx, gy, bx, by) : make_float4(ax, ay, gx, gy);
        }
        return;
    }
    const int head = kv_head * GROUP + row.head;
    if (p.sinks) {
        const float sink2 = p.sinks[min(head, p.num_kv_heads * GROUP - 1)] * 1.44269504f, top = fmaxf(lse2, sink2);
        if (top > MINUS_INF) {
            const float total = top + log2f(exp2f(lse2 - top) + exp2f(sink2 - top));
            share *= exp2f(lse2 - total);
            lse2 = total;
        }
    }
    const long long at = (long long)row.index * p.num_kv_heads * GROUP + head;
    if (p.lse2_out && t == 0 && row.index >= 0) p.lse2_out[at] = lse2;
    char* to = (char*)p.out + at * (D * 2) + 16 * t;
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
        u32 words[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int n = 4 * (4 * i + k) + 2 * which;
            words[k] = pack(o[n] * share, o[n + 1] * share);
        }
        quad_transpose(words, t);
        if (row.index >= 0) *(uint4*)(to + 64 * i) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// Zero the V rows of a tile that are outside its slices: 0 * NaN is NaN.
__device__ __forceinline__ void zero_outside(u32 v, const Box* boxes, int thread) {
    for (int i = thread; i < KEYS * HALVES * 8; i += 128) {
        const int chunk = i & 7, key = (i >> 3) % KEYS, half = (i >> 3) / KEYS;
        const int lo = boxes[key / PAGE].lo(), hi = boxes[key / PAGE].hi(), r = key % PAGE;
        if (r < lo || r >= hi)
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(v + half * HALF_BYTES + key * 128 + chunk * 16), "r"(0)
                         : "memory");
    }
}

// Scores to weights. True (for the whole warp) if a row's m grew: o is then to be scaled by alpha.
__device__ __forceinline__ bool softmax(
    const Params& p, float (&s)[S_REGS], Row& r0, Row& r1, float& alpha0, float& alpha1, float unit) {
#if SOFTCAP
#pragma unroll
    for (int i = 0; i < S_REGS; ++i) s[i] = s[i] == MINUS_INF ? MINUS_INF : tanh_fast(s[i] * p.score_scale);
#endif
    float top[4] = {s[0], s[1], s[2], s[3]};
#pragma unroll
    for (int n = 1; n < S_REGS / 4; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) top[i] = fmaxf(top[i], s[4 * n + i]);
    float top0 = fmaxf(top[0], top[1]), top1 = fmaxf(top[2], top[3]);
#if INVARIANT
    top0 = quad_max(top0);
    top1 = quad_max(top1);
    const bool grows0 = top0 > r0.limit, grows1 = top1 > r1.limit;
    const bool grows = __any_sync(~0u, grows0 || grows1);
    if (grows) {
        const float m0 = grows0 ? fmaxf(r0.m, top0) : r0.m, m1 = grows1 ? fmaxf(r1.m, top1) : r1.m;
#else
    const bool grows = __any_sync(~0u, top0 > r0.limit || top1 > r1.limit);
    if (grows) {
        top0 = quad_max(top0);
        top1 = quad_max(top1);
        const float m0 = r0.reach < 0 ? r0.m : fmaxf(r0.m, top0), m1 = r1.reach < 0 ? r1.m : fmaxf(r1.m, top1);
#endif
        alpha0 = r0.m == m0 ? 1.f : exp2_fast((r0.m - m0) * unit);
        alpha1 = r1.m == m1 ? 1.f : exp2_fast((r1.m - m1) * unit);
        r0.m = m0;
        r1.m = m1;
        r0.l = __fmul_rn(r0.l, alpha0);   // not fused with the sums below in some copies of this code only
        r1.l = __fmul_rn(r1.l, alpha1);
        set_exponents(r0, unit);
        set_exponents(r1, unit);
    }
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int n = 0; n < S_REGS / 4; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            s[4 * n + i] = exp2_fast(fmaf(s[4 * n + i], unit, i < 2 ? r0.base : r1.base));
            sum[i] += s[4 * n + i];
        }
    r0.l += sum[0] + sum[1];
    r1.l += sum[2] + sum[3];
    return grows;
}

__device__ __forceinline__ void rescale(float (&o)[O_REGS], float alpha0, float alpha1) {
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
        o[4 * n] *= alpha0;
        o[4 * n + 1] *= alpha0;
        o[4 * n + 2] *= alpha1;
        o[4 * n + 3] *= alpha1;
    }
}

__device__ __forceinline__ void scores(float (&s)[S_REGS], const u32 (&a)[STEPS_D][4], u32 k) {
    const u32 keys = describe(k, 16);
#pragma unroll
    for (int j = 0; j < STEPS_D; ++j)
        mma<0>(s, a[j], descriptor(keys + (j / 4) * (HALF_BYTES >> 4) + (j % 4) * 2), j != 0);
}

__device__ __forceinline__ void weighted(float (&o)[O_REGS], const u32 (&a)[STEPS_K][4], u32 v) {
    const u32 values = describe(v, HALF_BYTES);
#pragma unroll
    for (int j = 0; j < STEPS_K; ++j) mma<1>(o, a[j], descriptor(values + j * 128), 1);
}

// Of V of a tile that has arrived, nothing stays that is outside the slices.
__device__ __forceinline__ void clean_v(const Shared& sh, const Ring& at, int flags, int thread, int group) {
    if (flags & DIRTY) {
        zero_outside(sh.v(at.stage), sh.v_boxes + at.stage * BOXES, thread);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        group_sync(group);
    }
}

__device__ __forceinline__ void mask_if_cut(
    float (&s)[S_REGS], const Params& p, const Header& h, const Box* boxes, const Row& r0, const Row& r1, const Sight& sight, int t) {
    bool cut = (h.flags & (PARTIAL | OWNED)) || h.pos_max > sight.low;
#if WINDOW
    cut |= h.pos_min <= sight.high - p.window;
#endif
    if (cut) mask(s, p, boxes, r0, r1, t);
}

// Whether a KV tile has nothing for the slots of a warp's rows, the 16 of a slab.
__device__ __forceinline__ bool is_of_others(const Header& h, int slab) {
    return h.last_slot < slab * 16 / GROUP || h.first_slot > (slab * 16 + 15) / GROUP;
}

__device__ __forceinline__ void pack_weights(u32 (&weights)[STEPS_K][4], const float (&s)[S_REGS]) {
#pragma unroll
    for (int j = 0; j < STEPS_K; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int n = 2 * j + (i >> 1);
            weights[j][i] = pack(s[4 * n + 2 * (i & 1)], s[4 * n + 2 * (i & 1) + 1]);
        }
}

__device__ __forceinline__ void clear(u32 (&weights)[STEPS_K][4]) {
#pragma unroll
    for (int j = 0; j < STEPS_K; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[j][i] = 0;
}

// Have what the next work begins with near.
__device__ __forceinline__ void prefetch_work(const Params& p, const Work& work, int slab, int g, int t, int step) {
#pragma unroll
    for (int which = 0; which < 2; ++which) {
        const Row row = make_row(p, work.tile, slab, g, which, step);
        if (row.index >= 0 && t * 128 < D * 2) prefetch(query_of(p, row, work.head) + t * 128);
        if (!which || !PAIRED) prefetch_turn(p, reach_of(p, row, make_int2(work.delta, work.vec)), t);
    }
}

// Go on with another run: turn q. What of it a warp sees is for all its lanes.
__device__ __forceinline__ void enter(
    const Params& p, u32 (&a)[STEPS_D][4], const Unrotated& unrotated, Row& r0, Row& r1, Sight& sight, float unit, int t) {
    turn_rows(p, a, unrotated, r0, r1, t);
    set_exponents(r0, unit);
    set_exponents(r1, unit);
    sight.low = (int)__reduce_min_sync(~0u, min((u32)r0.reach, (u32)r1.reach));   // -1 is the largest of them
#if WINDOW
    sight.high = __reduce_max_sync(~0u, max(r0.reach, r1.reach));
#endif
}

__device__ __forceinline__ void consume(
    const Params& p, const Shared& sh, int worker, int first_slab, int warp, int thread) {
    const int lane = thread & 31, t = lane & 3, g = lane >> 2, slab = first_slab + (warp & 3), group = warp >> 2;
    if (!p.settled) await_previous();
    const int step = *p.step;
    const Unrotated unrotated{sh.base + SMEM_Q + first_slab * 16 * D * 2 + thread * 16};
#if SOFTCAP
    const float unit = p.cap_log2;
#else
    const float unit = p.score_scale;
#endif
    Ring ring;
    const int first_work = p.work_indptr[worker], end_work = p.work_indptr[worker + 1];
    for (int w = first_work; w < end_work; ++w) {
        const Work work = p.works[w];
        Row r0 = make_row(p, work.tile, slab, g, 0, step), r1 = r0;
        if (PAIRED) ++r1.head; else r1 = make_row(p, work.tile, slab, g, 1, step);
        int ahead0 = reach_of(p, r0, make_int2(work.delta, work.vec));
        int ahead1 = PAIRED ? ahead0 : reach_of(p, r1, make_int2(work.delta, work.vec));
        if (p.settled && w == first_work) {
            prefetch_turn(p, ahead0, t);
            if (!PAIRED) prefetch_turn(p, ahead1, t);
            await_previous();
        }
        unrotated.load(p, r0, 0, work.head, t);
        unrotated.load(p, r1, 1, work.head, t);
        u32 a[STEPS_D][4];
        u32 weights[STEPS_K][4];
        float o[O_REGS], s[S_REGS];
        float alpha0 = 1.f, alpha1 = 1.f;
#pragma unroll
        for (int j = 0; j < STEPS_D; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) a[j][i] = 0;
#pragma unroll
        for (int i = 0; i < O_REGS; ++i) o[i] = 0.f;
        Sight sight;
        r0.reach = ahead0;
        r1.reach = ahead1;
        enter(p, a, unrotated, r0, r1, sight, unit, t);

        barrier_wait(sh.k_full(ring.stage), ring.parity);
        Header header = sh.headers[ring.stage];
        if (header.run != work.run) {   // tiles reserved for growth came first
            const int2 found = p.runs[header.run];
            r0.reach = reach_of(p, r0, found);
            r1.reach = PAIRED ? r0.reach : reach_of(p, r1, found);
            enter(p, a, unrotated, r0, r1, sight, unit, t);
        }
        mma_fence();
        scores(s, a, sh.k(ring.stage));
        mma_commit();
        mma_wait<0>();
        hold(s);
        const bool idle = sight.idle() || ((header.flags & OWNED) && is_of_others(sh.headers[ring.stage], slab));
        if (!idle) mask_if_cut(s, p, header, sh.k_boxes + ring.stage * BOXES, r0, r1, sight, t);
        __syncwarp();
        if (lane == 0) barrier_arrive(sh.k_empty(ring.stage));
        if (idle) {
            clear(weights);
        } else {
            softmax(p, s, r0, r1, alpha0, alpha1, unit);
            pack_weights(weights, s);
        }
        Ring behind = ring;
        ring.next();
        bool known = false;   // where the next run is seen has been looked up

        while (!(header.flags & LAST)) {
            const int before = header.flags;
            barriers_wait(sh.v_full(behind.stage), behind.parity, sh.k_full(ring.stage), ring.parity);
            header = sh.headers[ring.stage];
            clean_v(sh, behind, before, thread, group);
            hold(o);
            if (!(before & CHANGES)) {
                mma_fence();
                scores(s, a, sh.k(ring.stage));
                mma_commit();
                weighted(o, weights, sh.v(behind.stage));
                mma_commit();
                if (header.flags & (LAST | CHANGES)) {   // have what comes next near while the products run
                    if (header.flags & CHANGES) {
                        const int2 found = p.runs[header.next_run];
                        ahead0 = reach_of(p, r0, found);
                        ahead1 = PAIRED ? ahead0 : reach_of(p, r1, found);
                        prefetch_turn(p, ahead0, t);
                        if (!PAIRED) prefetch_turn(p, ahead1, t);
                        known = true;
                    } else if (w + 1 < end_work) {
                        prefetch_work(p, p.works[w + 1], slab, g, t, step);
                    }
                }
                mma_wait<1>();
            } else {   // q turns while the products of the tile before run
                mma_fence();
                weighted(o, weights, sh.v(behind.stage));
                mma_commit();
                if (!known) {
                    const int2 found = p.runs[header.run];
                    ahead0 = reach_of(p, r0, found);
                    ahead1 = PAIRED ? ahead0 : reach_of(p, r1, found);
                }
                known = false;
                r0.reach = ahead0;
                r1.reach = ahead1;
                enter(p, a, unrotated, r0, r1, sight, unit, t);
                mma_fence();
                scores(s, a, sh.k(ring.stage));
                mma_commit();
                mma_wait<0>();
            }
            hold(s);
            const bool idle = sight.idle() || ((header.flags & OWNED) && is_of_others(sh.headers[ring.stage], slab));
            if (!idle) mask_if_cut(s, p, header, sh.k_boxes + ring.stage * BOXES, r0, r1, sight, t);
            __syncwarp();
            if (lane == 0) barrier_arrive(sh.k_empty(ring.stage));
            bool grows = false;
            if (!idle) grows = softmax(p, s, r0, r1, alpha0, alpha1, unit);
            mma_wait<0>();
            hold(o);
            if (lane == 0) barrier_arrive(sh.v_empty(behind.stage));
            if (idle) clear(weights); else pack_weights(weights, s);
            if (grows) rescale(o, alpha0, alpha1);
            behind = ring;
            ring.next();
        }
        barrier_wait(sh.v_full(behind.stage), behind.parity);
        clean_v(sh, behind, header.flags, thread, group);
        hold(o);
        mma_fence();
        weighted(o, weights, sh.v(behind.stage));
        mma_commit();
        mma_wait<0>();
        hold(o);
        __syncwarp();
        if (lane == 0) barrier_arrive(sh.v_empty(behind.stage));
        finish(p, r0, o, 0, work.head, work.part, unit, t);
        finish(p, r1, o, 1, work.head, work.part, unit, t);
    }
}

// A CTA is two streams of one consumer warpgroup each (ROWS 64) or one stream of two (ROWS 128). Its third warpgroup
// gives its registers away and produces: warp i for stream i.
extern "C" __global__ void __launch_bounds__(384, 1) attend(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) char memory[];
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), group = warp >> 2;   // known to be the same in a warp
    if (threadIdx.x == 0) {
        for (int i = 0; i < STREAMS; ++i) {
            const Shared sh = stream(memory, i);
            for (int s = 0; s < STAGES; ++s) {
                barrier_init(sh.k_full(s), 1);
                barrier_init(sh.v_full(s), 1);
                barrier_init(sh.k_empty(s), 4 * CONSUMERS);
                barrier_init(sh.v_empty(s), 4 * CONSUMERS);
            }
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&p.kv) : "memory");
    }
    __syncthreads();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp - 8 < STREAMS)
            produce(p, stream(memory, warp - 8), blockIdx.x * STREAMS + warp - 8, threadIdx.x & 31);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int mine = CONSUMERS == 1 ? group : 0;   // the stream of this warpgroup
        consume(p, stream(memory, mine), blockIdx.x * STREAMS + mine, CONSUMERS == 1 ? 0 : 4 * group, warp, threadIdx.x & 127);
    }
}
