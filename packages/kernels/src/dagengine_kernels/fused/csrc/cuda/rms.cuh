// The RMS norm of rows of half (DTYPE 1) or bfloat16 (2), in one order of additions wherever it is computed: thread i of 256
// adds up the 16-byte vectors i, i + 256, .. of a row, then the lanes of a warp are added, then the warps in order.
#pragma once
#include "vectors.cuh"

constexpr int NORM_THREADS = 256;
constexpr int NORM_WARPS = NORM_THREADS / 32;

typedef Vector<DTYPE, 8> Inputs;

// What an earlier kernel may still have been writing when this one started: not from L1.
template <int KIND, int N> __device__ __forceinline__ Vector<KIND, N> load_fresh(const void* base, i64 element) {
    typedef decltype(Vector<KIND, N>::raw) Raw;
    Vector<KIND, N> v;
    v.raw = __ldcg(reinterpret_cast<const Raw*>(static_cast<const char*>(base) + element * ELEMENT_BYTES<KIND>));
    return v;
}

__device__ __forceinline__ float add_squares(float sum, const Inputs& v) {
    float x[8];
    v.unpack(x);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = __fmaf_rn(x[i], x[i], sum);
    return sum;
}

__device__ __forceinline__ float add_lanes(float sum) {
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, apart));
    return sum;
}

// 1 / sqrt(mean + eps) of the sums of `count` warps, in order.
__device__ __forceinline__ float norm_scale(const float* sums, int count, int inputs, float eps) {
    float sum = 0.0f;
    for (int i = 0; i < count; ++i) sum = __fadd_rn(sum, sums[i]);
    return __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(sum, static_cast<float>(inputs)), eps)));
}

// 8 of the norm's weights, 16-byte aligned.
struct NormWeights {
    float w[8] = {};

    __device__ void load(const float* from) {
        const float4 a = *reinterpret_cast<const float4*>(from), b = *reinterpret_cast<const float4*>(from + 4);
        w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w, w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
    }
};

// x * scale * weight, rounded once.
__device__ __forceinline__ Inputs normed(const Inputs& v, float scale, const NormWeights& weight) {
    float x[8];
    v.unpack(x);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = __fmul_rn(__fmul_rn(x[i], scale), weight.w[i]);
    return Inputs::pack(x);
}
