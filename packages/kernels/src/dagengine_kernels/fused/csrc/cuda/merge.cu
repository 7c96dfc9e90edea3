// Partial results of a plan merged by their LSE (base 2), learned sinks included once.
//
// SPLIT warps take a merge row (table row, kv head) and one of its G query heads, each a stretch of its parts. Parts are
// added in the order listed and the warps' sums in theirs, so the bits are the same from run to run. A part with
// lse2 = -inf counts nothing, whatever its o_part holds. Configured by DTYPE (of `out`), PART_DTYPE (of `o_part`),
// HEAD_DIM, GROUP, VEC, SPLIT (1, 2 or 4), ORDERED 0|1 (only with SPLIT 1: parts that count nothing leave no trace, so
// that a row's bits depend on the others and their order alone).
#include "vectors.cuh"

struct Params {
    const void* o_part;          // [P, G, D]
    const float* lse2_part;      // [P, G]
    const int* rows;             // [J] table row * Hkv + kv head; negative: nothing to do
    const int* indptr;           // [J + 1]
    const int* parts;            // indices into the first axis of o_part
    void* out;                   // [T, Hq, D]
    float* lse2;                 // [T, Hq], or null
    const float* sinks;          // [Hq] logits (base e), or null
    int num_rows, kv_heads;
};

static_assert(!ORDERED || SPLIT == 1, "one warp adds all parts of a row, in their order");

constexpr int WARPS = 4;
constexpr int ROUNDS = (HEAD_DIM / VEC + 31) / 32;
constexpr int AHEAD = ORDERED && VEC == 4 ? 4 : 8;       // parts under way; where it is 4, 8 would spill
constexpr float LOG2E = 1.4426950408889634f;

typedef Vector<PART_DTYPE, VEC> Part;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// The merge of some parts: 2^top * total is the sum of 2^lse2, `sum` their weighted sum in units of 2^top.
struct Merged {
    float top, total;
    float sum[ROUNDS][VEC];
};

__device__ void load_parts(Part (&loaded)[AHEAD][ROUNDS], const Params& p, int part, int first, int count, int g, int lane) {
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
        const int index = __shfl_sync(0xffffffffu, part, (first + a) & 31);
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const int at = (lane + r * 32) * VEC;
            loaded[a][r] = Part{};
            if (first + a < count && at < HEAD_DIM)
                loaded[a][r] = Part::load(p.o_part, (static_cast<i64>(index) * GROUP + g) * HEAD_DIM + at);
        }
    }
}

__device__ __forceinline__ float lse2_of(const Params& p, int i, int end, int g) {
    return i < end ? p.lse2_part[static_cast<i64>(p.parts[i]) * GROUP + g] : minus_infinity();
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) merge_parts(const __grid_constant__ Params p) {
    let_next_kernel_start();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int task = blockIdx.x * (WARPS / SPLIT) + warp / SPLIT, share = warp % SPLIT;
    const int j = task / GROUP, g = task - j * GROUP;
    // The lists are older than the kernel whose partials these are, so they are read before it has ended.
    const int row = j < p.num_rows ? p.rows[j] : -1;
    int begin = 0, end = 0, part = -1;
    if (row >= 0) {
        const int first = p.indptr[j], count = p.indptr[j + 1] - first;
        begin = first + count * share / SPLIT;
        end = first + count * (share + 1) / SPLIT;
        if (begin + lane < end) part = p.parts[begin + lane];
    }
    wait_for_previous_kernel();

    Merged mine;
    mine.top = minus_infinity();
    mine.total = 0.0f;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
        for (int i = 0; i < VEC; ++i) mine.sum[r][i] = 0.0f;
    if constexpr (ORDERED) {
        for (int base = begin; base < end; base += 32) mine.top = fmaxf(mine.top, lse2_of(p, base + lane, end, g));
        mine.top = warp_max(mine.top);
        const float finite_top = mine.top == minus_infinity() ? 0.0f : mine.top;
        for (int base = begin; base < end; base += 32) {
            const float weight = exp2f(lse2_of(p, base + lane, end, g) - finite_top);
#pragma unroll 1
            for (int n = 0; n < 32; ++n) mine.total += __shfl_sync(0xffffffffu, weight, n);
        }
    }
    for (int base = begin; base < end; base += 32) {
        if (base > begin) part = base + lane < end ? p.parts[base + lane] : -1;
        const int count = min(32, end - base);
        // Loaded beside the LSEs, not after them: what turns out to be empty is dropped by its weight.
        Part loaded[AHEAD][ROUNDS];
        load_parts(loaded, p, part, 0, count, g, lane);
        const float lse2 = part >= 0 ? p.lse2_part[static_cast<i64>(part) * GROUP + g] : minus_infinity();
        const float top = fmaxf(mine.top, warp_max(lse2));
        const float finite_top = top == minus_infinity() ? 0.0f : top;
        const float weight = exp2f(lse2 - finite_top);
        if constexpr (!ORDERED) {
            const float scale = exp2f(mine.top - finite_top);
            mine.total = mine.total * scale + warp_sum(weight);
            mine.top = top;
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
                for (int i = 0; i < VEC; ++i) mine.sum[r][i] *= scale;
        }
        for (int n = 0; n < count; n += AHEAD) {
            if (n > 0) load_parts(loaded, p, part, n, count, g, lane);
#pragma unroll
            for (int a = 0; a < AHEAD; ++a) {
                const float w = __shfl_sync(0xffffffffu, weight, (n + a) & 31);
#pragma unroll
                for (int r = 0; r < ROUNDS; ++r) {
                    float x[VEC];
                    loaded[a][r].unpack(x);
#pragma unroll
                    for (int i = 0; i < VEC; ++i)
                        if (n + a < count && w > 0.0f) mine.sum[r][i] = fmaf(w, x[i], mine.sum[r][i]);
                }
            }
        }
    }

    if constexpr (SPLIT > 1) {
        __shared__ Merged others[WARPS][32];
        others[warp][lane] = mine;
        __syncthreads();
        if (share != 0) return;
#pragma unroll
        for (int s = 1; s < SPLIT; ++s) {
            const Merged& other = others[warp + s][lane];
            const float top = fmaxf(mine.top, other.top);
            const float finite_top = top == minus_infinity() ? 0.0f : top;
            const float a = exp2f(mine.top - finite_top), b = exp2f(other.top - finite_top);
            mine.top = top;
            mine.total = mine.total * a + other.total * b;
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
                for (int i = 0; i < VEC; ++i) mine.sum[r][i] = mine.sum[r][i] * a + other.sum[r][i] * b;
        }
    }
    if (row < 0) return;
    if (p.sinks) {
        const float sink = p.sinks[row % p.kv_heads * GROUP + g] * LOG2E;
        const float top = fmaxf(mine.top, sink), base = top == minus_infinity() ? 0.0f : top;
        const float scale = exp2f(mine.top - base);
        mine.top = top;
        mine.total = mine.total * scale + exp2f(sink - base);
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
            for (int i = 0; i < VEC; ++i) mine.sum[r][i] *= scale;
    }
    const float factor = mine.total > 0.0f ? 1.0f / mine.total : 0.0f;
    const i64 to = static_cast<i64>(row) * GROUP + g;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int at = (lane + r * 32) * VEC;
        float x[VEC];
#pragma unroll
        for (int i = 0; i < VEC; ++i) x[i] = mine.sum[r][i] * factor;
        if (at < HEAD_DIM) Vector<DTYPE, VEC>::pack(x).store(p.out, to * HEAD_DIM + at);
    }
    if (p.lse2 && lane == 0) p.lse2[to] = mine.total > 0.0f ? mine.top + log2f(mine.total) : minus_infinity();
}
