// Elements in memory (float, half, bfloat16) as vectors of floats in registers.
//
// TYPE: 0 float, 1 half, 2 bfloat16. A vector has at most 16 bytes.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

template <int TYPE> constexpr int ELEMENT_BYTES = TYPE == 0 ? 4 : 2;

template <int BYTES> struct Raw;
template <> struct Raw<16> { typedef uint4 type; };
template <> struct Raw<8> { typedef uint2 type; };
template <> struct Raw<4> { typedef u32 type; };
template <> struct Raw<2> { typedef u16 type; };

// N elements as they lie in memory.
template <int TYPE, int N> union Vector {
    typename Raw<N * ELEMENT_BYTES<TYPE>>::type raw;
    u32 words[(N * ELEMENT_BYTES<TYPE> + 3) / 4];
    u16 halves[N * ELEMENT_BYTES<TYPE> / 2];

    __device__ static Vector load(const void* base, i64 element) {
        Vector v;
        v.raw = *reinterpret_cast<const decltype(v.raw)*>(static_cast<const char*>(base) + element * ELEMENT_BYTES<TYPE>);
        return v;
    }

    // Read once: not kept in L1, first to leave L2.
    __device__ static Vector load_streaming(const void* base, i64 element) {
        Vector v;
        v.raw = __ldcs(reinterpret_cast<const decltype(v.raw)*>(static_cast<const char*>(base) + element * ELEMENT_BYTES<TYPE>));
        return v;
    }

    __device__ void store(void* base, i64 element) const {
        *reinterpret_cast<decltype(raw)*>(static_cast<char*>(base) + element * ELEMENT_BYTES<TYPE>) = raw;
    }

    // Not read again soon: first to leave L2.
    __device__ void store_streaming(void* base, i64 element) const {
        __stcs(reinterpret_cast<decltype(raw)*>(static_cast<char*>(base) + element * ELEMENT_BYTES<TYPE>), raw);
    }

    __device__ void unpack(float (&out)[N]) const {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if constexpr (TYPE == 0) {
                out[i] = __uint_as_float(words[i]);
            } else if constexpr (TYPE == 1) {
                asm("cvt.f32.f16 %0, %1;" : "=f"(out[i]) : "h"(halves[i]));
            } else {
                out[i] = __uint_as_float(static_cast<u32>(halves[i]) << 16);
            }
        }
    }

    // Rounds to nearest even.
    __device__ static Vector pack(const float (&in)[N]) {
        Vector v;
        if constexpr (TYPE == 0) {
#pragma unroll
            for (int i = 0; i < N; ++i) v.words[i] = __float_as_uint(in[i]);
        } else {
#pragma unroll
            for (int i = 0; i < N; i += 2) {
                const float high = i + 1 < N ? in[i + 1] : 0.0f;
                u32 both;
                if constexpr (TYPE == 1) {
                    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(in[i]));
                } else {
                    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(in[i]));
                }
                if constexpr (N == 1) {
                    v.halves[0] = static_cast<u16>(both);
                } else {
                    v.words[i / 2] = both;
                }
            }
        }
        return v;
    }
};

// Of the kernel before this one in the stream, if this one was launched to overlap it: wait until its writes are seen.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Let the next kernel in the stream, if it was launched to overlap this one, take up what room there is.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
