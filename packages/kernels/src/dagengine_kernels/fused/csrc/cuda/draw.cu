// One token per row, drawn from softmax(score / temperature), of all tokens or of those that top-p keeps.
//
// race: the argmax of scaled scores plus Gumbel noise. The noise of a token is a function of the row's key and the token's
//     id alone (SplitMix64's output `id` from the key); the greatest sum wins, of equal ones the lowest id.
// narrow, settle: where top-p cuts. Tokens are ordered by their place, likeliest first, which is 56 bits:
//
//     bits 55-24   the bits of -(scaled score), which is 0 or more
//     bits 23-0    id
//
//     The search takes DIGITS digits of the cut's place, the highest first. `narrow` adds up, for one digit, the mass of the
//     tokens whose higher digits are those found; `settle` and every later `narrow` find the digits again from these sums.
//     A mass is exp(scaled score) in units of 2^-42, an integer. So all sums are exact, and neither slices nor the order in
//     which blocks arrive matter.
// Configured by SLICE: the tokens of a row that a block takes.
typedef long long i64;
typedef unsigned long long u64;

struct Params {
    const float* scores;         // rows of V, `stride` apart
    const i64* rows;             // [n] which row of scores; null: the i-th
    const float* peaks;          // [n] the greatest score
    const float* temperatures;   // [n] above 0
    const float* least;          // [n] log of min-p: lower scaled scores, the greatest being 0, stay out
    const i64* keys;             // [n]
    const double* top_p;         // [n]
    u64* sums;                   // [n, DIGITS, 16] zero before the first narrow
    u64* cuts;                   // [n] the place of the last token that stays; null: all stay
    u64* best;                   // [n] zero on entry; of the winner: ordered sum << 32 | 2^32 - 1 - id
    i64 stride;
    int vocab, count, digit;     // digit: which one narrow takes
};

#ifndef THREADS
#define THREADS 256
#endif
constexpr int WARPS = THREADS / 32;
constexpr int DIGITS = 14;
constexpr int BINS = 16;
constexpr int PLACE_BITS = 4 * DIGITS;
constexpr int ID_BITS = 24;
constexpr unsigned ALL = 0xffffffffu;

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

__device__ __forceinline__ u64 place_of(float scaled, int id) {
    return static_cast<u64>(__float_as_uint(fabsf(scaled))) << ID_BITS | static_cast<unsigned>(id);
}

__device__ __forceinline__ u64 greater(u64 a, u64 b) { return a > b ? a : b; }

// One row as a block sees it.
struct Row {
    const float* scores;
    float peak, temperature, least;
    int begin, end;

    __device__ Row(const Params& p, int row) {
        const i64 source = p.rows ? p.rows[row] : row;
        scores = p.scores + source * p.stride;
        peak = p.peaks[row];
        temperature = p.temperatures[row];
        least = p.least[row];
        begin = blockIdx.x * SLICE;
        end = min(begin + SLICE, p.vocab);
    }

    __device__ __forceinline__ float scaled(int id) const { return (scores[id] - peak) / temperature; }

    // Not for NaN and minus infinity.
    __device__ __forceinline__ bool takes(float x) const { return x >= least && x > __uint_as_float(0xff800000u); }
};

// The first `digits` digits of the cut's place, by one warp.
__device__ u64 find(const u64* sums, double top_p, int digits, int lane) {
    u64 share = 0, below = 0, prefix = 0;
    for (int d = 0; d < digits; ++d) {
        const u64 own = lane < BINS ? sums[d * BINS + lane] : 0;
        u64 upto = own;
#pragma unroll
        for (int step = 1; step < BINS; step *= 2) {
            const u64 other = __shfl_up_sync(ALL, upto, step);
            if (lane >= step) upto += other;
        }
        if (d == 0) {
            const u64 total = __shfl_sync(ALL, upto, BINS - 1);
            share = static_cast<u64>(fmin(ceil(static_cast<double>(total) * top_p), 4611686018427387904.0));
        }
        const unsigned reached = __ballot_sync(ALL, lane < BINS && below + upto >= share);
        const int found = reached ? __ffs(reached) - 1 : BINS - 1;
        below += __shfl_sync(ALL, upto - own, found);
        prefix = prefix << 4 | static_cast<unsigned>(found);
    }
    return prefix;
}

extern "C" __global__ void __launch_bounds__(THREADS) narrow(const Params p) {
    __shared__ u64 shared_prefix;
    __shared__ u64 warps[WARPS][BINS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u64* sums = p.sums + static_cast<i64>(blockIdx.y) * DIGITS * BINS;
    if (warp == 0) {
        const u64 found = find(sums, p.top_p[blockIdx.y], p.digit, lane);
        if (lane == 0) shared_prefix = found;
    }
    __syncthreads();
    const u64 prefix = shared_prefix;
    const int shift = PLACE_BITS - 4 * p.digit;

    const Row row(p, blockIdx.y);
    u64 bins[BINS] = {};
    for (int id = row.begin + threadIdx.x; id < row.end; id += THREADS) {
        const float scaled = row.scaled(id);
        const u64 place = place_of(scaled, id);
        if (!row.takes(scaled) || place >> shift != prefix) continue;
        const int digit = static_cast<int>(place >> (shift - 4)) & (BINS - 1);
        const u64 mass = __float2ull_rz(expf(scaled) * 4398046511104.0f);   // 2^42
#pragma unroll
        for (int b = 0; b < BINS; ++b) bins[b] += digit == b ? mass : 0;
    }
#pragma unroll
    for (int b = 0; b < BINS; ++b) {
#pragma unroll
        for (int step = 16; step > 0; step /= 2) bins[b] += __shfl_xor_sync(ALL, bins[b], step);
        if (lane == 0) warps[warp][b] = bins[b];
    }
    __syncthreads();
    if (threadIdx.x < BINS) {
        u64 sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += warps[w][threadIdx.x];
        if (sum) atomicAdd(sums + p.digit * BINS + threadIdx.x, sum);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) settle(const Params p) {
    const int lane = threadIdx.x % 32, row = blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= p.count) return;
    const u64 found = find(p.sums + static_cast<i64>(row) * DIGITS * BINS, p.top_p[row], DIGITS, lane);
    if (lane == 0) p.cuts[row] = found;
}

extern "C" __global__ void __launch_bounds__(THREADS) race(const Params p) {
    __shared__ u64 warps[WARPS];
    const Row row(p, blockIdx.y);
    const u64 key = static_cast<u64>(p.keys[blockIdx.y]);
    const u64 cut = p.cuts ? p.cuts[blockIdx.y] : ~0ull;

    u64 best = 0;
#pragma unroll 4
    for (int id = row.begin + threadIdx.x; id < row.end; id += THREADS) {
        const float scaled = row.scaled(id);
        if (row.takes(scaled) && place_of(scaled, id) <= cut) {
            const float sum = scaled + gumbel(random_bits(key, id));
            best = greater(best, static_cast<u64>(ordered(sum)) << 32 | (ALL - static_cast<unsigned>(id)));
        }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) best = greater(best, __shfl_xor_sync(ALL, best, step));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int w = 1; w < WARPS; ++w) best = greater(best, warps[w]);
        if (best) atomicMax(p.best + blockIdx.y, best);
    }
}
