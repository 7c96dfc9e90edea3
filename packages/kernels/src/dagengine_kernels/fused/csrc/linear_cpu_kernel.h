// The product over panels, in vectors of WIDTH floats; each instruction set's file includes it with its own flags.
//
// ROWS rows of x meet one panel: ROWS * PANEL / WIDTH sums stay in registers while the panel streams by.
#pragma once

#include "linear_cpu.h"

#include <cmath>
#include <cstring>

namespace dagengine::cpu {
namespace {

constexpr int WIDTH = DAGENGINE_WIDTH, STRIP = DAGENGINE_STRIP;

typedef float F __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t U __attribute__((vector_size(WIDTH * 4)));
typedef int32_t I __attribute__((vector_size(WIDTH * 4)));
typedef uint16_t H __attribute__((vector_size(WIDTH * 2)));

// The file that includes this says WIDTH, in floats, and STRIP, the rows that meet a panel at once.
struct V {

    template <class To, class From>
    static To bits(From from) {
        To to;
        static_assert(sizeof to == sizeof from, "");
        std::memcpy(&to, &from, sizeof to);
        return to;
    }
    template <class T>
    static T load(const void* p) {
        T value;
        std::memcpy(&value, p, sizeof value);
        return value;
    }
    template <class T>
    static void store(void* p, T value) {
        std::memcpy(p, &value, sizeof value);
    }
    static F widen(H half) { return bits<F>(__builtin_convertvector(half, U) << 16); }

    static H narrow(F value) {
        U wide = bits<U>(value);
        U rounded = (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16;
        U nan = (wide >> 16) | 0x40u;
        U is_nan = bits<U>(value != value);
        return __builtin_convertvector((rounded & ~is_nan) | (nan & is_nan), H);
    }

    // e^x to 2e-7, for any x: its ends are those of the floats.
    static F exp(F x) {
        F high = x * 0.0f + 88.0f, low = x * 0.0f - 87.0f;
        x = x > high ? high : x;
        x = x < low ? low : x;
        F scaled = x * 1.44269504f;
        F shifted = scaled + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the nearest whole number
        F whole = shifted - 12582912.0f;
        F f = x - whole * 0.693359375f;
        f = f + whole * 2.12194440e-4f;
        F y = f * 1.98756915e-4f + 1.39819995e-3f;
        y = y * f + 8.33345194e-3f;
        y = y * f + 4.16657962e-2f;
        y = y * f + 1.66666655e-1f;
        y = y * f + 5.00000012e-1f;
        y = y * f * f + f + 1.0f;
        return y * bits<F>((bits<I>(shifted) << 23) + (127 << 23));
    }
};

void prepare(const Linear& layer, const void* x, int64_t x_row, Dtype dtype, int first, int last, float* out) {
    const int in = layer.in, padded = 2 * layer.pairs();
    for (int row = first; row < last; row++) {
        float* to = out + int64_t(row) * padded;
        if (dtype == Dtype::bf16) {
            const uint16_t* from = static_cast<const uint16_t*>(x) + row * x_row;
            int i = 0;
            for (; i + WIDTH <= in; i += WIDTH) V::store(to + i, V::widen(V::load<H>(from + i)));
            for (; i < in; i++) to[i] = from_bf16(from[i]);
        } else {
            std::memcpy(to, static_cast<const float*>(x) + row * x_row, size_t(in) * 4);
        }
        if (padded > in) to[in] = 0.0f;
        if (!layer.norm) continue;
        F squares = {};
        float rest = 0.0f;
        int i = 0;
        for (; i + WIDTH <= in; i += WIDTH) {
            F value = V::load<F>(to + i);
            squares += value * value;
        }
        for (; i < in; i++) rest += to[i] * to[i];
        for (int lane = 0; lane < WIDTH; lane++) rest += squares[lane];
        const float scale = 1.0f / std::sqrt(rest / float(in) + layer.eps);
        for (i = 0; i + WIDTH <= in; i += WIDTH)
            V::store(to + i, V::load<F>(to + i) * scale * V::load<F>(layer.norm + i));
        for (; i < in; i++) to[i] = to[i] * scale * layer.norm[i];
    }
}

// sums [ROWS, PANEL] of one panel; `ahead` asks for memory that comes after what is read.
template <int ROWS, bool AHEAD>
void product(const uint16_t* weight, const float* x, int pairs, const float* bias, float* sums) {
    constexpr int N = PANEL / WIDTH;
    F acc[ROWS][N];
    for (int m = 0; m < ROWS; m++)
        for (int n = 0; n < N; n++) acc[m][n] = bias ? V::load<F>(bias + n * WIDTH) : F{};
    const int64_t row = 2 * int64_t(pairs);
    for (int k = 0; k < pairs; k++, weight += 2 * PANEL, x += 2) {
        if (AHEAD) {
            __builtin_prefetch(weight + 1024);
            __builtin_prefetch(weight + 1024 + PANEL);
        }
        F first[N], second[N];
        for (int n = 0; n < N; n++) {
            U both = V::load<U>(weight + n * 2 * WIDTH);
            first[n] = V::bits<F>(both << 16);
            second[n] = V::bits<F>(both & 0xffff0000u);
        }
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++) {
            const float a = x[m * row], b = x[m * row + 1];
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) acc[m][n] += first[n] * a;
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) acc[m][n] += second[n] * b;
        }
    }
    for (int m = 0; m < ROWS; m++)
        for (int n = 0; n < N; n++) V::store(sums + m * PANEL + n * WIDTH, acc[m][n]);
}

template <int ROWS>
void products(const uint16_t* weight, const float* x, int pairs, const float* bias, bool ahead, int rows, float* sums) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return products<ROWS - 1>(weight, x, pairs, bias, ahead, rows, sums);
    }
    if (ahead)
        product<ROWS, true>(weight, x, pairs, bias, sums);
    else
        product<ROWS, false>(weight, x, pairs, bias, sums);
}

// The sums of `rows` rows of a panel, through the gate, with the residual, to y.
void finish(const LinearCall& call, int panel, int begin, int rows, float* sums, const float* up) {
    const int first = panel * PANEL, count = call.layer->out - first < PANEL ? call.layer->out - first : PANEL;
    const bool narrow = call.dtype == Dtype::bf16;
    for (int m = 0; m < rows; m++, sums += PANEL, up += up ? PANEL : 0) {
        if (up)
            for (int i = 0; i < PANEL; i += WIDTH) {
                F gate = V::load<F>(sums + i);
                V::store(sums + i, gate / (V::exp(-gate) + 1.0f) * V::load<F>(up + i));
            }
        const int64_t at = (begin + m) * call.y_row + first, from = (begin + m) * call.residual_row + first;
        if (count == PANEL && narrow) {
            const uint16_t* residual = static_cast<const uint16_t*>(call.residual);
            uint16_t* y = static_cast<uint16_t*>(call.y);
            for (int i = 0; i < PANEL; i += WIDTH) {
                F value = V::load<F>(sums + i);
                if (residual) value += V::widen(V::load<H>(residual + from + i));
                V::store(y + at + i, V::narrow(value));
            }
            continue;
        }
        for (int i = 0; i < count; i++) {
            float value = sums[i];
            if (call.residual)
                value += narrow ? from_bf16(static_cast<const uint16_t*>(call.residual)[from + i])
                                : static_cast<const float*>(call.residual)[from + i];
            if (narrow)
                static_cast<uint16_t*>(call.y)[at + i] = to_bf16(value);
            else
                static_cast<float*>(call.y)[at + i] = value;
        }
    }
}

void panels(const LinearCall& call, int first, int last, int begin, int end) {
    const Linear& layer = *call.layer;
    const int pairs = layer.pairs(), parts = layer.gated ? 2 : 1;
    const int64_t size = int64_t(pairs) * 2 * PANEL;
    for (int panel = first; panel < last; panel++) {
        for (int row = begin; row < end; row += STRIP) {
            const int rows = end - row < STRIP ? end - row : STRIP;
            alignas(64) float sums[2][STRIP * PANEL];
            for (int part = 0; part < parts; part++) {
                const int64_t at = int64_t(panel) * parts + part;
                products<STRIP>(layer.weight + at * size, call.x + int64_t(row) * 2 * pairs, pairs,
                                      layer.bias ? layer.bias + at * PANEL : nullptr, row == begin, rows, sums[part]);
            }
            finish(call, panel, row, rows, sums[0], layer.gated ? sums[1] : nullptr);
        }
    }
}

}  // namespace
}  // namespace dagengine::cpu
