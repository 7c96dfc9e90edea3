// A linear layer on few rows with the bits that tiled.cu gives a row: y = act(norm(x) W^T + b) + residual.
//
// A block takes tiles of 16 weight rows (gated: 8 of the gate, 8 of up), one after another. A producer warp copies them into
// a ring of STAGES in shared memory, by one bulk copy per row and stage, and begins before it waits for the kernel before
// this one: weights depend on nothing. Warp w of the 8 others takes step w of a stage: segment w of products.cuh.
//
//   stage   row 0    | step 0 | step 1 | .. | step 7 |     1 KiB of a weight's row, 64 bytes apart: 8 lanes' vectors of two
//           ..                                             rows meet no bank twice
//           row 15   | step 0 | step 1 | .. | step 7 |
//
// x, normed, is in shared memory. Where a tile ends the warps add their sums in order.
//
// Configured by DTYPE, OUT_TYPE (0 float, 1 half, 2 bfloat16), NT (rows of x / 8, rounded up), STAGES, GATED and NORM
// (vectors of a row that a thread holds; 0: no norm; NT is 1).
#include "held.cuh"
#include "hopper.cuh"

constexpr int WARPS = 8;
constexpr int CHUNK_BYTES = SEGMENTS * STEP_BYTES;
constexpr int ROW_BYTES = CHUNK_BYTES + 64;
constexpr int TILE = 16;
constexpr int OUTPUTS = GATED ? TILE / 2 : TILE;
constexpr int STAGE_BYTES = TILE * ROW_BYTES;
constexpr int BARRIER_BYTES = 256;
constexpr int SUMS_ROW = TILE + 4;   // floats of a row of sums, so that stores meet no bank twice
static_assert(WARPS == SEGMENTS && WARPS == NORM_WARPS);
static_assert(!NORM || NT == 1);
static_assert(16 * STAGES <= BARRIER_BYTES);

// `bytes`: a multiple of 16.
__device__ __forceinline__ void copy_row(char* to, const char* from, int bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void show_barriers() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

struct Ring {
    u32 barriers;   // full ones, then empty ones
    int stage = 0;
    u32 round = 0;

    __device__ u32 full() const { return barriers + stage * 8; }
    __device__ u32 empty() const { return barriers + (STAGES + stage) * 8; }
    __device__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            round ^= 1;
        }
    }
};

__device__ __forceinline__ void produce(const Params& p, char* stages, Ring ring, int lane) {
    if (lane == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(ring.barriers + i * 8, 1);
            barrier_init(ring.barriers + (STAGES + i) * 8, WARPS);
        }
        show_barriers();
    }
    __syncwarp();
    const int chunks = (p.steps + SEGMENTS - 1) / SEGMENTS, row_bytes = p.steps * STEP_BYTES;
    const int mine = (p.tiles - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
    const int total = mine * chunks, ahead = min(STAGES, total);
    const char* weight = nullptr;
    int tile = blockIdx.x, chunk = 0;
    for (int i = 0; i < total; ++i) {
        if (i == ahead) __syncthreads();
        if (i >= ahead) barrier_wait(ring.empty(), ring.round ^ 1);
        if (chunk == 0) {
            const int within = lane % TILE, output = tile * OUTPUTS + within % OUTPUTS;
            weight = weight_row(p, output, GATED && within >= OUTPUTS);
        }
        const int at = chunk * CHUNK_BYTES, bytes = min(CHUNK_BYTES, row_bytes - at);
        if (lane == 0) barrier_expect(ring.full(), TILE * bytes);
        __syncwarp();
        char* to = stages + ring.stage * STAGE_BYTES + lane * ROW_BYTES;
        if (lane < TILE) copy_row(to, weight + at, bytes, ring.full());
        ring.advance();
        if (++chunk == chunks) {
            chunk = 0;
            tile += gridDim.x;
        }
    }
    if (total == ahead) __syncthreads();
}

extern "C" __global__ void __launch_bounds__(WARPS * 32 + 32, NORM > 4 ? 1 : 2) skinny(const __grid_constant__ Params p) {
    let_next_kernel_start();
    extern __shared__ __align__(128) char shared[];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    char* stages = shared + BARRIER_BYTES;
    float* sums = reinterpret_cast<float*>(stages + STAGES * STAGE_BYTES);
    char* x = reinterpret_cast<char*>(sums + 2 * WARPS * p.rows * SUMS_ROW);
    const int x_bytes = p.steps * STEP_BYTES + 64;
    Ring ring = {shared_address(shared)};
    if (warp == WARPS) {
        produce(p, stages, ring, lane);
        return;
    }
    if constexpr (NORM > 0) {
        hold_normed<NORM, 8, 4>(p, x, x_bytes, thread);
    } else {
        hold(p, x, x_bytes, thread);
    }
    __syncthreads();

    const int chunks = (p.steps + SEGMENTS - 1) / SEGMENTS, place = warp * STEP_BYTES + lane % 4 * 16;
    const char* operands[NT];   // of this lane: row g of each 8 rows of x; rows past the last repeat it and are not stored
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const int row = min(n * 8 + lane / 4, p.rows - 1);
        operands[n] = place + x + row * x_bytes;
    }
    int buffer = 0;
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        float d[NT][4] = {};
        for (int chunk = 0; chunk < chunks; ++chunk) {
            barrier_wait(ring.full(), ring.round);
            if (chunk * SEGMENTS + warp < p.steps) {
                const char* low = stages + ring.stage * STAGE_BYTES + lane / 4 * ROW_BYTES + place;
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const uint4 a = *reinterpret_cast<const uint4*>(low + c * 64);
                    const uint4 b = *reinterpret_cast<const uint4*>(low + 8 * ROW_BYTES + c * 64);
#pragma unroll
                    for (int n = 0; n < NT; ++n)
                        half_step(d[n], a, b, *reinterpret_cast<const uint4*>(operands[n] + chunk * CHUNK_BYTES + c * 64));
                }
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(ring.empty());
            ring.advance();
        }

        float* to = sums + (buffer * WARPS + warp) * p.rows * SUMS_ROW;
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = n * 8 + lane % 4 * 2 + i % 2;
                if (row < p.rows) to[row * SUMS_ROW + lane / 4 + i / 2 * 8] = d[n][i];
            }
        holders_meet();
        const float* from = sums + buffer * WARPS * p.rows * SUMS_ROW;
        for (int i = thread; i < p.rows * OUTPUTS; i += WARPS * 32) {
            const int row = i / OUTPUTS, column = i % OUTPUTS, output = tile * OUTPUTS + column;
            float value[GATED + 1] = {};
#pragma unroll
            for (int s = 0; s < SEGMENTS; ++s)
#pragma unroll
                for (int half = 0; half <= GATED; ++half)
                    value[half] = __fadd_rn(value[half], from[(s * p.rows + row) * SUMS_ROW + half * OUTPUTS + column]);
            if (output < p.outputs) finish(p, value, row, output);
        }
        buffer ^= 1;
    }
}
