// K and V of new tokens into pages: optional RMS norm of k, rotation at the stored position, one rounding.
//
// LANES threads take a token and some of its heads, one after another; a warp takes the same heads of several tokens, so
// that it writes neighbouring rows of a page. The rows of blocks after those of the kv heads norm q, or only make it
// contiguous. Configured by rotary.cuh, NORM_K, WITH_Q, NORM_Q (0 or 1), BATCH (heads under way), STREAMING (stores pass
// by L2), FINE (rows of the fine table) and SETTLED (0 or 1: slots and positions are older than what this kernel waits for).
#include "rotary.cuh"

struct Params {
    const void* k;             // [T, Hkv, D]
    const void* v;             // [T, Hkv, D]
    void* pages;               // [pages, 2, Hkv, page_size, D]
    const i64* slots;          // [T], below 2^32; negative: K and V of the row go nowhere
    const i64* positions;      // [T], below 2^31; not read without rotation
    const float* table;        // [FINE + length / FINE rounded up, ROTARY_DIM / 2, 2]: 0, 1, .. and 0, FINE, ..
    const float* k_weight;     // [D]
    const void* q;             // [T, Hq, D]
    void* q_out;               // [T, Hq, D], contiguous
    const float* q_weight;     // [D]
    i64 k_token, k_head;       // strides in elements
    i64 v_token, v_head;
    i64 q_token, q_head;
    int tokens, kv_heads, q_heads;
    u32 page_size;
    int kv_rows;               // how many rows of blocks share the kv heads of a token
    int q_rows;                // and the q heads
    float k_eps, q_eps;
};

constexpr int WARPS = 8;
constexpr int TOKENS_AT_ONCE = 32 / LANES;

__device__ __forceinline__ void put(const Elements& x, void* base, i64 element) {
    if constexpr (STREAMING) {
        x.store_streaming(base, element);
    } else {
        x.store(base, element);
    }
}

struct Norm {
    float weight[ROUNDS][2][VEC];

    __device__ void load(const float* weights, int lane) {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const Unit unit(lane + r * LANES);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                weight[r][0][i] = unit.first >= 0 ? weights[unit.first * VEC + i] : 0.0f;
                weight[r][1][i] = unit.second >= 0 ? weights[unit.second * VEC + i] : 0.0f;
            }
        }
    }

    // x * weight / sqrt(mean(x^2) + eps) of a head that LANES threads hold.
    __device__ void apply(float (&x)[ROUNDS][2][VEC], float eps) const {
        float sum = 0.0f;
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
            for (int s = 0; s < 2; ++s)
#pragma unroll
                for (int i = 0; i < VEC; ++i) sum += x[r][s][i] * x[r][s][i];
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        const float factor = 1.0f / sqrtf(sum / HEAD_DIM + eps);
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
            for (int s = 0; s < 2; ++s)
#pragma unroll
                for (int i = 0; i < VEC; ++i) x[r][s][i] *= factor * weight[r][s][i];
    }
};

struct Head {
    Elements at[ROUNDS][2];

    __device__ void load(const void* base, i64 element, int lane, bool active) {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const Unit unit(lane + r * LANES);
            at[r][0] = at[r][1] = Elements{};
            if (active && unit.first >= 0) at[r][0] = Elements::load_streaming(base, element + unit.first * VEC);
            if (active && unit.second >= 0) at[r][1] = Elements::load_streaming(base, element + unit.second * VEC);
        }
    }

    __device__ void store(void* base, i64 element, int lane, bool active) const {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const Unit unit(lane + r * LANES);
            if (active && unit.first >= 0) put(at[r][0], base, element + unit.first * VEC);
            if (active && unit.second >= 0) put(at[r][1], base, element + unit.second * VEC);
        }
    }

    __device__ void unpack(float (&x)[ROUNDS][2][VEC]) const {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            at[r][0].unpack(x[r][0]);
            at[r][1].unpack(x[r][1]);
        }
    }

    __device__ void pack(const float (&x)[ROUNDS][2][VEC]) {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            at[r][0] = Elements::pack(x[r][0]);
            at[r][1] = Elements::pack(x[r][1]);
        }
    }
};

__device__ void append_kv(const Params& p, int token, bool active, int share, int lane) {
    Head k[BATCH], v[BATCH];
    const int step = p.kv_rows * BATCH;
    auto load = [&](int first) {
#pragma unroll
        for (int n = 0; n < BATCH; ++n) {
            const int head = first + n;
            k[n].load(p.k, token * p.k_token + head * p.k_head, lane, active && head < p.kv_heads);
            v[n].load(p.v, token * p.v_token + head * p.v_head, lane, active && head < p.kv_heads);
        }
    };
    if constexpr (!SETTLED) load(share * BATCH);   // waits for nothing: before the slot and the angles
    const i64 place = active ? p.slots[token] : -1;
    const bool written = place >= 0;
    const u32 slot = written ? static_cast<u32>(place) : 0;
    Angles angles[ROUNDS];
    if constexpr (ROTARY_DIM > 0) {
        // Two short tables stay in the caches where one row per position would be read from memory.
        const u32 position = active ? static_cast<u32>(p.positions[token]) : 0;
        const float* fine = p.table + position % FINE * ROTARY_DIM;
        const float* coarse = p.table + (FINE + position / FINE) * static_cast<i64>(ROTARY_DIM);
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const Unit unit(lane + r * LANES);
            Angles rest;
            angles[r].load(coarse, unit);
            rest.load(fine, unit);
            angles[r].add(rest);
        }
    }
    Norm norm;
    if constexpr (NORM_K) norm.load(p.k_weight, lane);
    if constexpr (SETTLED) {
        wait_for_previous_kernel();
        load(share * BATCH);
    }
    const u32 page = slot / p.page_size, row = slot - page * p.page_size;
    const i64 head_elements = static_cast<i64>(p.page_size) * HEAD_DIM;
    const i64 to_k = static_cast<i64>(page) * 2 * p.kv_heads * head_elements + static_cast<i64>(row) * HEAD_DIM;
    const i64 to_v = to_k + p.kv_heads * head_elements;
    for (int h = share * BATCH; h < p.kv_heads; h += step) {
#pragma unroll
        for (int n = 0; n < BATCH; ++n) {
            const int head = h + n;
            const bool here = written && head < p.kv_heads;
            if constexpr (NORM_K || ROTARY_DIM > 0) {
                float x[ROUNDS][2][VEC];
                k[n].unpack(x);
                if constexpr (NORM_K) norm.apply(x, p.k_eps);
                if constexpr (ROTARY_DIM > 0) {
#pragma unroll
                    for (int r = 0; r < ROUNDS; ++r) angles[r].turn(x[r][0], x[r][1]);
                }
                k[n].pack(x);
            }
            k[n].store(p.pages, to_k + head * head_elements, lane, here);
            v[n].store(p.pages, to_v + head * head_elements, lane, here);
        }
        if (h + step >= p.kv_heads) break;
        load(h + step);
    }
}

__device__ void pass_q(const Params& p, int token, bool active, int share, int lane) {
    Norm norm;
    if constexpr (NORM_Q) norm.load(p.q_weight, lane);
    if constexpr (SETTLED) wait_for_previous_kernel();
    for (int h = share * BATCH; h < p.q_heads; h += p.q_rows * BATCH) {
        Head q[BATCH];
#pragma unroll
        for (int n = 0; n < BATCH; ++n)
            q[n].load(p.q, token * p.q_token + (h + n) * p.q_head, lane, active && h + n < p.q_heads);
#pragma unroll
        for (int n = 0; n < BATCH; ++n) {
            if constexpr (NORM_Q) {
                float x[ROUNDS][2][VEC];
                q[n].unpack(x);
                norm.apply(x, p.q_eps);
                q[n].pack(x);
            }
            q[n].store(p.q_out, (static_cast<i64>(token) * p.q_heads + h + n) * HEAD_DIM, lane, active && h + n < p.q_heads);
        }
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) append(const __grid_constant__ Params p) {
    let_next_kernel_start();
    if constexpr (!SETTLED) wait_for_previous_kernel();
    const int lane = threadIdx.x % LANES;
    const int token = blockIdx.x * (WARPS * TOKENS_AT_ONCE) + threadIdx.x / LANES;
    const bool active = token < p.tokens;
    if (blockIdx.y < p.kv_rows) {
        append_kv(p, token, active, blockIdx.y, lane);
    } else if constexpr (WITH_Q) {
        pass_q(p, token, active, blockIdx.y - p.kv_rows, lane);
    }
}
