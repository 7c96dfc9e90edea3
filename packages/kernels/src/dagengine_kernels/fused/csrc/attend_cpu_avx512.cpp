// The walk in AVX-512 (F, BW, VL, DQ).
#include "attend_cpu.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)

#ifdef __GNUC__
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC's own header starts results from undefined vectors
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

namespace dagengine::cpu {
namespace {

struct Simd {
    using F = __m512;
    static constexpr int W = 16;
    static constexpr int vectors = 4;
    static constexpr int dot_rows = 6;
    static constexpr int dot_keys(int rows) { return rows == 1 ? 16 : rows <= 3 ? 8 : 4; }

    static F zero() { return _mm512_setzero_ps(); }
    static F set(float x) { return _mm512_set1_ps(x); }
    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static F load_bf16(const uint16_t* p) {
        __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
    static F load_even_bf16(const uint16_t* p) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
    }
    static F load_odd_bf16(const uint16_t* p) {
        return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(-65536)));
    }
    static F load_f16(const uint16_t* p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F div(F a, F b) { return _mm512_div_ps(a, b); }
    static F max(F a, F b) { return _mm512_max_ps(a, b); }
    static F abs(F a) { return _mm512_abs_ps(a); }
    static F copy_sign(F size, F sign) { return _mm512_or_ps(size, _mm512_and_ps(sign, set(-0.0f))); }
    static F select_less(F a, F b, F yes, F no) {
        return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
    }
    static float first(F a) { return _mm512_cvtss_f32(a); }
    static float reduce_max(F a) { return _mm512_reduce_max_ps(a); }

    // 2^x for x <= 0, to 1e-7; 0 below 2^-126.
    static F exp2(F x) {
        F whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        F f = sub(x, whole);
        F y = set(1.32764713e-3f);
        y = fma(y, f, set(9.67554189e-3f));
        y = fma(y, f, set(5.55071309e-2f));
        y = fma(y, f, set(2.40221202e-1f));
        y = fma(y, f, set(6.93146944e-1f));
        y = fma(y, f, set(1.0f));
        return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, set(-126.0f), _CMP_NLT_UQ), y, whole);
    }

    // The sums of K vectors, next to each other.
    template <int K>
    static void reduce(const F* a, float* to) {
        if constexpr (K == 4) {
            F x = quarter(a);
            __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
            _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1)));
        } else if constexpr (K == 8) {
            F x = half(quarter(a), quarter(a + 4));
            x = half(x, x);
            _mm256_storeu_ps(to, _mm512_castps512_ps256(x));
        } else {
            static_assert(K == 16);
            F x = half(quarter(a), quarter(a + 4)), y = half(quarter(a + 8), quarter(a + 12));
            store(to, half(x, y));
        }
    }

    static void transpose(F* r) {
        F t[16], u[16];
        for (int i = 0; i < 16; i += 2) {
            t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
            t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
        }
        for (int i = 0; i < 16; i += 4) {
            u[i] = low_pairs(t[i], t[i + 2]);
            u[i + 1] = high_pairs(t[i], t[i + 2]);
            u[i + 2] = low_pairs(t[i + 1], t[i + 3]);
            u[i + 3] = high_pairs(t[i + 1], t[i + 3]);
        }
        for (int i = 0; i < 4; i++) {
            t[i] = _mm512_shuffle_f32x4(u[i], u[i + 4], 0x88);
            t[i + 4] = _mm512_shuffle_f32x4(u[i], u[i + 4], 0xdd);
            t[i + 8] = _mm512_shuffle_f32x4(u[i + 8], u[i + 12], 0x88);
            t[i + 12] = _mm512_shuffle_f32x4(u[i + 8], u[i + 12], 0xdd);
        }
        for (int i = 0; i < 8; i++) {
            r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
            r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
        }
    }

private:
    static F low_pairs(F a, F b) {
        return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
    }
    static F high_pairs(F a, F b) {
        return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
    }
    // Each 128-bit lane: what that lane adds to the sums of four vectors.
    static F quarter(const F* a) {
        F x = add(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
        F y = add(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
        return add(low_pairs(x, y), high_pairs(x, y));
    }
    // Lanes a0+a1, a2+a3, b0+b1, b2+b3.
    static F half(F a, F b) {
        return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
};

}  // namespace
}  // namespace dagengine::cpu

#include "attend_cpu_kernel.h"

namespace dagengine::cpu {

const Isa* isa_avx512() {
    static constexpr Isa isa{"avx512", scratch_bytes, run_work};
    return &isa;
}

}  // namespace dagengine::cpu

#else

namespace dagengine::cpu {
const Isa* isa_avx512() { return nullptr; }
}  // namespace dagengine::cpu

#endif
