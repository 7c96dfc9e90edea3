// A linear layer on many rows, with the bits that skinny.cu gives a row: y = act(x W^T + b) + residual.
//
// A block takes 32 * WARPS_M weight rows (of a gated layer 16 of the gate and 16 of up per 32) and 8 * NT * WARPS_N rows of
// x, a warp 32 weight rows and 8 * NT rows of x. Steps of both pass through a ring of STAGES in shared memory. A warp sums a
// segment, adds it to the sums of those before, and goes on: one more set of accumulators instead of more blocks.
//
// Configured by DTYPE, OUT_TYPE (0 float, 1 half, 2 bfloat16), WARPS_M, WARPS_N, NT, STAGES, GATED.
#include "products.cuh"

constexpr int WARPS = WARPS_M * WARPS_N;
constexpr int MT = 2;
constexpr int WEIGHT_ROWS = 32 * WARPS_M, X_ROWS = 8 * NT * WARPS_N;
constexpr int OUTPUTS = GATED ? WEIGHT_ROWS / 2 : WEIGHT_ROWS;
constexpr int STAGE_BYTES = (WEIGHT_ROWS + X_ROWS) * STEP_BYTES;

// Rows of 8 vectors: odd rows have their halves changed over, so that 8 lanes' reads of two rows meet no bank twice.
__device__ __forceinline__ u32 place(int row, int vector) { return row * STEP_BYTES + (vector ^ (row & 1) << 2) * 16; }

__device__ __forceinline__ void copy_or_zero(u32 to, const void* from, bool copied) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(copied ? 16 : 0) : "memory");
}

// Which output a weight row of the block is of; the second 16 of 32 are up's.
__device__ __forceinline__ int output_of(int row) { return GATED ? row / 32 * 16 + row % 16 : row; }

extern "C" __global__ void __launch_bounds__(WARPS * 32) tiled(const __grid_constant__ Params p) {
    let_next_kernel_start();
    extern __shared__ __align__(128) char shared[];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int warp_m = warp / WARPS_N, warp_n = warp % WARPS_N;
    const int first_row = blockIdx.x * X_ROWS, first_output = blockIdx.y * OUTPUTS;
    const int vectors = (p.inputs + 7) / 8;
    const u32 ring = shared_address(shared);

    constexpr int WEIGHT_COPIES = WEIGHT_ROWS * 8 / (WARPS * 32), X_COPIES = X_ROWS * 8 / (WARPS * 32);
    static_assert(WEIGHT_ROWS * 8 % (WARPS * 32) == 0 && X_ROWS * 8 % (WARPS * 32) == 0);
    const int vector = thread % 8, copied_row = thread / 8;   // the same vector of every (WARPS * 4)th row
    // Steps in the order in which they are summed.
    int next = 0, filled = 0;
    auto fill = [&] {
        if (next < p.steps) {
            const int step = next;
            const u32 stage = ring + filled % STAGES * STAGE_BYTES;
            ++filled;
            next = step + SEGMENTS < p.steps ? step + SEGMENTS
                   : step % SEGMENTS + 1 < min(SEGMENTS, p.steps) ? step % SEGMENTS + 1 : p.steps;
#pragma unroll
            for (int i = 0; i < WEIGHT_COPIES; ++i) {
                const int row = copied_row + i * WARPS * 4;
                const char* from = weight_row(p, first_output + output_of(row), GATED && row / 16 % 2);
                copy_async(stage + place(row, vector), from + step * STEP_BYTES + vector * 16);
            }
            const int v = step * (STEP / 8) + vector;
#pragma unroll
            for (int i = 0; i < X_COPIES; ++i) {
                const int row = copied_row + i * WARPS * 4;
                const i64 at = min(first_row + row, p.rows - 1) * p.x_row + min(v, vectors - 1) * 8;
                copy_or_zero(stage + place(WEIGHT_ROWS + row, vector), static_cast<const char*>(p.x) + at * 2, v < vectors);
            }
        }
        close_copies();
    };
    wait_for_previous_kernel();
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) fill();

    int read = 0;
    float total[MT][NT][4] = {};
    for (int segment = 0; segment < SEGMENTS; ++segment) {
        float d[MT][NT][4] = {};
        for (int step = segment; step < p.steps; step += SEGMENTS, ++read) {
            await_copies<STAGES - 2>();
            __syncthreads();   // what all have copied is seen, and the stage before this one is read
            fill();
            const char* stage = shared + read % STAGES * STAGE_BYTES;
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int vector = c * 4 + lane % 4;
                uint4 low[MT], high[MT];
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    const int row = (warp_m * MT + m) * 16 + lane / 4;
                    low[m] = *reinterpret_cast<const uint4*>(stage + place(row, vector));
                    high[m] = *reinterpret_cast<const uint4*>(stage + place(row + 8, vector));
                }
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const int row = WEIGHT_ROWS + (warp_n * NT + n) * 8 + lane / 4;
                    const uint4 b = *reinterpret_cast<const uint4*>(stage + place(row, vector));
#pragma unroll
                    for (int m = 0; m < MT; ++m) half_step(d[m][n], low[m], high[m], b);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) total[m][n][i] = __fadd_rn(total[m][n][i], d[m][n][i]);
    }

#pragma unroll
    for (int m = 0; m < (GATED ? 1 : MT); ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = first_row + (warp_n * NT + n) * 8 + lane % 4 * 2 + i % 2;
                const int output = first_output + output_of((warp_m * MT + m) * 16 + lane / 4 + i / 2 * 8);
                if (row >= p.rows || output >= p.outputs) continue;
                if constexpr (GATED) {
                    float sum[2] = {total[0][n][i], total[1][n][i]};
                    finish(p, sum, row, output);
                } else {
                    float sum[1] = {total[m][n][i]};
                    finish(p, sum, row, output);
                }
            }
}
