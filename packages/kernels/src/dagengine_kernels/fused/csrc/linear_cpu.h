// y = act(norm(x) W + b) + r with W in bfloat16, and what one instruction set brings to it. Knows pointers and integers only.
//
// A packed weight lies in panels of PANEL outputs, one after another; the outputs behind the last are zero:
//
//     panel p     pairs of inputs 0 .. ceil(in / 2) - 1
//     pair k      W[32 p][2k] W[32 p][2k+1]  W[32 p + 1][2k] W[32 p + 1][2k+1]  ...  W[32 p + 31][2k+1]
//
// so that one load brings both inputs of as many outputs as a vector has floats. A gated layer's panels alternate: the
// gate's, then the same outputs of `up`. Every row's sums are taken in the order of the inputs, whatever the number of
// rows, threads or panels: its bits do not depend on what else is in the batch.
#pragma once

#include "attend_cpu.h"

namespace dagengine::cpu {

constexpr int PANEL = 32;

// One layer: its weight and what is done around the product.
struct Linear {
    int in;
    int out;  // of y; a gated layer has 2 * out outputs of W
    bool gated;  // y = silu(x W_gate + b_gate) * (x W_up + b_up)
    const uint16_t* weight;
    const float* bias;  // in the order of the panels, [panels * PANEL], or null
    const float* norm;  // [in] weight of the RMS norm that x goes through first, or null
    float eps;

    int pairs() const { return (in + 1) / 2; }
    int panels() const { return (out + PANEL - 1) / PANEL; }
};

struct LinearCall {
    const Linear* layer;
    int rows;
    const float* x;  // [rows, 2 * pairs], as `prepare` leaves it
    const void* residual;  // [rows, out] in y's dtype, or null
    int64_t residual_row;
    void* y;  // [rows, out], float32 or bfloat16
    int64_t y_row;
    Dtype dtype;
};

struct LinearIsa {
    const char* name;
    // Rows first .. last-1 of x [.., in], float32 or bfloat16, through the norm, as float32 to out [.., 2 * pairs].
    void (*prepare)(const Linear&, const void* x, int64_t x_row, Dtype, int first, int last, float* out);
    // Panels first .. last-1 of y, for rows begin .. end-1.
    void (*panels)(const LinearCall&, int first, int last, int begin, int end);
};

// Null where this build has none for the machine it was built for.
const LinearIsa* linear_avx512();
const LinearIsa* linear_avx2();
const LinearIsa* linear_portable();

}  // namespace dagengine::cpu
