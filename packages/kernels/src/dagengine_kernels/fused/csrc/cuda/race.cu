// One token per row, drawn from softmax(score / temperature): the argmax of scaled scores plus Gumbel noise.
//
// A block takes SLICE tokens of a row. The noise of a token is a function of the row's key and the token's id alone
// (SplitMix64's output `id` from the key), and the greatest sum wins, of equal ones the lowest id: neither slices nor the
// order in which blocks arrive matter. Configured by SLICE.
typedef long long i64;
typedef unsigned long long u64;

struct Params {
    const float* scores;         // rows of V, `stride` apart
    const i64* rows;             // [n] which row of scores; null: the i-th
    const float* peaks;          // [n] the greatest score
    const i64* keys;             // [n]
    const float* temperatures;   // [n] above 0
    const float* least;          // [n] log of min-p: lower scaled scores, the greatest being 0, stay out
    u64* best;                   // [n] zero on entry; of the winner: ordered sum << 32 | 2^32 - 1 - id
    i64 stride;
    int vocab;
};

constexpr int THREADS = 256;

__device__ __forceinline__ u64 random_bits(u64 key, u64 id) {
    u64 z = key + (id + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

// -log of an exponential number; its uniform number is the lower 63 bits, kept off 0 and 1
__device__ __forceinline__ float gumbel(u64 bits) {
    const i64 lower = static_cast<i64>(bits & 0x7fffffffffffffffull);
    float u = __ll2float_rn(lower) * 1.0842021724855044e-19f;     // 2^-63
    u = fminf(fmaxf(u, 5.421010862427522e-20f), 0.99999994039535522f);   // 2^-64, 1 - 2^-24
    return -logf(-log1pf(-u));
}

// Greater for greater x, never 0.
__device__ __forceinline__ unsigned ordered(float x) {
    const unsigned bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ u64 greater(u64 a, u64 b) { return a > b ? a : b; }

extern "C" __global__ void __launch_bounds__(THREADS) race(const Params p) {
    const int row = blockIdx.y;
    const i64 source = p.rows ? p.rows[row] : row;
    const float* scores = p.scores + source * p.stride;
    const float peak = p.peaks[row], temperature = p.temperatures[row], least = p.least[row];
    const u64 key = static_cast<u64>(p.keys[row]);
    const int begin = blockIdx.x * SLICE, end = min(begin + SLICE, p.vocab);

    u64 best = 0;
#pragma unroll 4
    for (int id = begin + threadIdx.x; id < end; id += THREADS) {
        const float scaled = (scores[id] - peak) / temperature;
        if (scaled >= least && scaled > __uint_as_float(0xff800000u)) {   // not NaN, not minus infinity
            const float sum = scaled + gumbel(random_bits(key, id));
            best = greater(best, static_cast<u64>(ordered(sum)) << 32 | (0xffffffffu - id));
        }
    }

    __shared__ u64 warps[THREADS / 32];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) best = greater(best, __shfl_xor_sync(0xffffffffu, best, step));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int w = 1; w < THREADS / 32; ++w) best = greater(best, warps[w]);
        if (best) atomicMax(p.best + row, best);
    }
}
