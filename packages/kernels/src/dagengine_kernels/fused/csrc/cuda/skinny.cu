// A linear layer on few rows, at the speed at which its weight is read: y = act(norm(x) W^T + b) + residual.
//
// A cluster of CLUSTER blocks takes tiles of 16 * MT * CLUSTER weight rows, one after another. Each block holds, normed,
// its 1 / CLUSTER of the inputs of all rows of x in shared memory, and its 8 warps are a grid of segments of the inputs
// (products.cuh) times weight rows:
//
//   CLUSTER 1   8 segments x 1 x 16 MT rows         CLUSTER 4   2 segments x 4 x 16 MT rows
//   CLUSTER 2   4 segments x 2 x 16 MT rows         CLUSTER 8   1 segment  x 8 x 16 MT rows
//
// A lane copies the 16-byte vectors that it will multiply into slots of its own, DEPTH steps ahead and across tiles, and
// begins before it waits for the kernel before this one: weights depend on nothing. So warps meet only where x is stored
// and where a tile's sums are added: in order of the segments, whatever CLUSTER is.
//
// Configured by DTYPE, OUT_TYPE (0 float, 1 half, 2 bfloat16), CLUSTER, MT, NT (rows of x / 8, rounded up), DEPTH, GATED
// (MT is 2: gate and up), NORM (NT is 1).
#include "products.cuh"

constexpr int WARPS = 8;
constexpr int WARPS_K = WARPS / CLUSTER;       // warps along the inputs
constexpr int TILE = 16 * MT * CLUSTER;        // weight rows of a tile
constexpr int OUTPUTS = GATED ? 16 : 16 * MT;  // of a tile, per block: what it finishes
constexpr int SUMS_ROW = TILE + 4;             // floats of a row of partial sums, so that stores meet no bank twice
constexpr int SUMS_BUFFERS = NT <= 2 ? 2 : 1;
constexpr int SLOT = MT * 4 * 32;              // vectors of a step of a warp
static_assert(!GATED || MT == 2);
static_assert(!NORM || NT == 1);
static_assert(WARPS == SEGMENTS && WARPS == NORM_WARPS);

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// All threads of the cluster, and what they wrote to shared memory.
__device__ __forceinline__ void meet() {
    if constexpr (CLUSTER == 1) {
        __syncthreads();
    } else {
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
}

__device__ __forceinline__ float read_sum(u32 address, u32 rank) {
    float value;
    if constexpr (CLUSTER == 1) {
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    } else {
        asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %1, %2;\nld.shared::cluster.f32 %0, [there];\n}"
                     : "=f"(value) : "r"(address), "r"(rank) : "memory");
    }
    return value;
}

// Where a warp's next step of the weight lies.
struct Stream {
    const char* rows[MT][2];   // of this lane: weight rows g and g + 8, at its segment's next step
    int tile, left;

    __device__ void seek(const Params& p, int to, int part, int first_step, int count, int lane) {
        tile = to;
        left = count;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int group = to * CLUSTER + part, within = lane / 4 + 8 * h;
                const int output = GATED ? group * 16 + within : (group * MT + m) * 16 + within;
                rows[m][h] = weight_row(p, output, GATED && m == 1) + first_step * STEP_BYTES + lane % 4 * 16;
            }
    }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, NT <= 4 ? 2 : 1) skinny(const __grid_constant__ Params p) {
    let_next_kernel_start();
    extern __shared__ __align__(128) char shared[];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int rank = CLUSTER == 1 ? 0 : cluster_rank();
    const int part = warp / WARPS_K, along = warp % WARPS_K;   // of the tile's rows; of the block's segments
    const int cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
    const int slice_first = segment_start(rank * WARPS_K, p.steps), slice_last = segment_start((rank + 1) * WARPS_K, p.steps);
    const int first = segment_start(rank * WARPS_K + along, p.steps);
    const int count = segment_start(rank * WARPS_K + along + 1, p.steps) - first;

    uint4* ring = reinterpret_cast<uint4*>(shared) + warp * DEPTH * SLOT + lane;
    float* sums = reinterpret_cast<float*>(shared + WARPS * DEPTH * SLOT * 16);
    char* x = reinterpret_cast<char*>(sums + (SUMS_BUFFERS * WARPS_K * p.rows * SUMS_ROW + 3) / 4 * 4);
    const int x_bytes = (slice_last - slice_first) * STEP_BYTES + 64;   // 64 more: 8 lanes' vectors in 32 banks

    Stream stream;
    stream.seek(p, cluster, part, first, count, lane);
    auto fill = [&](int slot) {
        if (stream.tile < p.tiles && count > 0) {
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
#pragma unroll
                    for (int c = 0; c < 2; ++c)
                        copy_async(shared_address(ring + slot * SLOT + (m * 4 + h * 2 + c) * 32), stream.rows[m][h] + c * 64);
                    stream.rows[m][h] += STEP_BYTES;
                }
            if (--stream.left == 0) stream.seek(p, stream.tile + clusters, part, first, count, lane);
        }
        close_copies();
    };
#pragma unroll
    for (int slot = 0; slot < DEPTH; ++slot) fill(slot);
    if constexpr (NORM) {
        for (int i = thread * 32; i < p.inputs; i += WARPS * 32 * 32)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(p.norm + i));
    }
    wait_for_previous_kernel();

    const int vectors = (p.inputs + 7) / 8, slice_begin = slice_first * (STEP / 8), slice_end = slice_last * (STEP / 8);
    if constexpr (NORM) {
        __shared__ float squares[8][NORM_WARPS];
        float mine[8] = {};
        for (int v = thread; v < p.steps * (STEP / 8); v += NORM_THREADS) {
            Inputs read[8];
#pragma unroll
            for (int r = 0; r < 8; ++r) {
                read[r].raw = make_uint4(0, 0, 0, 0);
                if (r < p.rows && v < vectors) read[r] = load_fresh<DTYPE, 8>(p.x, r * p.x_row + v * 8);
            }
#pragma unroll
            for (int r = 0; r < 8; ++r) {
                if (r >= p.rows) break;
                mine[r] = add_squares(mine[r], read[r]);
                if (v >= slice_begin && v < slice_end)
                    *reinterpret_cast<uint4*>(x + r * x_bytes + (v - slice_begin) * 16) = read[r].raw;
            }
        }
#pragma unroll
        for (int r = 0; r < 8; ++r) {
            if (r >= p.rows) break;
            const float sum = add_lanes(mine[r]);
            if (lane == 0) squares[r][warp] = sum;
        }
        __syncthreads();
        // A thread scales what it stored itself.
        for (int r = 0; r < p.rows; ++r) {
            const float scale = norm_scale(squares[r], NORM_WARPS, p.inputs, p.eps);
            for (int v = thread; v < min(vectors, slice_end); v += NORM_THREADS) {
                if (v < slice_begin) continue;
                uint4* place = reinterpret_cast<uint4*>(x + r * x_bytes + (v - slice_begin) * 16);
                Inputs held;
                held.raw = *place;
                *place = normed(held, scale, p.norm + v * 8).raw;
            }
        }
    } else {
        const int width = slice_end - slice_begin, all = p.rows * width;
        constexpr int AT_ONCE = 4;
        for (int base = thread; base < all; base += WARPS * 32 * AT_ONCE) {
            uint4 read[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int at = base + i * WARPS * 32, r = at / width, v = at - r * width + slice_begin;
                read[i] = make_uint4(0, 0, 0, 0);
                if (at < all && v < vectors) read[i] = load_fresh<DTYPE, 8>(p.x, r * p.x_row + v * 8).raw;
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int at = base + i * WARPS * 32, r = at / width, v = at - r * width;
                if (at < all) *reinterpret_cast<uint4*>(x + r * x_bytes + v * 16) = read[i];
            }
        }
    }
    __syncthreads();

    const char* operands[NT];   // of this lane: row g of each 8 rows of x; rows past the last repeat it and are not stored
#pragma unroll
    for (int n = 0; n < NT; ++n)
        operands[n] = x + min(n * 8 + lane / 4, p.rows - 1) * x_bytes + (first - slice_first) * STEP_BYTES + lane % 4 * 16;

    int slot = 0, buffer = 0;
    for (int tile = cluster; tile < p.tiles; tile += clusters) {
        float d[MT][NT][4] = {};
        for (int step = 0; step < count; ++step) {
            await_copies<DEPTH - 1>();
            const uint4* held = ring + slot * SLOT;
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                uint4 low[MT], high[MT];
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    low[m] = held[(m * 4 + c) * 32];
                    high[m] = held[(m * 4 + 2 + c) * 32];
                }
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const uint4 b = *reinterpret_cast<const uint4*>(operands[n] + step * STEP_BYTES + c * 64);
#pragma unroll
                    for (int m = 0; m < MT; ++m) half_step(d[m][n], low[m], high[m], b);
                }
            }
            fill(slot);
            slot = slot + 1 == DEPTH ? 0 : slot + 1;
        }

        float* to = sums + (buffer * WARPS_K + along) * p.rows * SUMS_ROW;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = n * 8 + lane % 4 * 2 + i % 2;
                    if (row < p.rows) to[row * SUMS_ROW + (part * MT + m) * 16 + lane / 4 + i / 2 * 8] = d[m][n][i];
                }
        meet();
        const u32 from = shared_address(sums + buffer * WARPS_K * p.rows * SUMS_ROW + rank * 16 * MT);
        for (int i = thread; i < p.rows * OUTPUTS; i += WARPS * 32) {
            const int row = i / OUTPUTS, column = i % OUTPUTS, output = (tile * CLUSTER + rank) * OUTPUTS + column;
            float value[GATED + 1] = {};
#pragma unroll
            for (int s = 0; s < SEGMENTS; ++s)
#pragma unroll
                for (int half = 0; half <= GATED; ++half) {
                    const int place = (s % WARPS_K * p.rows + row) * SUMS_ROW + half * 16 + column;
                    value[half] = __fadd_rn(value[half], read_sum(from + place * 4, s / WARPS_K));
                }
            if (output < p.outputs) finish(p, value, row, output);
        }
        if constexpr (SUMS_BUFFERS == 1) {
            meet();
        } else {
            buffer ^= 1;
        }
    }
    // No block may go while another reads its sums.
    if constexpr (CLUSTER > 1 && SUMS_BUFFERS == 2) meet();
}
