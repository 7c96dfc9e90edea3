// silu(gate) * up of rows that hold the gate, then up (Shazeer, 2020): a thread takes PER vectors of VEC elements.
//
// Configured by DTYPE (0 float, 1 half, 2 bfloat16), VEC and PER.
#include "vectors.cuh"

struct Params {
    const void* x;        // [rows, 2 * outputs], contiguous
    void* y;              // [rows, outputs], contiguous
    i64 vectors;          // of y
    int outputs;          // a multiple of VEC
};

constexpr int THREADS = 256;

typedef Vector<DTYPE, VEC> Elements;

extern "C" __global__ void __launch_bounds__(THREADS) silu_mul(const __grid_constant__ Params p) {
    let_next_kernel_start();
    const i64 first = static_cast<i64>(blockIdx.x) * THREADS * PER + threadIdx.x;
    const u32 per_row = p.outputs / VEC;
    wait_for_previous_kernel();
    Elements gate[PER], up[PER];
#pragma unroll
    for (int i = 0; i < PER; ++i) {
        const i64 v = first + i * THREADS;
        if (v < p.vectors) {
            const i64 at = (v + v / per_row * per_row) * VEC;
            gate[i] = Elements::load_streaming(p.x, at);
            up[i] = Elements::load_streaming(p.x, at + p.outputs);
        }
    }
#pragma unroll
    for (int i = 0; i < PER; ++i) {
        const i64 v = first + i * THREADS;
        float a[VEC], b[VEC];
        gate[i].unpack(a);
        up[i].unpack(b);
#pragma unroll
        for (int j = 0; j < VEC; ++j) a[j] = __fmul_rn(__fdividef(a[j], 1.0f + __expf(-a[j])), b[j]);
        if (v < p.vectors) Elements::pack(a).store(p.y, v * VEC);
    }
}
