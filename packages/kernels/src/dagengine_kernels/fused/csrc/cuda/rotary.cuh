// Rotations of a head's elements by table rows, two vectors per thread.
//
// Configured by DTYPE (vectors.cuh), HEAD_DIM, ROTARY_DIM (0: no rotation), INTERLEAVED (pairing), VEC (elements per
// vector; divides HEAD_DIM and the parts of a head that `unit` names) and LANES (threads per head, a power of two).
//
//   half, ROTARY_DIM < HEAD_DIM:   |--- x of pairs ---|--- y of pairs ---|-- kept, first --|-- kept, second --|
//                             unit   0   1   2  (first)   0   1   2 (second)   3  4  (first)     3  4  (second)
//   interleaved, or no rotation:   |-------------- first vectors ---------------|------ second vectors -------|
//
// A table row is float32 [ROTARY_DIM / 2, 2]: cos and sin of every pair.
#pragma once
#include "vectors.cuh"

constexpr int VECTORS = HEAD_DIM / VEC;
constexpr bool HALF_PAIRS = ROTARY_DIM > 0 && !INTERLEAVED;
constexpr int PAIR_UNITS = HALF_PAIRS ? ROTARY_DIM / 2 / VEC : 0;
constexpr int KEPT_UNITS = (VECTORS - 2 * PAIR_UNITS + 1) / 2;
constexpr int UNITS = PAIR_UNITS + KEPT_UNITS;
constexpr int ROUNDS = (UNITS + LANES - 1) / LANES;

typedef Vector<DTYPE, VEC> Elements;

// The two vectors that one thread handles together; `second` is -1 where there is only one.
struct Unit {
    int first, second;

    __device__ explicit Unit(int unit) {
        first = unit < PAIR_UNITS ? unit : unit + PAIR_UNITS;
        second = unit < PAIR_UNITS ? unit + PAIR_UNITS : first + KEPT_UNITS;
        if (second >= VECTORS) second = -1;
        if (unit >= UNITS) first = second = -1;
    }
};

// cos and sin for one unit.
struct Angles {
    // half: of VEC pairs; interleaved: of VEC / 2 pairs of either vector.
    float cos[VEC], sin[VEC];
    bool turns_first, turns_second;

    __device__ void load(const float* row, const Unit& unit) {
        turns_first = turns_second = false;
        if constexpr (HALF_PAIRS) {
            turns_first = unit.first >= 0 && unit.first < PAIR_UNITS;
            if (turns_first) read<VEC, 0>(row + unit.first * VEC * 2);
        } else if constexpr (ROTARY_DIM > 0) {
            turns_first = unit.first >= 0 && unit.first * VEC < ROTARY_DIM;
            turns_second = unit.second >= 0 && unit.second * VEC < ROTARY_DIM;
            if (turns_first) read<VEC / 2, 0>(row + unit.first * VEC);
            if (turns_second) read<VEC / 2, VEC / 2>(row + unit.second * VEC);
        }
    }

    // The angles of both together.
    __device__ void add(const Angles& other) {
        if constexpr (ROTARY_DIM > 0) {
            if (!turns_first && !turns_second) return;
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                const float c = cos[i], s = sin[i];
                cos[i] = c * other.cos[i] - s * other.sin[i];
                sin[i] = s * other.cos[i] + c * other.sin[i];
            }
        }
    }

    __device__ void turn(float (&first)[VEC], float (&second)[VEC]) const {
        if constexpr (HALF_PAIRS) {
            if (!turns_first) return;
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                const float x = first[i], y = second[i];
                first[i] = x * cos[i] - y * sin[i];
                second[i] = y * cos[i] + x * sin[i];
            }
        } else if constexpr (ROTARY_DIM > 0) {
            if (turns_first) turn_neighbours<0>(first);
            if (turns_second) turn_neighbours<VEC / 2>(second);
        }
    }

private:
    template <int PAIRS, int AT> __device__ void read(const float* pairs) {
        if constexpr (PAIRS % 2 == 0) {
#pragma unroll
            for (int i = 0; i < PAIRS; i += 2) {
                const float4 two = *reinterpret_cast<const float4*>(pairs + 2 * i);
                cos[AT + i] = two.x;
                sin[AT + i] = two.y;
                cos[AT + i + 1] = two.z;
                sin[AT + i + 1] = two.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                const float2 one = *reinterpret_cast<const float2*>(pairs + 2 * i);
                cos[AT + i] = one.x;
                sin[AT + i] = one.y;
            }
        }
    }

    template <int AT> __device__ void turn_neighbours(float (&v)[VEC]) const {
#pragma unroll
        for (int i = 0; i + 1 < VEC; i += 2) {
            const float x = v[i], y = v[i + 1];
            v[i] = x * cos[AT + i / 2] - y * sin[AT + i / 2];
            v[i + 1] = y * cos[AT + i / 2] + x * sin[AT + i / 2];
        }
    }
};
