// The walk of one work over its KV tiles, for whichever `Simd` the including file defines. Everything here has internal
// linkage: each including file is compiled for another instruction set, and the linker must not mix their code.
//
//   entries of the work  | e0 | e1 | e2 |   e3   | ..      rows LO..HI-1 of a page each
//   key blocks           |   block 0   |  block 1   |      up to KB keys that see the same turned queries
//   rows of the tile     only those that see the run, in strips of up to STRIP rows
//
// Few rows (one strip): scores are dot products along the head dimension, K and V are read where they lie. Many rows:
// K is transposed once per block, so that scores are products of broadcast queries and vectors of keys.
// A batch-invariant walk always does the latter, and its blocks are the plan's KV tiles (the first KB rows of a page that
// is larger, then the next): which keys are summed together, and how, is then the same whatever rows share the tile.
#pragma once

#include <type_traits>

#include "attend_cpu.h"

namespace dagengine::cpu {
namespace {

using F = Simd::F;
constexpr int W = Simd::W;
constexpr int STRIP = 6;
constexpr int KB = 64;
constexpr int CACHE_LINE = 64;
constexpr int INTO_L2 = 2;
constexpr float LOWEST = -1e30f;
constexpr float LOG2E = 1.4426950408889634f;
constexpr int32_t INVISIBLE = INT32_MIN;

struct Bf16 {
    uint16_t bits;
};
struct F16 {
    uint16_t bits;
};
// bf16 whose elements the walk takes in another order, 2 W at a time: first those at even places, then those at odd
// ones. Either half is one operation on the 32-bit words that hold them. Queries and results are put in that order too.
//
//     memory   0 1 2 3 4 5 6 7 ..      vector 0   0 2 4 6 ..      vector 1   1 3 5 7 ..
struct PairedBf16 {
    uint16_t bits;
};

inline float value(float x) { return x; }
inline float value(Bf16 x) { return from_bf16(x.bits); }
inline float value(PairedBf16 x) { return from_bf16(x.bits); }
inline float value(F16 x) { return from_f16(x.bits); }

// Vector `n` (a constant after unrolling) from element `d` on of a row; d is a multiple of 2 W for pairs.
inline F load(const float* row, int d = 0, int n = 0) { return Simd::load(row + d + n * W); }
inline F load(const Bf16* row, int d, int n) { return Simd::load_bf16(&row[d + n * W].bits); }
inline F load(const F16* row, int d, int n) { return Simd::load_f16(&row[d + n * W].bits); }
inline F load(const PairedBf16* row, int d, int n) {
    const uint16_t* words = &row[d + (n & ~1) * W].bits;
    return n & 1 ? Simd::load_odd_bf16(words) : Simd::load_even_bf16(words);
}

template <class T>
constexpr bool PAIRED = std::is_same_v<T, PairedBf16>;
// Vectors that a loop over the head dimension takes at least.
template <class T>
constexpr int PACE = PAIRED<T> ? 2 : 1;

// Into the walk's order, and out of it; n is a multiple of 2 W.
inline void to_pairs(const float* __restrict from, float* __restrict to, int n) {
    for (int d = 0; d < n; d += 2 * W)
        for (int i = 0; i < W; i++) {
            to[d + i] = from[d + 2 * i];
            to[d + W + i] = from[d + 2 * i + 1];
        }
}
inline void from_pairs(const float* __restrict from, float* __restrict to, int n) {
    for (int d = 0; d < n; d += 2 * W)
        for (int i = 0; i < W; i++) {
            to[d + 2 * i] = from[d + i];
            to[d + 2 * i + 1] = from[d + W + i];
        }
}

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t rounded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Keys that are scored together, where they lie, and where they were stored: pieces of consecutive positions.
template <class T>
struct Block {
    int count, pieces;
    int32_t first, last;  // smallest and largest stored position
    bool in_order;        // positions are first, first + 1, ..
    int64_t to_value;     // elements from a row of K to that of V
    const T* k[KB];
    int begin[KB + 1];  // of each piece
    int32_t position[KB];
};

struct Scratch {
    float* queries;    // [rows, Dp] turned, of the rows that see the run
    float* out;        // [rows of the tile, Dp] not yet divided by the sum
    float* top;        // [rows of the tile] running maximum, base 2
    float* sum;        // [rows of the tile, W] running sum, by lane
    float* scores;     // [STRIP, KB]
    float* keys;       // [Dp, KB] transposed
    float* values;     // [KB, Dp] as float
    float* staged;     // [KB, Dp] rows whose length no vector divides
    int32_t* row;      // [rows] which row of the tile
    int64_t* limit;    // [rows] largest stored position that the row sees
};

struct Layout {
    int padded;  // Dp: head_dim up to whole vectors
    int rows;
    size_t bytes;

    explicit Layout(const Call& c) : padded(int(rounded(c.head_dim, W))), rows(c.max_slots * c.group), bytes(0) {
        Scratch unused;
        place(unused, nullptr);
    }

    void place(Scratch& s, char* base) {
        size_t at = 0;
        auto take = [&](auto*& pointer, size_t count) {
            using T = std::remove_reference_t<decltype(*pointer)>;
            pointer = reinterpret_cast<T*>(base + at);
            at += size_t(rounded(int64_t(count * sizeof(T)), CACHE_LINE));
        };
        size_t r = size_t(rows), d = size_t(padded);
        take(s.queries, r * d);
        take(s.out, r * d);
        take(s.top, r);
        take(s.sum, r * W);
        take(s.scores, STRIP * KB);
        take(s.keys, d * KB);
        take(s.values, KB * d);
        take(s.staged, 2 * KB * d);
        take(s.row, r);
        take(s.limit, r);
        bytes = at;
    }
};

// Memory that the walk comes to next: what is fetched ahead while `count` rows are worked on, some lines of each.
struct Ahead {
    const char* const* rows;
    int64_t second;  // bytes from a row of K to that of V; 0: only K
    int first, lines;
};

inline void fetch(const Ahead& ahead, int i) {
    for (int line = ahead.first; line < ahead.first + ahead.lines; line++) {
        const char* at = ahead.rows[i] + line * CACHE_LINE;
        __builtin_prefetch(at, 0, INTO_L2);
        if (ahead.second) __builtin_prefetch(at + ahead.second, 0, INTO_L2);
    }
}

// scores[r][k] = queries[r] . keys[k] for R rows and K keys.
template <class T, int R, int K>
inline void dot_tile(const float* q, const T* const* k, int padded, float* scores) {
    F acc[R][K];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int i = 0; i < K; i++) acc[r][i] = Simd::zero();
    for (int d = 0; d < padded; d += PACE<T> * W) {
#pragma GCC unroll 2
        for (int n = 0; n < PACE<T>; n++) {
            F row[R];
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) row[r] = load(q + r * padded, d, n);
#pragma GCC unroll 16
            for (int i = 0; i < K; i++) {
                F key = load(k[i], d, n);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) acc[r][i] = Simd::fma(row[r], key, acc[r][i]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) Simd::template reduce<K>(acc[r], scores + r * KB);
}

template <class T, int R>
void dot_rows(const float* q, const Block<T>& b, int count, int padded, float* scores) {
    constexpr int AT_ONCE = Simd::dot_rows < R ? Simd::dot_rows : R;
    if constexpr (AT_ONCE < R) {
        dot_rows<T, AT_ONCE>(q, b, count, padded, scores);
        dot_rows<T, R - AT_ONCE>(q + AT_ONCE * padded, b, count, padded, scores + AT_ONCE * KB);
    } else {
        constexpr int K = Simd::dot_keys(R);
        int lines = int(padded * sizeof(T)) / CACHE_LINE;
        for (int i = 0; i < count; i += K) {
            for (int j = i; j < i + K; j++)
                for (int line = 0; line < lines; line++)
                    __builtin_prefetch(
                        reinterpret_cast<const char*>(b.k[j] + b.to_value) + line * CACHE_LINE, 0, INTO_L2
                    );
            dot_tile<T, R, K>(q, b.k + i, padded, scores + i);
        }
    }
}

// The same from transposed keys [D, KB].
template <int R, int N>
inline void score_tile(const float* q, int padded, int dim, const float* keys, float* scores) {
    F acc[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) acc[r][n] = Simd::zero();
    for (int d = 0; d < dim; d++) {
        F key[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) key[n] = load(keys + d * KB, 0, n);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            F query = Simd::set(q[r * padded + d]);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) acc[r][n] = Simd::fma(query, key[n], acc[r][n]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) Simd::store(scores + r * KB + n * W, acc[r][n]);
}

template <int R>
void score_rows(const float* q, int padded, int dim, const float* keys, int count, float* scores) {
    constexpr int N = Simd::vectors;
    int i = 0;
    for (; i + (N - 1) * W < count; i += N * W) score_tile<R, N>(q, padded, dim, keys + i, scores + i);
    for (; i < count; i += W) score_tile<R, 1>(q, padded, dim, keys + i, scores + i);
}

// out[r] = out[r] * keep[r] + weights[r] . values, for N vectors of the head dimension; value i is at rows[i] + shift.
template <class T, int R, int N>
inline void value_tile(
    const float* weights, const T* const* rows, int64_t shift, const Ahead& ahead, int count, int d, float* const* out,
    const float* keep
) {
    F acc[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        F factor = Simd::set(keep[r]);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) acc[r][n] = Simd::mul(load(out[r], d, n), factor);
    }
    for (int i = 0; i < count; i++) {
        fetch(ahead, i);
        F row[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) row[n] = load(rows[i] + shift, d, n);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            F weight = Simd::set(weights[r * KB + i]);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) acc[r][n] = Simd::fma(weight, row[n], acc[r][n]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) Simd::store(out[r] + d + n * W, acc[r][n]);
}

template <class T, int R>
void value_rows(
    const float* weights, const T* const* rows, int64_t shift, Ahead ahead, int count, int padded, float* const* out,
    const float* keep
) {
    constexpr int N = Simd::vectors;
    int d = 0;
    for (; d + N * W <= padded; d += N * W, ahead.lines = 0)
        value_tile<T, R, N>(weights, rows, shift, ahead, count, d, out, keep);
    constexpr int LAST = PACE<T>;
    for (; d < padded; d += LAST * W, ahead.lines = 0)
        value_tile<T, R, LAST>(weights, rows, shift, ahead, count, d, out, keep);
}

// s -> c * log2(e) * tanh(s), where queries were scaled by scale / c.
inline F capped(F s, F cap) {
    F size = Simd::abs(s);
    F e = Simd::exp2(Simd::mul(size, Simd::set(-2.0f * LOG2E)));
    F large = Simd::div(Simd::sub(Simd::set(1.0f), e), Simd::add(Simd::set(1.0f), e));
    F x2 = Simd::mul(s, s);
    F series = Simd::set(-5.70498872745e-3f);
    series = Simd::fma(series, x2, Simd::set(2.06390887954e-2f));
    series = Simd::fma(series, x2, Simd::set(-5.37397155531e-2f));
    series = Simd::fma(series, x2, Simd::set(1.33314422036e-1f));
    series = Simd::fma(series, x2, Simd::set(-3.33332819422e-1f));
    F small = Simd::fma(Simd::mul(series, x2), s, s);
    return Simd::mul(Simd::select_less(size, Simd::set(0.625f), small, Simd::copy_sign(large, s)), cap);
}

class Walk {
public:
    Walk(const Call& call, const Class& cls, const int32_t* work, void* scratch)
        : c(call), layout(call), tile(work[0]), head(work[1]), begin(work[2]), end(work[3]), part(work[4]) {
        layout.place(s, static_cast<char*>(scratch));
        padded = layout.padded;
        slots = cls.slots;
        tile_rows = cls.tile_rows + int64_t(tile) * slots;
        while (slots > 0 && tile_rows[slots - 1] < 0) slots--;
        scale = c.softcap > 0 ? c.scale / c.softcap : c.scale * LOG2E;
    }

    template <class T>
    void run() {
        int rows = slots * c.group;
        for (int64_t i = 0; i < int64_t(rows) * padded; i++) s.out[i] = 0.0f;
        for (int64_t i = 0; i < int64_t(rows) * W; i++) s.sum[i] = 0.0f;
        for (int i = 0; i < rows; i++) s.top[i] = LOWEST;
        Block<T> blocks[2];
        Block<T>*filling = blocks, *full = nullptr;  // a block waits until the next is known, which it fetches
        clear(*filling);
        int32_t run = -1;
        int64_t block_tile = -1;  // of an invariant walk, the KV tile that the block is
        int64_t stop = int64_t(end) * c.boxes;
        for (int64_t e = int64_t(begin) * c.boxes; e < stop; e++) {
            const int32_t* entry = c.entries + e * 4;
            int32_t page = entry[0], position = entry[2];
            int lo = entry[1] & 0xffff, hi = int(uint32_t(entry[1]) >> 16);
            if (page < 0 || lo >= hi) continue;
            if (c.invariant && e / c.boxes != block_tile) {
                flush(full, *filling, e, stop);
                block_tile = e / c.boxes;
            }
            if (entry[3] != run) {
                bool same = run >= 0 && !c.invariant && same_view(run, entry[3]);
                run = entry[3];
                if (!same) {
                    flush(full, *filling, e, stop);
                    see<T>(run);
                }
            }
            if (!visible) continue;
            hi = int(smaller(hi, widest - position + 1));
            if (c.window && !c.invariant) lo = int(larger(lo, narrowest - c.window + 1 - position));
            while (lo < hi) {
                lo = add(*filling, page, lo, hi, position);
                if (filling->count < KB) break;
                if (full) finish(*full, filling->k);
                full = filling;
                filling = blocks + (filling == blocks);
                clear(*filling);
            }
        }
        flush(full, *filling, stop, stop);
        write<T>();
    }

private:
    const Call& c;
    Layout layout;
    Scratch s;
    int tile, head, begin, end, part;
    int padded, slots;
    const int32_t* tile_rows;
    float scale;
    int visible = 0;                   // rows that see the run
    int64_t widest = 0, narrowest = 0;  // largest and smallest of their limits

    template <class T>
    static void clear(Block<T>& b) {
        b.count = b.pieces = 0;
        b.in_order = true;
    }

    int32_t delta_of(int32_t run, int slot) const {
        const int32_t* r = c.runs + int64_t(run) * 2;
        return r[1] < 0 ? r[0] : c.deltas[r[1] + slot];
    }

    bool same_view(int32_t a, int32_t b) const {
        for (int i = 0; i < slots; i++)
            if (delta_of(a, i) != delta_of(b, i)) return false;
        return true;
    }

    // Which rows see a run, up to where, and their queries turned for it.
    template <class T>
    void see(int32_t run) {
        visible = 0;
        widest = -1;
        narrowest = INT64_MAX;
        for (int i = 0; i < slots; i++) {
            int32_t delta = delta_of(run, i);
            if (delta == INVISIBLE) continue;
            int64_t at = c.q_positions[tile_rows[i]] - delta;
            if (at < 0) continue;
            widest = larger(widest, at);
            narrowest = smaller(narrowest, at);
            for (int g = 0; g < c.group; g++) {
                s.row[visible] = i * c.group + g;
                s.limit[visible] = at;
                turn<T>(tile_rows[i], g, at, s.queries + int64_t(visible) * padded);
                visible++;
            }
        }
    }

    template <class T>
    void turn(int64_t table_row, int g, int64_t at, float* to) const {
        int64_t from = table_row * c.q_row + (int64_t(head) * c.group + g) * c.q_head;
        int dim = c.head_dim, half = c.cos ? c.half : 0;
        float* x = PAIRED<T> ? s.staged : to;
        load_row(c.q, from, c.q_dtype, x, dim, scale);
        const float* cos = c.cos + smaller(at, c.rotary_length - 1) * half;
        const float* sin = c.sin + smaller(at, c.rotary_length - 1) * half;
        if (c.interleaved) {
            for (int i = 0; i < half; i++) rotate(x[2 * i], x[2 * i + 1], cos[i], sin[i]);
        } else {
            for (int i = 0; i < half; i++) rotate(x[i], x[i + half], cos[i], sin[i]);
        }
        if constexpr (PAIRED<T>) {
            to_pairs(x, to, dim);
        } else {
            for (int i = dim; i < padded; i++) to[i] = 0.0f;
        }
    }

    static void rotate(float& a, float& b, float cos, float sin) {
        float first = a * cos - b * sin;
        b = b * cos + a * sin;
        a = first;
    }

    // A row of K.
    template <class T>
    const T* row_of(int32_t page, int row) const {
        int64_t at = (int64_t(page) * 2 * c.num_kv_heads + head) * c.page_size + row;
        return static_cast<const T*>(c.kv) + at * c.head_dim;
    }

    // Rows lo.. of a page, as many as fit; returns the first that did not.
    template <class T>
    int add(Block<T>& b, int32_t page, int lo, int hi, int32_t position) const {
        int n = int(smaller(hi - lo, KB - b.count));
        const T* k = row_of<T>(page, lo);
        for (int i = 0; i < n; i++) b.k[b.count + i] = k + int64_t(i) * c.head_dim;
        int32_t first = position + lo, last = first + n - 1;
        if (b.count == 0) {
            b.first = first;
            b.last = last;
        } else {
            b.in_order = b.in_order && first == b.last + 1;
            b.first = first < b.first ? first : b.first;
            b.last = last > b.last ? last : b.last;
        }
        b.begin[b.pieces] = b.count;
        b.position[b.pieces++] = first;
        b.count += n;
        return lo + n;
    }

    // Score what was collected; `e` is the entry that the walk goes on with.
    template <class T>
    void flush(Block<T>*& full, Block<T>& filling, int64_t e, int64_t stop) {
        const T* next[KB];
        if (full || filling.count) look_ahead(e, stop, next);
        if (full) {
            if (filling.count)
                for (int i = filling.count; i < KB; i++) filling.k[i] = next[i - filling.count];
            finish(*full, filling.count ? filling.k : next);
            full = nullptr;
        }
        if (filling.count) finish(filling, next);
        clear(filling);
    }

    // Score a block; the rows of K at `next`, and V of those, are fetched meanwhile.
    template <class T>
    void finish(Block<T>& b, const T* const* next) {
        b.begin[b.pieces] = b.count;
        b.to_value = int64_t(c.num_kv_heads) * c.page_size * c.head_dim;
        for (int i = b.count; i % 16; i++) b.k[i] = b.k[b.count - 1];  // for whole vectors; not scored
        if (padded != c.head_dim) {
            Block<float> staged;
            stage(b, staged);
            score<float>(staged, {nullptr, 0, 0, 0});
        } else {
            int lines = int((padded * sizeof(T) + CACHE_LINE - 1) / CACHE_LINE);
            score(b, {reinterpret_cast<const char* const*>(next), b.to_value * int64_t(sizeof(T)), 0, lines});
        }
    }

    template <class T>
    void look_ahead(int64_t e, int64_t stop, const T** next) const {
        const T* row = static_cast<const T*>(c.kv);
        int n = 0;
        for (; e < stop && n < KB; e++) {
            const int32_t* entry = c.entries + e * 4;
            int lo = entry[1] & 0xffff, hi = int(uint32_t(entry[1]) >> 16);
            if (entry[0] < 0) continue;
            for (; lo < hi && n < KB; lo++) next[n++] = row = row_of<T>(entry[0], lo);
        }
        for (; n < KB; n++) next[n] = row;
    }

    template <class T>
    void stage(const Block<T>& b, Block<float>& to) const {
        to.count = b.count;
        to.pieces = b.pieces;
        to.first = b.first;
        to.last = b.last;
        to.in_order = b.in_order;
        to.to_value = padded;
        for (int i = 0; i <= b.pieces; i++) to.begin[i] = b.begin[i];
        for (int i = 0; i < b.pieces; i++) to.position[i] = b.position[i];
        for (int i = 0; i < KB; i++) {
            float* k = s.staged + int64_t(i) * 2 * padded;
            to.k[i] = k;
            for (int d = 0; d < padded; d++) {
                bool real = i < b.count && d < c.head_dim;
                k[d] = real ? value(b.k[i][d]) : 0.0f;
                k[padded + d] = real ? value(b.k[i][b.to_value + d]) : 0.0f;
            }
        }
    }

    template <class T>
    void score(const Block<T>& b, Ahead ahead) {
        if (visible <= STRIP && !c.invariant) {
            ahead.second = 0;
            strip(b, b.k, b.to_value, ahead, 0, visible, false);
            return;
        }
        for (int i = 0; i < b.count; i += W)
            for (int d = 0; d < padded; d += PACE<T> * W)
#pragma GCC unroll 2
                for (int n = 0; n < PACE<T>; n++) {
                    F lanes[W];
#pragma GCC unroll 16
                    for (int j = 0; j < W; j++) lanes[j] = load(b.k[i + j], d, n);
                    Simd::transpose(lanes);
                    float* to = s.keys + (d + n * W) * KB + i;
#pragma GCC unroll 16
                    for (int j = 0; j < W; j++) Simd::store(to + j * KB, lanes[j]);
                }
        const float* wide[KB];
        const float* const* values = wide;
        int64_t shift = 0;
        if constexpr (std::is_same_v<T, float>) {
            values = b.k;
            shift = b.to_value;
        } else {
            for (int i = 0; i < b.count; i++) {
                float* row = s.values + int64_t(i) * padded;
                for (int d = 0; d < padded; d += PACE<T> * W)
#pragma GCC unroll 2
                    for (int n = 0; n < PACE<T>; n++)
                        Simd::store(row + d + n * W, load(b.k[i] + b.to_value, d, n));
                wide[i] = row;
            }
        }
        int total = ahead.lines, strips = (visible + STRIP - 1) / STRIP;
        int each = (total + strips - 1) / strips;
        for (int r = 0; r < visible; r += STRIP, ahead.first += each) {
            ahead.lines = int(smaller(each, larger(total - ahead.first, 0)));
            strip<T, float>(b, values, shift, ahead, r, int(smaller(STRIP, visible - r)), true);
        }
    }

    template <class T, class V>
    void strip(
        const Block<T>& b, const V* const* v, int64_t shift, const Ahead& ahead, int r, int n, bool transposed
    ) {
        switch (n) {
            case 1: return strip_of<T, V, 1>(b, v, shift, ahead, r, transposed);
            case 2: return strip_of<T, V, 2>(b, v, shift, ahead, r, transposed);
            case 3: return strip_of<T, V, 3>(b, v, shift, ahead, r, transposed);
            case 4: return strip_of<T, V, 4>(b, v, shift, ahead, r, transposed);
            case 5: return strip_of<T, V, 5>(b, v, shift, ahead, r, transposed);
            default: return strip_of<T, V, 6>(b, v, shift, ahead, r, transposed);
        }
    }

    // Rows r..r+R-1 of those that see the run, against one block: scores, masks, online softmax, values.
    template <class T, class V, int R>
    void strip_of(
        const Block<T>& b, const V* const* v, int64_t shift, const Ahead& ahead, int r, bool transposed
    ) {
        int64_t low = s.limit[r], high = s.limit[r];
        for (int i = 1; i < R; i++) {
            low = smaller(low, s.limit[r + i]);
            high = larger(high, s.limit[r + i]);
        }
        if (high < b.first || (c.window && low - c.window >= b.last)) return;
        int count = b.in_order ? int(smaller(b.count, high - b.first + 1)) : b.count;
        bool masked = low < b.last || (c.window && high - c.window >= b.first);

        const float* q = s.queries + int64_t(r) * padded;
        if (transposed) {
            score_rows<R>(q, padded, c.head_dim, s.keys, count, s.scores);
        } else {
            dot_rows<T, R>(q, b, count, padded, s.scores);
        }
        float* out[R];
        float keep[R];
        for (int i = 0; i < R; i++) {
            float* scores = s.scores + i * KB;
            if (c.softcap > 0) {
                F cap = Simd::set(c.softcap * LOG2E);
                for (int k = 0; k < count; k += W) Simd::store(scores + k, capped(load(scores + k), cap));
            }
            for (int k = count; k % W; k++) scores[k] = -__builtin_inff();
            if (masked) mask(b, count, s.limit[r + i], scores);
            int row = s.row[r + i];
            keep[i] = soften(scores, count, s.top + row, s.sum + int64_t(row) * W);
            out[i] = s.out + int64_t(row) * padded;
        }
        value_rows<V, R>(s.scores, v, shift, ahead, count, padded, out, keep);
    }

    template <class T>
    void mask(const Block<T>& b, int count, int64_t limit, float* scores) const {
        for (int i = 0; i < b.pieces; i++) {
            int64_t begin = b.begin[i], end = smaller(b.begin[i + 1], count), offset = begin - b.position[i];
            int64_t from = c.window ? smaller(larger(limit - c.window + 1 + offset, begin), end) : begin;
            int64_t to = larger(smaller(limit + 1 + offset, end), from);
            for (int64_t k = begin; k < from; k++) scores[k] = -__builtin_inff();
            for (int64_t k = to; k < end; k++) scores[k] = -__builtin_inff();
        }
    }

    // Scores -> weights relative to the new maximum; returns the factor on what was summed before.
    static float soften(float* scores, int count, float* top, float* sum) {
        F most = load(scores);
        for (int k = W; k < count; k += W) most = Simd::max(most, load(scores + k));
        float peak = Simd::reduce_max(most);
        peak = peak > *top ? peak : *top;
        F base = Simd::set(peak), total = Simd::zero();
        for (int k = 0; k < count; k += W) {
            F weight = Simd::exp2(Simd::sub(load(scores + k), base));
            Simd::store(scores + k, weight);
            total = Simd::add(total, weight);
        }
        float keep = peak == *top ? 1.0f : Simd::first(Simd::exp2(Simd::set(*top - peak)));
        Simd::store(sum, Simd::fma(load(sum), Simd::set(keep), total));
        *top = peak;
        return keep;
    }

    template <class T>
    void write() const {
        int heads = c.num_kv_heads * c.group;
        for (int i = 0; i < slots; i++) {
            for (int g = 0; g < c.group; g++) {
                int row = i * c.group + g, query_head = head * c.group + g;
                const float* out = s.out + int64_t(row) * padded;
                if constexpr (PAIRED<T>) {
                    from_pairs(out, s.staged, c.head_dim);
                    out = s.staged;
                }
                float sum = 0.0f, top = s.top[row];
                for (int k = 0; k < W; k++) sum += s.sum[int64_t(row) * W + k];
                float factor = sum > 0.0f ? 1.0f / sum : 0.0f;
                float lse2 = sum > 0.0f ? top + __builtin_log2f(sum) : -__builtin_inff();
                if (sum != sum) factor = lse2 = sum;
                if (part >= 0) {
                    int64_t at = (int64_t(part) + i) * c.group + g;
                    c.lse2_part[at] = lse2;
                    store_row(c.o_part, at * c.head_dim, Dtype::f32, out, c.head_dim, factor);
                    continue;
                }
                if (c.sinks) factor *= with_sink(c.sinks[query_head], &lse2);
                int64_t at = int64_t(tile_rows[i]) * heads + query_head;
                store_row(c.out, at * c.head_dim, c.q_dtype, out, c.head_dim, factor);
                if (c.lse2) c.lse2[at] = lse2;
            }
        }
    }
};

void run_work(const Call& c, const Class& cls, const int32_t* work, void* scratch) {
    Walk walk(c, cls, work, scratch);
    switch (c.kv_dtype) {
        case Dtype::f32: return walk.run<float>();
        case Dtype::bf16: return c.head_dim % (2 * W) ? walk.run<Bf16>() : walk.run<PairedBf16>();
        case Dtype::f16: return walk.run<F16>();
    }
}

size_t scratch_bytes(const Call& c) { return Layout(c).bytes; }

}  // namespace
}  // namespace dagengine::cpu
