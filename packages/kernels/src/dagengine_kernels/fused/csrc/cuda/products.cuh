// What the kernels of linear layers share, so that a row's bits do not depend on which of them computes it: the products'
// operands and order, and what comes after the sums (rms.cuh: a norm before them). DTYPE: 1 half, 2 bfloat16; the products
// also have OUT_TYPE (0 float, 1 half, 2 bfloat16) and GATED.
//
// Steps of 64 inputs; a weight's rows have a whole number of them. Lane 4 g + t of a warp holds, of weight row g (and
// g + 8) and of row g of x, the 16 bytes at 16 t of each half step, in the order of memory:
//
//   inputs of a half step   0 .. 7    8 .. 15   16 .. 23  24 .. 31
//   lanes                   t = 0     t = 1     t = 2     t = 3
//   first product           words 0 and 1 of each lane;   second product: words 2 and 3
//
// The inputs are summed in SEGMENTS parts, steps s, s + SEGMENTS, .. in part s (one float32 accumulator each, steps in
// order), whose sums are added in order.
#pragma once
#include "rms.cuh"

constexpr int STEP = 64;           // inputs
constexpr int STEP_BYTES = 2 * STEP;
constexpr int SEGMENTS = 8;

// d[16 weights, 8 rows of x] += a[16, 16] b[16, 8]
__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#define PRODUCT(OPERANDS)                                                                                   \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." OPERANDS ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, " \
                 "{%8, %9}, {%0, %1, %2, %3};"                                                              \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                           \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
    if constexpr (DTYPE == 1) {
        PRODUCT("f16.f16");
    } else {
        PRODUCT("bf16.bf16");
    }
#undef PRODUCT
}

// The two products of a half step: weight rows g and g + 8, row g of x.
__device__ __forceinline__ void half_step(float (&d)[4], const uint4& low, const uint4& high, const uint4& x) {
    multiply(d, low.x, high.x, low.y, high.y, x.x, x.y);
    multiply(d, low.z, high.z, low.w, high.w, x.z, x.w);
}

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void copy_async(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LATER> __device__ __forceinline__ void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

__device__ __forceinline__ float silu_times(float gate, float up) {
    return __fmul_rn(__fdiv_rn(gate, __fadd_rn(1.0f, expf(-gate))), up);
}

// A layer as its kernels take it.
struct Params {
    const void* x;            // [rows, inputs], rows 16-byte aligned, zeros up to a multiple of 8
    const void* weight;       // [outputs, steps * 64]; gated [2 * outputs, steps * 64], the gate's rows first
    const float* norm;        // [inputs], 16-byte aligned, readable up to a multiple of 8
    const float* bias;        // [outputs] or [2 * outputs], or null
    const void* residual;     // [rows, outputs] of OUT_TYPE, or null
    void* y;                  // [rows, outputs], contiguous
    i64 x_row, residual_row;  // in elements
    int rows, inputs, steps, outputs, tiles;
    int rounds;               // of gemv.cu: tiles per block
    float eps;
};

// Where a row of the weight begins. Rows past the end are read in place of it, multiplied and not stored.
__device__ __forceinline__ const char* weight_row(const Params& p, int output, bool up) {
    const int row = min(output, p.outputs - 1) + (up ? p.outputs : 0);
    return static_cast<const char*>(p.weight) + static_cast<i64>(row) * p.steps * STEP_BYTES;
}

// What is added to the sums of an output: its bias, and the residual.
template <int PARTS> struct Addends {
    float bias[PARTS] = {}, residual = 0.0f;
};

template <int PARTS> __device__ __forceinline__ Addends<PARTS> addends_of(const Params& p, int row, int output) {
    Addends<PARTS> found;
    if (p.bias) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) found.bias[part] = p.bias[part * p.outputs + output];
    }
    if (p.residual) {
        float before[1];
        load_fresh<OUT_TYPE, 1>(p.residual, row * p.residual_row + output).unpack(before);
        found.residual = before[0];
    }
    return found;
}

// The sums of an output (gate and up, or one) to y.
template <int PARTS>
__device__ __forceinline__ void finish(const Params& p, float (&sum)[PARTS], const Addends<PARTS>& addends, int row, int output) {
    if (p.bias) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) sum[part] = __fadd_rn(sum[part], addends.bias[part]);
    }
    float result[1] = {sum[0]};
    if constexpr (PARTS == 2) result[0] = silu_times(sum[0], sum[1]);
    if (p.residual) result[0] = __fadd_rn(result[0], addends.residual);
    Vector<OUT_TYPE, 1>::pack(result).store(p.y, static_cast<i64>(row) * p.outputs + output);
}
template <int PARTS> __device__ __forceinline__ void finish(const Params& p, float (&sum)[PARTS], int row, int output) {
    finish(p, sum, addends_of<PARTS>(p, row, output), row, output);
}
