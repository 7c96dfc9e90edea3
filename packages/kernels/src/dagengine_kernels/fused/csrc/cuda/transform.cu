// K and V moved from pages to other rows of memory, K turned by a delta on the way.
//
// A move is a run of rows of one page; LANES threads take a row, a block some rows (grid z) of one kv head (grid y). The
// angles of a move are the same for all of its rows. The destination has strides: pages, or gathered rows. Configured by
// rotary.cuh, THREADS, UNROLL (rows that a thread has under way) and STREAMING (stores pass by L2).
#include "rotary.cuh"

struct Move {
    int page, row, count, turn;      // rows row .. row + count - 1 of a page; row of `table`, -1 to leave K as it is
    int to_page, to_row, pad0, pad1;
};

struct Params {
    const void* pages;               // [pages, 2, Hkv, page_size, D]
    void* k_out;
    void* v_out;                     // null: K alone
    const Move* moves;
    const float* table;              // [.., ROTARY_DIM / 2, 2], unscaled
    i64 to_page, to_head, to_row;    // strides of the destination in elements
    int kv_heads, page_size;
};

constexpr int ROWS_AT_ONCE = THREADS / LANES;

__device__ __forceinline__ void put(const Elements& x, void* base, i64 element) {
    if constexpr (STREAMING) {
        x.store_streaming(base, element);
    } else {
        x.store(base, element);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) transform(const __grid_constant__ Params p) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int lane = threadIdx.x % LANES, sub = threadIdx.x / LANES;
    const Move move = p.moves[blockIdx.x];
    Angles angles[ROUNDS];
    const bool turns = ROTARY_DIM > 0 && move.turn >= 0;
    if (turns) {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) angles[r].load(p.table + static_cast<i64>(move.turn) * ROTARY_DIM, Unit(lane + r * LANES));
    }
    const int head = blockIdx.y;
    const i64 head_elements = static_cast<i64>(p.page_size) * HEAD_DIM;
    const i64 from_k = (static_cast<i64>(move.page) * 2 * p.kv_heads + head) * head_elements + static_cast<i64>(move.row) * HEAD_DIM;
    const i64 from_v = from_k + p.kv_heads * head_elements;
    const i64 to = move.to_page * p.to_page + head * p.to_head + move.to_row * p.to_row;
    constexpr int ROWS = UNROLL * ROWS_AT_ONCE;
    for (int row0 = sub + blockIdx.z * ROWS; row0 < move.count; row0 += gridDim.z * ROWS) {
        Elements k[UNROLL][ROUNDS][2], v[UNROLL][ROUNDS][2];
#pragma unroll
        for (int n = 0; n < UNROLL; ++n) {
            const int row = row0 + n * ROWS_AT_ONCE;
            if (row >= move.count) continue;
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) {
                const Unit unit(lane + r * LANES);
                const i64 at = static_cast<i64>(row) * HEAD_DIM;
                if (unit.first >= 0) k[n][r][0] = Elements::load_streaming(p.pages, from_k + at + unit.first * VEC);
                if (unit.second >= 0) k[n][r][1] = Elements::load_streaming(p.pages, from_k + at + unit.second * VEC);
                if (!p.v_out) continue;
                if (unit.first >= 0) v[n][r][0] = Elements::load_streaming(p.pages, from_v + at + unit.first * VEC);
                if (unit.second >= 0) v[n][r][1] = Elements::load_streaming(p.pages, from_v + at + unit.second * VEC);
            }
        }
#pragma unroll
        for (int n = 0; n < UNROLL; ++n) {
            const int row = row0 + n * ROWS_AT_ONCE;
            if (row >= move.count) continue;
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) {
                const Unit unit(lane + r * LANES);
                const i64 at = to + row * p.to_row;
                if (turns && (angles[r].turns_first || angles[r].turns_second)) {
                    float first[VEC], second[VEC];
                    k[n][r][0].unpack(first);
                    k[n][r][1].unpack(second);
                    angles[r].turn(first, second);
                    k[n][r][0] = Elements::pack(first);
                    k[n][r][1] = Elements::pack(second);
                }
                if (unit.first >= 0) put(k[n][r][0], p.k_out, at + unit.first * VEC);
                if (unit.second >= 0) put(k[n][r][1], p.k_out, at + unit.second * VEC);
                if (!p.v_out) continue;
                if (unit.first >= 0) put(v[n][r][0], p.v_out, at + unit.first * VEC);
                if (unit.second >= 0) put(v[n][r][1], p.v_out, at + unit.second * VEC);
            }
        }
    }
}
