// Partial results of a plan merged by their LSE (base 2), learned sinks included once.
//
// One warp takes a merge row (table row, kv head) and one of its G query heads. Parts are added in the order listed, so
// the bits are the same from run to run. A part with lse2 = -inf is not read. Configured by DTYPE (of `out`), PART_DTYPE
// (of `o_part`), HEAD_DIM, GROUP, VEC.
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

constexpr int WARPS = 4;
constexpr int ROUNDS = (HEAD_DIM / VEC + 31) / 32;
constexpr float LOG2E = 1.4426950408889634f;
constexpr int AHEAD = 4;

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

extern "C" __global__ void __launch_bounds__(WARPS * 32) merge_parts(const __grid_constant__ Params p) {
    let_next_kernel_start();
    const int task = blockIdx.x * WARPS + threadIdx.x / 32;
    const int j = task / GROUP, g = task - j * GROUP, lane = threadIdx.x % 32;
    // The lists are older than the kernel whose partials these are, so they are read before it has ended.
    const int row = j < p.num_rows ? p.rows[j] : -1;
    if (row < 0) {
        wait_for_previous_kernel();
        return;
    }
    const int begin = p.indptr[j], end = p.indptr[j + 1];
    const int head = row % p.kv_heads * GROUP + g;
    const int first_part = begin + lane < end ? p.parts[begin + lane] : -1;
    float top = p.sinks ? p.sinks[head] * LOG2E : minus_infinity();
    float total = p.sinks ? 1.0f : 0.0f;
    wait_for_previous_kernel();

    float sum[ROUNDS][VEC] = {};
    for (int base = begin; base < end; base += 32) {
        int part = first_part;
        if (base > begin) part = base + lane < end ? p.parts[base + lane] : -1;
        const float lse2 = part >= 0 ? p.lse2_part[static_cast<i64>(part) * GROUP + g] : minus_infinity();
        const float new_top = fmaxf(top, warp_max(lse2));
        if (new_top == minus_infinity()) continue;
        const float scale = exp2f(top - new_top);
        const float weight = exp2f(lse2 - new_top);
        total = total * scale + warp_sum(weight);
        top = new_top;
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
            for (int i = 0; i < VEC; ++i) sum[r][i] *= scale;
        const int count = min(32, end - base);
        for (int n = 0; n < count; n += AHEAD) {
            Vector<PART_DTYPE, VEC> loaded[AHEAD][ROUNDS];
            float weights[AHEAD];
#pragma unroll
            for (int a = 0; a < AHEAD; ++a) {
                const int index = __shfl_sync(0xffffffffu, part, (n + a) & 31);
                const float w = __shfl_sync(0xffffffffu, weight, (n + a) & 31);
                weights[a] = n + a < count ? w : 0.0f;
#pragma unroll
                for (int r = 0; r < ROUNDS; ++r) {
                    const int at = (lane + r * 32) * VEC;
                    loaded[a][r] = Vector<PART_DTYPE, VEC>{};
                    if (weights[a] > 0.0f && at < HEAD_DIM)
                        loaded[a][r] = Vector<PART_DTYPE, VEC>::load(p.o_part, (static_cast<i64>(index) * GROUP + g) * HEAD_DIM + at);
                }
            }
#pragma unroll
            for (int a = 0; a < AHEAD; ++a)
#pragma unroll
                for (int r = 0; r < ROUNDS; ++r) {
                    float x[VEC];
                    loaded[a][r].unpack(x);
#pragma unroll
                    for (int i = 0; i < VEC; ++i) sum[r][i] += weights[a] * x[i];
                }
        }
    }

    const float share = total > 0.0f ? 1.0f / total : 0.0f;
    const i64 to = static_cast<i64>(row) * GROUP + g;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int at = (lane + r * 32) * VEC;
        float x[VEC];
#pragma unroll
        for (int i = 0; i < VEC; ++i) x[i] = sum[r][i] * share;
        if (at < HEAD_DIM) Vector<DTYPE, VEC>::pack(x).store(p.out, to * HEAD_DIM + at);
    }
    if (p.lse2 && lane == 0) p.lse2[to] = total > 0.0f ? top + log2f(total) : minus_infinity();
}
