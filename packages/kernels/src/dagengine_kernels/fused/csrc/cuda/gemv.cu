// A linear layer on 1 to 8 rows, at the speed at which its weight is read: y = act(norm(x) W^T + b) + residual.
//
// A warp takes two weight rows at a time (gated: the gate's and up's of one output), its lanes 16 bytes each side by side:
// 512 bytes of a row per load. Loads run DEPTH / 2 such steps ahead in registers, past the end of the two rows into the next
// two, and the first are under way before the kernel before this one has ended: weights depend on nothing. Blocks are many
// more than fit at once where the weight is large, so that the processors which memory serves faster take more of them.
//
//   block     tile 0 | tile 1 | .. | tile rounds - 1           one after another
//   tile      two rows per group of SPLIT warps                8 / SPLIT groups
//   row       part 0 | .. | part SPLIT - 1                     one per warp of the group, whose sums are added in order
//   part      steps of 32 vectors of 8 inputs                  one vector per lane
//
// x, normed, is in shared memory. A lane sums its inputs in order, then lanes are added pairwise: a row's bits do not depend
// on how many rows there are, but they are not those of products.cuh.
//
// Configured by DTYPE, OUT_TYPE (0 float, 1 half, 2 bfloat16), ROWS (of x), STEPS (of the weight: inputs / 64, rounded up),
// GATED, NORM (whether x is yet to be normed), SPLIT (a power of two up to 8), DEPTH (even), BLOCKS (that an SM must hold).
#include "held.cuh"

constexpr int WARPS = NORM_WARPS;
constexpr int GROUPS = WARPS / SPLIT;
constexpr int OUTPUTS = GATED ? 1 : 2;   // per group and tile
constexpr int VECTORS = STEPS * STEP / 8;
constexpr int PER_PART = (VECTORS + 32 * SPLIT - 1) / (32 * SPLIT);   // steps of 32 vectors
constexpr int AHEAD = DEPTH / 2 < PER_PART ? DEPTH / 2 : PER_PART;
constexpr int PADDED = (PER_PART + AHEAD - 1) / AHEAD * AHEAD;
constexpr bool EXACT = PER_PART * 32 * SPLIT == VECTORS && PADDED == PER_PART;
constexpr int SUMS = 2 * ROWS;
constexpr int PER_THREAD = (VECTORS + NORM_THREADS - 1) / NORM_THREADS;   // of the norm
constexpr bool FREE = BLOCKS <= 2 && DEPTH <= 8;   // whether registers are left for the norm's weights
static_assert(SUMS <= 32 && WARPS % SPLIT == 0 && DEPTH % 2 == 0);

// Not .nc: such loads the compiler moves behind the wait for the kernel before this one.
__device__ __forceinline__ uint4 load_weight(const char* from) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

// 8 elements as floats; bfloat16 by one instruction each.
__device__ __forceinline__ void widen(const uint4& raw, float (&to)[8]) {
    if constexpr (DTYPE == 2) {
        const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            to[2 * i] = __uint_as_float(words[i] << 16);
            to[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        }
    } else {
        Inputs v;
        v.raw = raw;
        v.unpack(to);
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) gemv(const __grid_constant__ Params p) {
    let_next_kernel_start();
    extern __shared__ __align__(128) char x[];
    __shared__ float sums[WARPS][SUMS];
    constexpr int X_BYTES = VECTORS * 16;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, group = warp / SPLIT, part = warp % SPLIT;
    const int first = blockIdx.x * p.rounds, rounds = min(p.rounds, p.tiles - first);
    const int start = part * PER_PART * 32 + lane;   // this lane's first vector

    auto output_of = [&](int round) { return ((first + round) * GROUPS + group) * OUTPUTS; };
    uint4 weight[AHEAD][2];
    const char* rows[2];   // whose steps are loaded next
    auto turn_to = [&](int round) {
        const int output = output_of(round);
        rows[0] = weight_row(p, output, false) + start * 16;
        rows[1] = (GATED ? weight_row(p, output, true) : weight_row(p, output + 1, false)) + start * 16;
    };
    auto in_part = [&](int step) { return EXACT || (step < PER_PART && start + step * 32 < VECTORS); };
    auto load = [&](int slot, int base) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (in_part(base + slot)) {
                weight[slot][r] = load_weight(rows[r] + slot * 512);
            } else {
                weight[slot][r] = make_uint4(0, 0, 0, 0);
            }
        }
    };
    turn_to(0);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) load(i, 0);

    if constexpr (NORM) {
        hold_normed<PER_THREAD, FREE ? ROWS : 1, FREE ? 2 : 0>(p, x, X_BYTES, thread);
    } else {
        hold(p, x, X_BYTES, thread);
    }
    __syncthreads();

    const int kept = lane / 2, kept_part = lane % 2;   // the sum that this lane finishes
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
        const int output = output_of(round) + (GATED ? 0 : kept_part);
        const bool mine = part == 0 && lane < SUMS && output < p.outputs && !(GATED && kept_part);
        Addends<GATED + 1> addends;
        if (mine) addends = addends_of<GATED + 1>(p, kept, output);

        float sum[ROWS][2] = {};
#pragma unroll 1
        for (int base = 0; base < PADDED; base += AHEAD) {
            const bool last = base + AHEAD == PADDED, more = !last || round + 1 < rounds;
            const int next = last ? 0 : base + AHEAD;
            if (!last) {
                rows[0] += AHEAD * 512, rows[1] += AHEAD * 512;
            } else if (more) {
                turn_to(round + 1);
            }
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const char* at = x + (start + (base + i) * 32) * 16;
#pragma unroll
                for (int t = 0; t < ROWS; ++t) {
                    uint4 raw = make_uint4(0, 0, 0, 0);
                    if (in_part(base + i)) raw = *reinterpret_cast<const uint4*>(at + t * X_BYTES);
                    float in[8];
                    widen(raw, in);
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        float w[8];
                        widen(weight[i][r], w);
#pragma unroll
                        for (int j = 0; j < 8; ++j) sum[t][r] = __fmaf_rn(w[j], in[j], sum[t][r]);
                    }
                }
                if (more) load(i, next);
            }
        }

        float own = 0.0f;   // sum[kept][kept_part]
#pragma unroll
        for (int t = 0; t < ROWS; ++t)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float whole = add_lanes(sum[t][r]);
                if (lane == t * 2 + r) own = whole;
            }
        if constexpr (SPLIT > 1) {
            if (round > 0) __syncthreads();   // the sums before are read
            if (lane < SUMS) sums[warp][lane] = own;
            __syncthreads();
            if (part == 0 && lane < SUMS)
#pragma unroll
                for (int s = 1; s < SPLIT; ++s) own = __fadd_rn(own, sums[warp + s][lane]);
        }
        float result[GATED + 1] = {own};
        if constexpr (GATED) result[1] = __shfl_down_sync(0xffffffffu, own, 1);
        if (mine) finish(p, result, addends, kept, output);
    }
}
