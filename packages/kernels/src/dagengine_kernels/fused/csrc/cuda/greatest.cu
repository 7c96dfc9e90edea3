// The greatest score of each row and the first id that has it, NaN being the greatest of all, and whether it is finite.
//
// A block takes a slice of a row and offers its best as one number, the score's order above and the id's complement below;
// the last block of a row to arrive writes the row's results, and leaves `best` and `arrived` as they were found: zero.
// Configured by SLICE: the scores of a row that a block takes.
typedef long long i64;
typedef unsigned long long u64;

struct Params {
    const float* scores;   // rows of `vocab`, `stride` apart
    i64* ids;              // [n] 0 where the greatest is not finite
    float* peaks;          // [n]
    unsigned char* finite; // [n]
    u64* best;             // [n] zero
    unsigned* arrived;     // [n] zero
    i64 stride;
    int vocab;
};

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr unsigned ALL = 0xffffffffu;

// Greater for greater x, of NaN the greatest; never 0.
__device__ __forceinline__ unsigned ordered(float x) {
    const unsigned bits = __float_as_uint(x + 0.0f);   // minus zero equals zero
    if (x != x) return ALL;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ u64 greater(u64 a, u64 b) { return a > b ? a : b; }

extern "C" __global__ void __launch_bounds__(THREADS) greatest(const Params p) {
    __shared__ u64 warps[WARPS];
    const int row = blockIdx.y, begin = blockIdx.x * SLICE, end = min(begin + SLICE, p.vocab);
    const float* scores = p.scores + row * p.stride;
    u64 best = 0;
#pragma unroll 8
    for (int id = begin + threadIdx.x; id < end; id += THREADS)
        best = greater(best, static_cast<u64>(ordered(scores[id])) << 32 | (ALL - static_cast<unsigned>(id)));
#pragma unroll
    for (int step = 16; step > 0; step /= 2) best = greater(best, __shfl_xor_sync(ALL, best, step));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x != 0) return;
#pragma unroll
    for (int w = 1; w < WARPS; ++w) best = greater(best, warps[w]);
    atomicMax(p.best + row, best);
    __threadfence();
    if (atomicInc(p.arrived + row, gridDim.x - 1) != gridDim.x - 1) return;
    const unsigned id = ALL - static_cast<unsigned>(atomicExch(p.best + row, 0));
    const float peak = scores[id];
    const bool finite = peak - peak == 0.0f;
    p.ids[row] = finite ? id : 0;
    p.peaks[row] = peak;
    p.finite[row] = finite;
}
