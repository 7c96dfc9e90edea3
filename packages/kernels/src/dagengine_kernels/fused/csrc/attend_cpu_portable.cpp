// The walk in vectors of four that GCC and Clang turn into whatever the machine has (SSE2, NEON, ..).
#include "attend_cpu.h"

namespace dagengine::cpu {
namespace {

struct Simd {
    typedef float F __attribute__((vector_size(16)));
    typedef int32_t I __attribute__((vector_size(16)));
    static constexpr int W = 4;
    static constexpr int vectors = 2;
    static constexpr int dot_rows = 3;
    static constexpr int dot_keys(int rows) { return rows == 1 ? 8 : 4; }

    static F zero() { return F{}; }
    static F set(float x) { return F{x, x, x, x}; }
    static F load(const float* p) {
        F x;
        __builtin_memcpy(&x, p, sizeof x);
        return x;
    }
    static F load_bf16(const uint16_t* p) {
        return F{from_bf16(p[0]), from_bf16(p[1]), from_bf16(p[2]), from_bf16(p[3])};
    }
    static F load_even_bf16(const uint16_t* p) { return words(p, true); }
    static F load_odd_bf16(const uint16_t* p) { return words(p, false); }
    static F load_f16(const uint16_t* p) {
        return F{from_f16(p[0]), from_f16(p[1]), from_f16(p[2]), from_f16(p[3])};
    }
    static void store(float* p, F x) { __builtin_memcpy(p, &x, sizeof x); }
    static F fma(F a, F b, F c) { return a * b + c; }
    static F mul(F a, F b) { return a * b; }
    static F add(F a, F b) { return a + b; }
    static F sub(F a, F b) { return a - b; }
    static F div(F a, F b) { return a / b; }
    static F max(F a, F b) { return select(a > b, a, b); }
    static F abs(F a) { return F(I(a) & 0x7fffffff); }
    static F copy_sign(F size, F sign) { return F(I(size) | (I(sign) & I(set(-0.0f)))); }
    static F select_less(F a, F b, F yes, F no) { return select(a < b, yes, no); }
    static float first(F a) { return a[0]; }
    static float reduce_max(F a) {
        float x = a[0] > a[1] ? a[0] : a[1], y = a[2] > a[3] ? a[2] : a[3];
        return x > y ? x : y;
    }

    // 2^x for x <= 0, to 1e-7; 0 below 2^-126.
    static F exp2(F x) {
        F kept = max(x, set(-126.0f));
        F shifted = kept + 12582912.0f;  // 1.5 * 2^23: its last bits are the nearest whole number
        F f = kept - (shifted - 12582912.0f);
        F y = f * 1.32764713e-3f + 9.67554189e-3f;
        y = y * f + 5.55071309e-2f;
        y = y * f + 2.40221202e-1f;
        y = y * f + 6.93146944e-1f;
        y = y * f + 1.0f;
        I power = (I(shifted) - 0x4b400000 + 127) << 23;
        return select(x < set(-126.0f), zero(), y * F(power));
    }

    // The sums of K vectors, next to each other.
    template <int K>
    static void reduce(const F* a, float* to) {
        for (int i = 0; i < K; i++) to[i] = (a[i][0] + a[i][1]) + (a[i][2] + a[i][3]);
    }

    static void transpose(F* r) {
        F t[4] = {r[0], r[1], r[2], r[3]};
        for (int i = 0; i < 4; i++) r[i] = F{t[0][i], t[1][i], t[2][i], t[3][i]};
    }

private:
    static F words(const uint16_t* p, bool even) {
        I x;
        __builtin_memcpy(&x, p, sizeof x);
        constexpr bool first_is_low = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;
        return even == first_is_low ? F(x << 16) : F(x & -65536);
    }
    static F select(I where, F yes, F no) { return F((I(yes) & where) | (I(no) & ~where)); }
};

}  // namespace
}  // namespace dagengine::cpu

#include "attend_cpu_kernel.h"

namespace dagengine::cpu {

const Isa* isa_portable() {
    static constexpr Isa isa{"portable", scratch_bytes, run_work};
    return &isa;
}

}  // namespace dagengine::cpu
