// Rows of x, normed or as they are, in shared memory for the products of a block: 256 threads move them.
#pragma once
#include "products.cuh"

// The 256 threads that hold x; others of the block do not take part.
__device__ __forceinline__ void holders_meet() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

// x to shared memory, through the norm. PER: vectors of a row that a thread holds; at most 8 rows, of which at most
// AT_ONCE are read together; the norm's weights are in registers when x comes if they are at most EARLY vectors.
template <int PER, int AT_ONCE, int EARLY>
__device__ __forceinline__ void hold_normed(const Params& p, char* x, int x_bytes, int thread) {
    constexpr int FIT = PER > 8 ? 1 : 8 / PER, GROUP = FIT < AT_ONCE ? FIT : AT_ONCE;
    constexpr bool AHEAD = PER <= EARLY;
    __shared__ float squares[8][NORM_WARPS];
    const int vectors = (p.inputs + 7) / 8, all = p.steps * (STEP / 8), lane = thread % 32, warp = thread / 32;
    NormWeights weight[PER];
#pragma unroll
    for (int i = 0; i < PER; ++i)
        if (AHEAD && thread + i * NORM_THREADS < vectors) weight[i].load(p.norm + (thread + i * NORM_THREADS) * 8);
    wait_for_previous_kernel();
    for (int first = 0; first < p.rows; first += GROUP) {
        Inputs read[GROUP][PER];
#pragma unroll
        for (int r = 0; r < GROUP; ++r)
#pragma unroll
            for (int i = 0; i < PER; ++i) {
                const int v = thread + i * NORM_THREADS;
                read[r][i].raw = make_uint4(0, 0, 0, 0);
                if (first + r < p.rows && v < vectors) read[r][i] = load_fresh<DTYPE, 8>(p.x, (first + r) * p.x_row + v * 8);
            }
#pragma unroll
        for (int r = 0; r < GROUP; ++r) {
            if (first + r >= p.rows) break;
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < PER; ++i) sum = add_squares(sum, read[r][i]);
            sum = add_lanes(sum);
            if (lane == 0) squares[first + r][warp] = sum;
        }
        holders_meet();
#pragma unroll
        for (int r = 0; r < GROUP; ++r) {
            if (first + r >= p.rows) break;
            const float scale = norm_scale(squares[first + r], NORM_WARPS, p.inputs, p.eps);
#pragma unroll
            for (int i = 0; i < PER; ++i) {
                const int v = thread + i * NORM_THREADS;
                if (!AHEAD && v < vectors) weight[i].load(p.norm + v * 8);
                if (v < all) *reinterpret_cast<uint4*>(x + (first + r) * x_bytes + v * 16) = normed(read[r][i], scale, weight[i]).raw;
            }
        }
    }
}

// x to shared memory as it is.
__device__ __forceinline__ void hold(const Params& p, char* x, int x_bytes, int thread) {
    constexpr int AT_ONCE = 4;
    const int vectors = (p.inputs + 7) / 8, width = p.steps * (STEP / 8), all = p.rows * width;
    wait_for_previous_kernel();
    for (int base = thread; base < all; base += NORM_THREADS * AT_ONCE) {
        uint4 read[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int at = base + i * NORM_THREADS, r = at / width, v = at - r * width;
            read[i] = make_uint4(0, 0, 0, 0);
            if (at < all && v < vectors) read[i] = load_fresh<DTYPE, 8>(p.x, r * p.x_row + v * 8).raw;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int at = base + i * NORM_THREADS, r = at / width, v = at - r * width;
            if (at < all) *reinterpret_cast<uint4*>(x + r * x_bytes + v * 16) = read[i];
        }
    }
}
