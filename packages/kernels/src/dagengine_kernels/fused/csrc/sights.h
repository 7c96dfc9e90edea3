// What the slots of a query tile see: a vector of deltas for each range, and the ranges of equal vectors as groups.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstring>
#include <vector>

#include "ranges.h"

namespace dagengine::planner {

constexpr int32_t INVISIBLE = INT32_MIN;

// A range at one vector of deltas, INVISIBLE where a slot does not see it. The k-th time that a slot sees the range is
// in layer k, each a sight of its own.
struct Sight {
    int32_t range, layer;
    int32_t deeper;  // the sight of the next layer, or -1
};

// Part of a group's walk.
struct Stretch {
    int32_t group, layer, track, start, stop;
};

struct Group {
    uint64_t hash;
    int32_t sight;      // one that has its vector
    int32_t first;      // stretch
    int32_t tail = -1;  // its growing tail's stretch, or -1
    int32_t count = 0;  // stretches

    Group(uint64_t hash, int32_t sight, int32_t first) : hash(hash), sight(sight), first(first) {}
};

inline int32_t trailing_zeros(uint64_t word) {
    int32_t zeros = 0;
    while (!(word >> zeros & 1)) ++zeros;
    return zeros;
}

// Found for one tile after another; the vectors keep their memory from one to the next.
class Sights {
  public:
    int64_t words = 0;       // 64-bit words of a mask of slots
    Buffer<uint64_t> masks;  // slots that see something, `words` each, of all tiles
    std::vector<Group> groups;
    Buffer<Stretch> stretches;

    // `slots`: the rows of the highest tile.
    void begin(const Ranges& ranges, int64_t slots) {
        in = &ranges;
        words = (slots + 63) / 64;
        masks.clear();
        local.assign(in->ranges.size(), Local{-1, 0});
        before = count = 0;
        while (static_cast<int64_t>(keys.size()) < slots / 2 + LANES) {
            uint64_t key = (keys.size() + 1) * 0x9E3779B97F4A7C15u;
            key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9u;
            key = (key ^ key >> 27) * 0x94D049BB133111EBu;
            keys.push_back((key ^ key >> 31) | 1);
        }
    }

    // The groups of a tile of these units, which have `rows` rows, in the order in which the slots come upon them.
    void find(const int32_t* mine, int64_t number, int64_t rows) {
        int64_t most = 0;
        for (int64_t i = 0; i < number; ++i) most += in->units[mine[i]].times;
        width = (rows + LANES - 1) / LANES * LANES;
        before += count;
        count = 0;
        sights.resize(most);
        vectors.resize(most * width);
        masks.resize((before + most) * words);
        int64_t slot = 0;
        for (int64_t i = 0; i < number; ++i) {
            see(in->units[mine[i]], slot);
            slot += in->units[mine[i]].size;
        }
        masks.resize(int64_t{before + count} * words);
        group();
    }

    // The slot that a group is seen by where it is one alone, else -1.
    int32_t only_slot(const Group& group) const {
        const uint64_t* const mask = masks.data() + mask_of(group);
        int32_t slot = -1;
        for (int64_t word = 0; word < words; ++word) {
            if (!mask[word]) continue;
            if (slot >= 0 || mask[word] & (mask[word] - 1)) return -1;
            slot = static_cast<int32_t>(word * 64) + trailing_zeros(mask[word]);
        }
        return slot;
    }

    // A mask of no slots, and one more slot in it.
    int64_t add_mask() {
        const int64_t at = int64_t{before + count++} * words;
        masks.resize(at + words);
        std::fill_n(masks.data() + at, words, uint64_t{0});
        return at;
    }
    void see(int64_t mask, int32_t slot) { masks[mask + slot / 64] |= uint64_t{1} << slot % 64; }

    const int32_t* vector_of(const Group& group) const { return vectors.data() + group.sight * width; }
    int64_t mask_of(const Group& group) const { return int64_t{before + group.sight} * words; }

  private:
    static constexpr int64_t LANES = 4;  // vectors are multiples of this, so that loops over them need no rest

    struct Local {
        int32_t sight;  // of this tile where it is at least `before`, counted through all tiles
        int32_t at;     // its vector
    };

    const Ranges* in = nullptr;
    int64_t width = 0;         // deltas of a vector, the last ones beyond the tile's rows
    std::vector<Local> local;  // range -> its sight in layer 0
    int32_t before = 0;  // sights of the tiles before
    int32_t count = 0;   // sights of the tile
    Buffer<Sight> sights;
    Buffer<int32_t> vectors;     // by sight
    std::vector<uint64_t> keys;  // odd, of each two deltas
    Ints table;                  // groups by hash

    // A unit, whose rows are in the slots from `slot` on, sees its pieces.
    void see(const Unit& unit, int64_t slot) {
        const int64_t mask_words = words, size = unit.size;
        const int32_t first = before;
        const uint64_t bit = uint64_t{1} << slot % 64;
        Local* const locals = local.data();
        int32_t* const deltas = vectors.data() + slot;
        uint64_t* const bits = masks.data() + slot / 64;
        const Seen* const end = in->seen.data() + unit.last_piece;
        for (const Seen* piece = in->seen.data() + unit.first_piece; piece != end; ++piece) {
            const int32_t delta = piece->delta;
            in->each_range(*piece, [&](int32_t r) {
                if (locals[r].sight < first) locals[r] = add(r, 0);
                Local mine = locals[r];
                if (deltas[mine.at] != INVISIBLE) mine = deeper(r, slot);
                deltas[mine.at] = delta;
                bits[mine.sight * mask_words] |= bit;
                for (int64_t row = 1; row < size; ++row) {
                    deltas[mine.at + row] = delta;
                    masks[mine.sight * mask_words + (slot + row) / 64] |= uint64_t{1} << (slot + row) % 64;
                }
            });
        }
    }

    // The sight of the first layer in which a slot does not see the range yet.
    Local deeper(int32_t range, int64_t slot) {
        int32_t sight = local[range].sight - before;
        while (vectors[sight * width + slot] != INVISIBLE) {
            if (sights[sight].deeper < 0) {
                sights[sight].deeper = count;
                return add(range, sights[sight].layer + 1);
            }
            sight = sights[sight].deeper;
        }
        return {before + sight, static_cast<int32_t>(sight * width)};
    }

    Local add(int32_t range, int32_t layer) {
        const int32_t sight = count++;
        sights[sight] = {range, layer, -1};
        std::fill_n(vectors.data() + sight * width, width, INVISIBLE);
        for (int64_t word = 0; word < words; ++word) masks[(before + sight) * words + word] = 0;
        return {before + sight, static_cast<int32_t>(sight * width)};
    }

    void group() {
        groups.clear();
        stretches.resize(count);
        size_t size = 64;
        while (size < 2 * static_cast<size_t>(count)) size *= 2;
        table.assign(size, -1);
        int32_t number = 0;
        for (int32_t first = 0; first < count; ++first) {
            if (sights[first].layer) continue;
            const Range& range = in->ranges[sights[first].range];
            const bool tail = in->tracks[range.track].tail_of >= 0;
            for (int32_t sight = first; sight >= 0; sight = sights[sight].deeper) {
                const int32_t g = group_of(sight, number);
                if (tail) groups[g].tail = number;
                ++groups[g].count;
                stretches[number++] = {g, sights[sight].layer, range.track, range.start, range.stop};
            }
        }
    }

    // The group of a sight's vector; a new one begins with this stretch.
    int32_t group_of(int32_t sight, int32_t stretch) {
        const int32_t* const vector = vectors.data() + sight * width;
        uint64_t hash = 0;
        for (int64_t i = 0; i < width / 2; ++i) {
            uint64_t two;
            std::memcpy(&two, vector + 2 * i, sizeof two);
            hash += two * keys[i];
        }
        hash ^= hash >> 32;
        hash *= keys[0];
        const size_t mask = table.size() - 1;
        size_t place = hash >> 32 & mask;
        while (table[place] >= 0) {
            const Group& group = groups[table[place]];
            if (group.hash == hash && std::equal(vector, vector + width, vectors.data() + group.sight * width))
                return table[place];
            place = (place + 1) & mask;
        }
        table[place] = static_cast<int32_t>(groups.size());
        groups.emplace_back(hash, sight, stretch);
        return table[place];
    }
};

}  // namespace dagengine::planner
