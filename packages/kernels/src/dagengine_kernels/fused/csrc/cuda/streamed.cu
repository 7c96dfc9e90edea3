// A linear layer on 1 to 64 rows, its weight streamed through tensor maps on sm_90a: y = act(x W^T + b) + residual.
//
// The weight is the products' first operand: D[weight rows, rows of x] = W x^T. A block takes TILE weight rows (gated: half of
// them the gate's, then up's of the same outputs), and a cluster of SPLIT blocks shares the inputs of a tile in stretches.
//
//   block        tile | rank        grid: tile 0 rank 0 .. SPLIT - 1 | tile 1 ..
//   stretch      units first .. end - 1 of HALVES * 64 inputs, through a ring of STAGES in shared memory
//   stage        weight half 0 [TILE, 64] | weight half 1 | x half 0 [COLUMNS, 64] | x half 1      128-byte swizzle
//   sums         [COLUMNS][TILE + 4] float32 over the ring, when all of it is consumed
//
// A producer thread fills the ring with the weight before it waits for the kernel before this one (weights depend on
// nothing), and only then brings x. The blocks of a cluster add up their sums in the order of their ranks, each for its
// share of y, through one another's shared memory: nothing is left in global memory, and the bits do not depend on time.
//
// Configured by DTYPE, OUT_TYPE (0 float, 1 half, 2 bfloat16), GATED, COLUMNS (8, 16, 32 or 64: at least the rows of x), TILE
// (a multiple of 64), HALVES (1 or 2), SPLIT (1, 2, 4 or 8), STAGES and RESIDENT (blocks that an SM must hold).
#define HALF_FLOAT (DTYPE == 1)
#include "products.cuh"
#include "hopper.cuh"

constexpr int GROUPS = TILE > 64 ? 2 : 1;              // consumer warpgroups
constexpr int MT = TILE / 64 / GROUPS;                 // products of 64 weight rows per warpgroup
constexpr int CONSUMERS = GROUPS * 128;
constexpr int UNIT = HALVES * STEP;                    // inputs
constexpr int WEIGHT_BYTES = TILE * STEP_BYTES;        // of a half
constexpr int X_BYTES = COLUMNS * STEP_BYTES;
constexpr int STAGE_BYTES = HALVES * (WEIGHT_BYTES + X_BYTES);
constexpr int RING_BYTES = STAGES * STAGE_BYTES;
constexpr int BOXES = GATED ? 2 : 1;                   // of a half of the weight: gate and up
constexpr int OUTPUTS = TILE / BOXES;
constexpr int SUMS_ROW = TILE + 4;                     // floats, so that stores meet no bank twice
constexpr int VECTORS = OUTPUTS / 4;                   // of 4 outputs in a row of y
constexpr int AT_ONCE = CONSUMERS / VECTORS;           // rows of y
constexpr int TURNS = (COLUMNS + AT_ONCE * SPLIT - 1) / (AT_ONCE * SPLIT);
static_assert(TILE == 64 * GROUPS * MT && TILE / BOXES <= 256);
static_assert(CONSUMERS % VECTORS == 0);
static_assert(COLUMNS * SUMS_ROW * 4 <= RING_BYTES);

struct Launch {
    TensorMap weight;   // [weight rows, steps * 64], box [TILE / BOXES, 64], 128-byte swizzle
    TensorMap x;        // [rows, inputs rounded up to a multiple of 8], box [COLUMNS, 64], 128-byte swizzle
    Params layer;
    int whole;          // whether 4 outputs of y and of the residual are one aligned vector
};

struct Ring {
    u32 base;
    int stage = 0;
    u32 parity = 0;

    __device__ u32 weight(int half) const { return base + stage * STAGE_BYTES + half * WEIGHT_BYTES; }
    __device__ u32 x(int half) const { return base + stage * STAGE_BYTES + HALVES * WEIGHT_BYTES + half * X_BYTES; }
    __device__ u32 full() const { return base + RING_BYTES + stage * 8; }
    __device__ u32 empty() const { return base + RING_BYTES + (STAGES + stage) * 8; }
    __device__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

__device__ __forceinline__ void bring_weight(const Launch& p, const Ring& ring, int unit, int output, u64 policy) {
    barrier_expect(ring.full(), STAGE_BYTES);
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
#pragma unroll
        for (int box = 0; box < BOXES; ++box)
            load_box(ring.weight(half) + box * OUTPUTS * STEP_BYTES, &p.weight, ring.full(), unit * UNIT + half * STEP,
                     output + box * p.layer.outputs, policy);
}

__device__ __forceinline__ void bring_x(const Launch& p, const Ring& ring, int unit, u64 policy) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
        load_box(ring.x(half), &p.x, ring.full(), unit * UNIT + half * STEP, 0, policy);
}

// By one thread: units `first` to `end` of the weight rows from `output` on.
__device__ __forceinline__ void produce(const Launch& p, Ring ring, int first, int end, int output) {
    const u64 once = first_to_leave_l2(), shared_by_all = last_to_leave_l2();
    const int ahead = min(end, first + STAGES);
    Ring filled = ring;
    for (int unit = first; unit < ahead; ++unit, filled.advance()) bring_weight(p, filled, unit, output, once);
    wait_for_previous_kernel();
    for (int unit = first; unit < ahead; ++unit, ring.advance()) bring_x(p, ring, unit, shared_by_all);
    for (int unit = ahead; unit < end; ++unit, ring.advance()) {
        barrier_wait(ring.empty(), ring.parity ^ 1);
        bring_weight(p, ring, unit, output, once);
        bring_x(p, ring, unit, shared_by_all);
    }
}

__device__ __forceinline__ void consumers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// The sums of a block's stretch, in shared memory.
__device__ __forceinline__ void consume(Ring ring, float* sums, int count, int group, int thread) {
    const int lane = thread % 32;
    float d[MT][COLUMNS / 2];
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) d[m][i] = 0.0f;
#pragma unroll
    for (int m = 0; m < MT; ++m) hold(d[m]);
    for (int unit = 0; unit < count; ++unit, ring.advance()) {
        barrier_wait(ring.full(), ring.parity);
        mma_fence();
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            const u32 a = describe(ring.weight(half) + group * MT * 64 * STEP_BYTES, 16), b = describe(ring.x(half), 16);
#pragma unroll
            for (int k = 0; k < STEP / 16; ++k)
#pragma unroll
                for (int m = 0; m < MT; ++m)
                    mma(d[m], descriptor(a + m * (64 * STEP_BYTES >> 4) + 2 * k), descriptor(b + 2 * k));
        }
        mma_commit();
        mma_wait<0>();   // products take less time than copies: a stage filled again early counts for more than their overlap
        if (lane == 0) barrier_arrive(ring.empty());
    }
#pragma unroll
    for (int m = 0; m < MT; ++m) hold(d[m]);
    consumers_meet();   // no product reads the ring any more
    float* to = sums + (group * MT * 64 + thread % 128 / 32 * 16 + lane / 4) + lane % 4 * 2 * SUMS_ROW;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) to[m * 64 + (j * 8 + i % 2) * SUMS_ROW + i / 2 * 8] = d[m][4 * j + i];
}

// What is added to 4 outputs of a row.
__device__ __forceinline__ float4 residual_of(const Launch& p, int row, int output) {
    float before[4] = {};
    const i64 at = row * p.layer.residual_row + output;
    if (p.whole) {
        load_fresh<OUT_TYPE, 4>(p.layer.residual, at).unpack(before);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (output + i < p.layer.outputs) {
                float one[1];
                load_fresh<OUT_TYPE, 1>(p.layer.residual, at + i).unpack(one);
                before[i] = one[0];
            }
    }
    return make_float4(before[0], before[1], before[2], before[3]);
}

// A block's share of y: rows rank, rank + SPLIT, .. of every SPLIT * AT_ONCE. `meet` returns when all sums can be read.
template <typename Meet>
__device__ __forceinline__ void finish_share(const Launch& p, const float* sums, int rank, int first_output, int thread, Meet meet) {
    const int column = thread % VECTORS * 4, output = first_output + column;
    const bool mine = output < p.layer.outputs;
    auto row_of = [&](int turn) { return (turn * SPLIT + rank) * AT_ONCE + thread / VECTORS; };
    float bias[BOXES][4] = {};
    float4 residual[TURNS];
    if (mine && p.layer.bias)
#pragma unroll
        for (int box = 0; box < BOXES; ++box)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                bias[box][i] = p.layer.bias[box * p.layer.outputs + min(output + i, p.layer.outputs - 1)];
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        residual[turn] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (mine && p.layer.residual && row_of(turn) < p.layer.rows) residual[turn] = residual_of(p, row_of(turn), output);
    }
    meet();
    if (!mine) return;
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const int row = row_of(turn);
        if (row >= p.layer.rows) break;
        float sum[BOXES][4] = {};
#pragma unroll
        for (int source = 0; source < SPLIT; ++source)
#pragma unroll
            for (int box = 0; box < BOXES; ++box) {
                const float* at = sums + row * SUMS_ROW + box * OUTPUTS + column;
                const float4 part = SPLIT > 1 ? load_from_cluster(address_in(smem_address(at), source))
                                              : *reinterpret_cast<const float4*>(at);
                const float parts[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
                for (int i = 0; i < 4; ++i) sum[box][i] = source ? __fadd_rn(sum[box][i], parts[i]) : parts[i];
            }
        const float before[4] = {residual[turn].x, residual[turn].y, residual[turn].z, residual[turn].w};
        float result[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (p.layer.bias)
#pragma unroll
                for (int box = 0; box < BOXES; ++box) sum[box][i] = __fadd_rn(sum[box][i], bias[box][i]);
            result[i] = BOXES == 2 ? silu_times(sum[0][i], sum[BOXES - 1][i]) : sum[0][i];
            if (p.layer.residual) result[i] = __fadd_rn(result[i], before[i]);
        }
        const i64 at = static_cast<i64>(row) * p.layer.outputs + output;
        if (p.whole) {
            Vector<OUT_TYPE, 4>::pack(result).store(p.layer.y, at);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (output + i < p.layer.outputs) {
                    const float one[1] = {result[i]};
                    Vector<OUT_TYPE, 1>::pack(one).store(p.layer.y, at + i);
                }
        }
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, RESIDENT) streamed(const __grid_constant__ Launch p) {
    // With 64 columns the copies of x take as much of L2 as those of the weight: the next kernel's would come between.
    if constexpr (COLUMNS < 64) let_next_kernel_start();
    extern __shared__ __align__(1024) char shared[];
    const int thread = threadIdx.x, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);   // known to be the same in a warp
    const int tile = blockIdx.x / SPLIT, rank = blockIdx.x % SPLIT;
    const int units = (p.layer.steps + HALVES - 1) / HALVES;
    const int first = units * rank / SPLIT, end = units * (rank + 1) / SPLIT;
    Ring ring{smem_address(shared)};
    if (thread == CONSUMERS) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&p.weight) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&p.x) : "memory");
        Ring each = ring;
        for (int s = 0; s < STAGES; ++s, each.advance()) {
            barrier_init(each.full(), 1);
            barrier_init(each.empty(), CONSUMERS / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (warp == CONSUMERS / 32) {
        if (thread == CONSUMERS) produce(p, ring, first, end, tile * OUTPUTS);
        if constexpr (SPLIT > 1) {
            __syncwarp();
            cluster_arrive();
            cluster_wait();
            cluster_arrive_having_read();
            cluster_wait();
        }
        return;
    }
    wait_for_previous_kernel();
    float* sums = reinterpret_cast<float*>(shared);
    consume(ring, sums, end - first, warp / 4, thread);
    finish_share(p, sums, rank, tile * OUTPUTS, thread, [] {
        if constexpr (SPLIT > 1) {
            cluster_arrive();
            cluster_wait();
        } else {
            consumers_meet();
        }
    });
    if constexpr (SPLIT > 1) {   // a block's shared memory is there until all have read it
        cluster_arrive_having_read();
        cluster_wait();
    }
}
