// The RMS norm of rows, rounded once: LANES threads take a row, and hold PER vectors of 16 bytes each.
//
// Configured by DTYPE (1 half, 2 bfloat16), LANES (a multiple of 32 up to 256; less than 256 only where PER is 1: the order
// of rms.cuh then is the same) and PER.
#include "rms.cuh"

struct Params {
    const void* x;        // [rows, columns], rows 16-byte aligned
    const float* weight;  // [columns], 16-byte aligned
    void* y;              // [rows, columns], contiguous
    i64 x_row;            // in elements
    int rows, columns;    // columns: a multiple of 8
    int inputs;           // of the mean; the columns after them are zeros
    float eps;
};

static_assert(LANES == NORM_THREADS || PER == 1);

extern "C" __global__ void __launch_bounds__(NORM_THREADS) rms_norm(const __grid_constant__ Params p) {
    let_next_kernel_start();
    __shared__ float squares[NORM_WARPS];
    const int lane = threadIdx.x % LANES, row = blockIdx.x * (NORM_THREADS / LANES) + threadIdx.x / LANES;
    const int vectors = p.columns / 8;
    NormWeights weight[PER];
#pragma unroll
    for (int i = 0; i < PER; ++i)
        if (lane + i * LANES < vectors) weight[i].load(p.weight + (lane + i * LANES) * 8);
    wait_for_previous_kernel();
    Inputs held[PER];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
        const int v = lane + i * LANES;
        held[i].raw = make_uint4(0, 0, 0, 0);
        if (row < p.rows && v < vectors) held[i] = load_fresh<DTYPE, 8>(p.x, row * p.x_row + v * 8);
    }
#pragma unroll
    for (int i = 0; i < PER; ++i) sum = add_squares(sum, held[i]);
    sum = add_lanes(sum);
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) squares[warp] = sum;
    __syncthreads();
    if (row >= p.rows) return;
    const float scale = norm_scale(squares + warp / (LANES / 32) * (LANES / 32), LANES / 32, p.inputs, p.eps);
#pragma unroll
    for (int i = 0; i < PER; ++i) {
        const int v = lane + i * LANES;
        if (v < vectors) normed(held[i], scale, weight[i]).store(p.y, static_cast<i64>(row) * p.columns + v * 8);
    }
}
