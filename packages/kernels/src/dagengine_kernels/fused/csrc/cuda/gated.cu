// A gated layer on many rows on sm_90a: y = silu(gate) * up of x W^T, whose sums never leave the registers (Shazeer, 2020).
//
// A block takes 128 rows of x and 128 outputs: as many rows of the gate and of up. A cluster of CLUSTER blocks takes rows that
// follow one another and the same outputs, and each of two brings one half of the weight to both. Clusters are as many as the
// device has room for, and cluster c takes tiles c, c + clusters, ..:
//
//   tiles        GROUP cluster rows of x by all columns of outputs, column by column | the next GROUP rows ..
//   stage        x [128, 64] | gate [128, 64] | up [128, 64]                           128-byte swizzle, a ring of STAGES
//   sums         warpgroup g: rows 64 g .. of x by 256: the gate's 128, then up's       a thread has both of an output
//   result       of each warpgroup [2 halves of 64 outputs][64 rows]                    128-byte swizzle, stored by tensor map
//
// Nothing that a row is summed from, nor its order, depends on other rows or on where it lies.
//
// Configured by DTYPE (1 half, 2 bfloat16), CLUSTER (1 or 2), STAGES and GROUP.
#define HALF_FLOAT (DTYPE == 1)
#include "vectors.cuh"
#include "hopper.cuh"

constexpr int STEP = 64;                            // inputs
constexpr int ROWS = 128, OUTPUTS = 128;            // of a block's tile
constexpr int BOX_BYTES = 128 * STEP * 2;           // of x, of the gate or of up
constexpr int STAGE_BYTES = 3 * BOX_BYTES;
constexpr int RING_BYTES = STAGES * STAGE_BYTES;
constexpr int HALF_BYTES = 64 * 64 * 2;             // of a warpgroup's result
constexpr int RESULT_BYTES = 2 * HALF_BYTES;
constexpr int BARRIERS = RING_BYTES + 2 * RESULT_BYTES;
constexpr int CONSUMERS = 2;                        // warpgroups
constexpr u16 ALL_BLOCKS = (1 << CLUSTER) - 1;
static_assert(CLUSTER == 1 || CLUSTER == 2);

struct Launch {
    TensorMap x;         // [rows, inputs rounded up to a multiple of 8], box [128, 64], 128-byte swizzle
    TensorMap weight;    // [2 * outputs, steps * 64], box [128, 64], 128-byte swizzle
    TensorMap y;         // [rows, outputs], box [64, 64], 128-byte swizzle
    int outputs, steps;  // at least STAGES steps
    int row_tiles;       // of a cluster
    int column_tiles;
};

struct Ring {
    u32 base;
    int stage = 0;
    u32 parity = 0;

    __device__ u32 x() const { return base + stage * STAGE_BYTES; }
    __device__ u32 weight() const { return x() + BOX_BYTES; }
    __device__ u32 full() const { return base + BARRIERS + stage * 8; }
    __device__ u32 empty() const { return base + BARRIERS + (STAGES + stage) * 8; }
    __device__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Where a cluster's tile begins.
struct Tile { int row, output; };

__device__ __forceinline__ Tile tile_at(const Launch& p, int index) {
    const int per_group = GROUP * p.column_tiles, first = index / per_group * GROUP, inside = index % per_group;
    const int rows = min(GROUP, p.row_tiles - first);
    return Tile{(first + inside % rows) * (CLUSTER * ROWS), inside / rows * OUTPUTS};
}

// By one thread of each block.
__device__ __forceinline__ void produce(const Launch& p, Ring ring, int rank) {
    const int tiles = p.row_tiles * p.column_tiles;
    for (int index = blockIdx.x / CLUSTER; index < tiles; index += gridDim.x / CLUSTER) {
        const Tile tile = tile_at(p, index);
        for (int step = 0; step < p.steps; ++step, ring.advance()) {
            barrier_wait(ring.empty(), ring.parity ^ 1);
            barrier_expect(ring.full(), STAGE_BYTES);
            load_box(ring.x(), &p.x, ring.full(), step * STEP, tile.row + rank * ROWS);
            if constexpr (CLUSTER == 2) {
                load_box_to_blocks(ring.weight() + rank * BOX_BYTES, &p.weight, ring.full(), step * STEP,
                                   tile.output + rank * p.outputs, ALL_BLOCKS);
            } else {
                load_box(ring.weight(), &p.weight, ring.full(), step * STEP, tile.output);
                load_box(ring.weight() + BOX_BYTES, &p.weight, ring.full(), step * STEP, tile.output + p.outputs);
            }
        }
    }
}

// A warp has read a stage, which every block of the cluster may then fill.
__device__ __forceinline__ void release(u32 empty, int lane) {
    if constexpr (CLUSTER == 1) {
        if (lane == 0) barrier_arrive(empty);
    } else {
        if (lane < CLUSTER) barrier_arrive_in_cluster(address_in(empty, lane));
    }
}

__device__ __forceinline__ float silu_times_fast(float gate, float up) {
    float share;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(share) : "f"(1.0f + exp2_fast(-1.442695041f * gate)));
    return gate * share * up;
}

__device__ __forceinline__ void group_meets(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

// A warpgroup's sums to y, through `result` in shared memory.
__device__ __forceinline__ void finish(const Launch& p, const float (&d)[128], u32 result, int row, int output, int group, int thread) {
    const int lane = thread % 32, warp = thread / 32;
    if (thread == 0) await_stores_having_read();
    __syncwarp();
    group_meets(group);   // what the tile before left there has been stored
    const u32 to = result + (warp * 16 + lane % 16) * 128 + ((lane / 16 ^ lane % 8) << 4);
#pragma unroll
    for (int n = 0; n < 16; n += 2) {   // 8 outputs each
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {   // outputs 8 (n + i / 2) .., rows 8 (i % 2) ..
            const int at = 4 * n + 2 * i;
            words[i] = pack(silu_times_fast(d[at], d[64 + at]), silu_times_fast(d[at + 1], d[64 + at + 1]));
        }
        store_matrices((to ^ n % 8 << 4) + n / 8 * HALF_BYTES, words);
    }
    show_to_copies();
    group_meets(group);
    if (thread == 0) {
        store_box(&p.y, result, output, row);
        if (output + 64 < p.outputs) store_box(&p.y, result + HALF_BYTES, output + 64, row);
        close_stores();
    }
}

__device__ __forceinline__ void consume(const Launch& p, Ring ring, int rank, int group, int thread) {
    const int lane = thread % 32, tiles = p.row_tiles * p.column_tiles;
    const u32 result = ring.base + RING_BYTES + group * RESULT_BYTES;
    float d[128];
    for (int index = blockIdx.x / CLUSTER; index < tiles; index += gridDim.x / CLUSTER) {
        const Tile tile = tile_at(p, index);
        u32 before = 0;   // of the products under way, the stage's barrier
        for (int step = 0; step < p.steps; ++step, ring.advance()) {
            barrier_wait(ring.full(), ring.parity);
            hold(d);
            mma_fence();
            const u32 a = describe(ring.x() + group * 64 * STEP * 2, 16), b = describe(ring.weight(), 16);
#pragma unroll
            for (int k = 0; k < STEP / 16; ++k) mma(d, descriptor(a + 2 * k), descriptor(b + 2 * k), step || k);
            mma_commit();
            mma_wait<1>();
            hold(d);
            if (step) release(before, lane);
            before = ring.empty();
        }
        mma_wait<0>();
        release(before, lane);
        hold(d);
        finish(p, d, result, tile.row + rank * ROWS + group * 64, tile.output, group, thread);
    }
    if (thread == 0) await_stores();
}

// The third warpgroup gives its registers away and produces.
extern "C" __global__ void __launch_bounds__(CONSUMERS * 128 + 128, 1) gated(const __grid_constant__ Launch p) {
    let_next_kernel_start();
    extern __shared__ __align__(1024) char shared[];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp / 4, rank = blockIdx.x % CLUSTER;
    const Ring ring{smem_address(shared)};
    if (threadIdx.x == 0) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&p.x) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&p.weight) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&p.y) : "memory");
        Ring each = ring;
        for (int s = 0; s < STAGES; ++s, each.advance()) {
            barrier_init(each.full(), 1);
            barrier_init(each.empty(), CLUSTER * CONSUMERS * 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if constexpr (CLUSTER > 1) {
        cluster_arrive();
        cluster_wait();
    } else {
        __syncthreads();
    }
    wait_for_previous_kernel();
    if (group == CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == CONSUMERS * 128) produce(p, ring, rank);
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        consume(p, ring, rank, group, threadIdx.x % 128);
    }
    if constexpr (CLUSTER > 1) {   // a block's shared memory is there until the other neither fills nor frees it
        cluster_arrive();
        cluster_wait();
    }
}
