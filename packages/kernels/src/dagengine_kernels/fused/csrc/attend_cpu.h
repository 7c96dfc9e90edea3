// What the CPU attention is asked for, and what one instruction set brings to it. Knows pointers and integers only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dagengine::cpu {

enum class Dtype : int { f32 = 0, bf16 = 1, f16 = 2 };

// One launch of a plan: the query tiles of one height (PlanClass in plan.py).
struct Class {
    const int32_t* tile_rows;  // [tiles, slots]
    const int32_t* works;      // [W, 5]
    const int32_t* work_indptr;
    int slots;
    int workers;
};

// Everything that a work reads. The arrays are those of PlanArrays.
struct Call {
    const int32_t* entries;
    const int32_t* runs;
    const int32_t* deltas;
    const int64_t* q_positions;  // [T]
    int boxes;
    int page_size;
    int head_dim;
    int group;
    int num_kv_heads;
    int max_slots;
    int64_t window;  // 0: none
    bool invariant;  // a row's bits are those of the row alone
    float scale;
    float softcap;  // 0: none

    const float* cos;  // [length, half], null: no rotation
    const float* sin;
    int64_t rotary_length;
    int half;
    bool interleaved;

    const void* q;  // [T, Hq, D], strides in elements, the last one 1
    int64_t q_row, q_head;
    Dtype q_dtype;
    const void* kv;  // [pages, 2, Hkv, page_size, D]
    Dtype kv_dtype;
    const float* sinks;  // [Hq], base e, or null
    void* out;           // [T, Hq, D] in q's dtype
    float* lse2;         // [T, Hq] or null
    float* o_part;       // [parts, G, D]
    float* lse2_part;    // [parts, G]
};

struct Isa {
    const char* name;
    size_t (*scratch_bytes)(const Call&);
    // One row of `works`; `scratch` is 64-byte aligned and the caller's alone.
    void (*work)(const Call&, const Class&, const int32_t* work, void* scratch);
};

// Null where this build has none for the machine it was built for.
const Isa* isa_avx512();
const Isa* isa_avx2();
const Isa* isa_portable();

static inline float from_bf16(uint16_t bits) {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    __builtin_memcpy(&value, &wide, 4);
    return value;
}

static inline uint16_t to_bf16(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40u);
    return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float from_f16(uint16_t bits) {
    uint32_t sign = uint32_t(bits & 0x8000u) << 16, rest = bits & 0x7fffu;
    uint32_t wide;
    if (rest >= 0x7c00u) {
        wide = sign | 0x7f800000u | ((rest & 0x3ffu) << 13);
    } else if (rest >= 0x400u) {
        wide = sign | ((rest << 13) + 0x38000000u);
    } else {
        float tiny = float(rest) * 5.9604644775390625e-8f;  // 2^-24
        __builtin_memcpy(&wide, &tiny, 4);
        wide |= sign;
    }
    float value;
    __builtin_memcpy(&value, &wide, 4);
    return value;
}

static inline uint16_t to_f16(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
    uint32_t rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return uint16_t(sign | 0x7e00u);
    if (rest >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
    if (rest < 0x38800000u) {  // subnormal: a multiple of 2^-24, rounded to even by the float unit
        float magnitude;
        __builtin_memcpy(&magnitude, &rest, 4);
        float shifted = magnitude + 0.5f;
        uint32_t mantissa;
        __builtin_memcpy(&mantissa, &shifted, 4);
        return uint16_t(sign | (mantissa - 0x3f000000u));
    }
    uint32_t odd = (rest >> 13) & 1u;
    return uint16_t(sign | ((rest - 0x38000000u + 0xfffu + odd) >> 13));
}

static inline void load_row(const void* base, int64_t index, Dtype dtype, float* row, int n, float factor) {
    if (dtype == Dtype::f32) {
        const float* from = static_cast<const float*>(base) + index;
        for (int i = 0; i < n; i++) row[i] = from[i] * factor;
        return;
    }
    const uint16_t* from = static_cast<const uint16_t*>(base) + index;
    if (dtype == Dtype::bf16) {
        for (int i = 0; i < n; i++) row[i] = from_bf16(from[i]) * factor;
    } else {
        for (int i = 0; i < n; i++) row[i] = from_f16(from[i]) * factor;
    }
}

static inline void store_row(void* base, int64_t index, Dtype dtype, const float* row, int n, float factor) {
    if (dtype == Dtype::f32) {
        float* out = static_cast<float*>(base) + index;
        for (int i = 0; i < n; i++) out[i] = row[i] * factor;
        return;
    }
    uint16_t* out = static_cast<uint16_t*>(base) + index;
    if (dtype == Dtype::bf16) {
        for (int i = 0; i < n; i++) out[i] = to_bf16(row[i] * factor);
    } else {
        for (int i = 0; i < n; i++) out[i] = to_f16(row[i] * factor);
    }
}

// Lets a sink (a logit, base e) take its share: returns the factor on out and raises lse2.
static inline float with_sink(float sink, float* lse2) {
    float sink2 = sink * 1.4426950408889634f;
    float top = *lse2 > sink2 ? *lse2 : sink2;
    if (top == -__builtin_inff()) return 0.0f;  // nothing seen, and a sink of -inf
    float share = __builtin_exp2f(*lse2 - top), total = share + __builtin_exp2f(sink2 - top);
    *lse2 = top + __builtin_log2f(total);
    return share / total;
}

}  // namespace dagengine::cpu
