// The walk in AVX2 with FMA and F16C.
#include "attend_cpu.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>

namespace dagengine::cpu {
namespace {

struct Simd {
    using F = __m256;
    static constexpr int W = 8;
    static constexpr int vectors = 2;
    static constexpr int dot_rows = 3;
    static constexpr int dot_keys(int rows) { return rows == 1 ? 8 : 4; }

    static F zero() { return _mm256_setzero_ps(); }
    static F set(float x) { return _mm256_set1_ps(x); }
    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static F load_bf16(const uint16_t* p) {
        __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }
    static F load_even_bf16(const uint16_t* p) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), 16));
    }
    static F load_odd_bf16(const uint16_t* p) {
        __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(-65536)));
    }
    static F load_f16(const uint16_t* p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    static F div(F a, F b) { return _mm256_div_ps(a, b); }
    static F max(F a, F b) { return _mm256_max_ps(a, b); }
    static F abs(F a) { return _mm256_andnot_ps(set(-0.0f), a); }
    static F copy_sign(F size, F sign) { return _mm256_or_ps(size, _mm256_and_ps(sign, set(-0.0f))); }
    static F select_less(F a, F b, F yes, F no) {
        return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
    }
    static float first(F a) { return _mm256_cvtss_f32(a); }
    static float reduce_max(F a) {
        __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        x = _mm_max_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
    }

    // 2^x for x <= 0, to 1e-7; 0 below 2^-126.
    static F exp2(F x) {
        F kept = _mm256_max_ps(set(-126.0f), x);
        F whole = _mm256_round_ps(kept, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        F f = sub(kept, whole);
        F y = set(1.32764713e-3f);
        y = fma(y, f, set(9.67554189e-3f));
        y = fma(y, f, set(5.55071309e-2f));
        y = fma(y, f, set(2.40221202e-1f));
        y = fma(y, f, set(6.93146944e-1f));
        y = fma(y, f, set(1.0f));
        __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
        return _mm256_and_ps(mul(y, _mm256_castsi256_ps(power)), _mm256_cmp_ps(x, set(-126.0f), _CMP_NLT_UQ));
    }

    // The sums of K vectors, next to each other.
    template <int K>
    static void reduce(const F* a, float* to) {
        for (int i = 0; i < K; i += 4) {
            F x = _mm256_hadd_ps(_mm256_hadd_ps(a[i], a[i + 1]), _mm256_hadd_ps(a[i + 2], a[i + 3]));
            _mm_storeu_ps(to + i, _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
        }
    }

    static void transpose(F* r) {
        F t[8], u[8];
        for (int i = 0; i < 8; i += 2) {
            t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
            t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
        }
        for (int i = 0; i < 8; i += 4) {
            u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
            u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
            u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
            u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
        }
        for (int i = 0; i < 4; i++) {
            r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
            r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
        }
    }
};

}  // namespace
}  // namespace dagengine::cpu

#include "attend_cpu_kernel.h"

namespace dagengine::cpu {

const Isa* isa_avx2() {
    static constexpr Isa isa{"avx2", scratch_bytes, run_work};
    return &isa;
}

}  // namespace dagengine::cpu

#else

namespace dagengine::cpu {
const Isa* isa_avx2() { return nullptr; }
}  // namespace dagengine::cpu

#endif
