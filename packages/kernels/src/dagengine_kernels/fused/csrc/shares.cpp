// Equal shares of the walks for the workers.
#include <algorithm>
#include <functional>
#include <queue>
#include <tuple>

#include "planner.h"

namespace dagengine::planner {

namespace {

// What pieces of items cost, in KV tiles or, where there are light ones, in halves of them.
struct Costs {
    const std::vector<Item>& items;
    const int64_t* turns;
    int64_t unit;  // of a KV tile that is not light
    int64_t work;  // of starting a work

    int64_t tile(const Item& item) const { return item.light ? 1 : unit; }

    // Of KV tiles begin .. end - 1 of an item without starting it.
    int64_t walk(const Item& item, int64_t begin, int64_t end) const {
        const int64_t* const turn = turns + item.begin;
        return (end - begin) * tile(item) + unit * (turn[end - 1] - turn[begin]);
    }

    int64_t of(const Piece& piece) const { return work + walk(items[piece.item], piece.begin, piece.end); }

    int64_t whole(const Item& item) const { return work + walk(item, 0, item.end - item.begin); }

    // How many KV tiles of an item of `length` from `begin` on cost at most `room`.
    int64_t affordable(const Item& item, int64_t begin, int64_t length, int64_t room) const {
        const int64_t* const turn = turns + item.begin;
        int64_t low = 0, high = std::max<int64_t>(std::min(length - begin, room / tile(item)), 0);
        if (high && turn[begin + high - 1] == turn[begin]) return high;
        while (low < high) {
            const int64_t middle = (low + high + 1) / 2;
            if (walk(item, begin, begin + middle) <= room)
                low = middle;
            else
                high = middle - 1;
        }
        return low;
    }
};

// Shares of cost at most `bound`, each filled as far as it goes: calls take(item, begin, end) for each work and close()
// behind each full share. False if the workers do not suffice.
template <typename Take, typename Close>
bool share_out(const Costs& costs, int64_t workers, int64_t min_chunk, int64_t bound, Take&& take, Close&& close) {
    int64_t room = bound;
    for (size_t index = 0; index < costs.items.size(); ++index) {
        const Item& item = costs.items[index];
        const int64_t length = item.end - item.begin;
        int64_t begin = 0;
        while (begin < length) {
            const int64_t rest = length - begin, cost = costs.work + costs.walk(item, begin, length);
            if (room >= cost) {
                take(index, begin, length);
                room -= cost;
                break;
            }
            int64_t piece = std::min(costs.affordable(item, begin, length, room - costs.work), rest - min_chunk);
            const int64_t largest = (bound - costs.work) / costs.tile(item);
            if (piece >= min_chunk && largest < 2 * min_chunk) {
                // What stays must be divisible into pieces that are neither too small nor too large: what is at least
                // the smallest one is, where the largest piece is twice that.
                const int64_t more = (rest - piece + largest - 1) / largest;
                piece = std::min(piece, rest - more * min_chunk);
            }
            if (piece >= min_chunk) {
                take(index, begin, begin + piece);
                begin += piece;
            } else if (room == bound) {
                return false;
            }
            if (--workers == 0) return false;
            close();
            room = bound;
        }
    }
    return true;
}

// As shares_twin.cut.
void cut(const Costs& costs, int64_t workers, int64_t min_chunk, Buffer<Piece>& pieces, Ints& indptr) {
    int64_t total = 0;
    for (const Item& item : costs.items) total += costs.whole(item);
    int64_t low = std::max<int64_t>((total + workers - 1) / workers, 1), high = low, step = 1;
    auto fits = [&](int64_t bound) { return share_out(costs, workers, min_chunk, bound, [](auto...) {}, [] {}); };
    while (!fits(high)) {
        low = high + 1;
        high += step;
        step *= 2;
    }
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (fits(middle))
            high = middle;
        else
            low = middle + 1;
    }
    pieces.clear();
    indptr.assign(1, 0);
    share_out(
        costs, workers, min_chunk, high,
        [&](size_t item, int64_t begin, int64_t end) {
            pieces.push_back({static_cast<int32_t>(item), static_cast<int32_t>(begin), static_cast<int32_t>(end)});
        },
        [&] { indptr.push_back(static_cast<int32_t>(pieces.size())); });
    indptr.resize(workers + 1, static_cast<int32_t>(pieces.size()));
}

constexpr int64_t MANY = 8;  // as in shares_twin.py

int64_t makespan(const Costs& costs, const Buffer<Piece>& pieces, const Ints& indptr) {
    int64_t largest = 0;
    for (size_t worker = 0; worker + 1 < indptr.size(); ++worker) {
        int64_t sum = 0;
        for (int32_t i = indptr[worker]; i < indptr[worker + 1]; ++i) sum += costs.of(pieces[i]);
        largest = std::max(largest, sum);
    }
    return largest;
}

void deal(const Costs& costs, int64_t heads, int64_t workers, Buffer<Piece>& pieces, Ints& indptr) {
    const std::vector<Item>& items = costs.items;
    std::vector<int32_t> order(items.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    int64_t largest = 0, total = 0;
    for (const Item& item : items) {
        const int64_t cost = costs.whole(item);
        largest = std::max(largest, cost);
        total += cost;
    }
    const bool by_head = MANY * largest * workers <= total;
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
        const auto key = [&](int32_t i) {
            const int64_t head = i % heads, shorter = items[i].begin - items[i].end;
            return by_head ? std::make_tuple(head, items[i].walk, shorter, int64_t{i})
                           : std::make_tuple(shorter, head, items[i].walk, int64_t{i});
        };
        return key(a) < key(b);
    });
    using Load = std::pair<int64_t, int64_t>;
    std::priority_queue<Load, std::vector<Load>, std::greater<Load>> loads;
    for (int64_t worker = 0; worker < workers; ++worker) loads.emplace(0, worker);
    std::vector<std::vector<int32_t>> dealt(workers);
    for (int32_t item : order) {
        const auto [load, worker] = loads.top();
        loads.pop();
        dealt[worker].push_back(item);
        loads.emplace(load + costs.whole(items[item]), worker);
    }
    pieces.clear();
    indptr.assign(1, 0);
    for (const auto& mine : dealt) {
        for (int32_t item : mine)
            pieces.push_back({item, 0, static_cast<int32_t>(items[item].end - items[item].begin)});
        indptr.push_back(static_cast<int32_t>(pieces.size()));
    }
}

// The query tiles of a walk, by whether they are light.
struct Group {
    std::vector<int64_t> heavy, light;
};

constexpr size_t PAIR = 2;        // as in shares_twin.py
constexpr int64_t STRETCH = 16;

// As shares_twin.alternate.
void alternate(const std::vector<Piece> (&lists)[PAIR], Buffer<Piece>& made) {
    std::vector<Piece> stretches[PAIR];
    for (size_t k = 0; k < PAIR; ++k)
        for (const Piece& piece : lists[k]) {
            const int64_t length = piece.end - piece.begin, count = std::max<int64_t>(length / STRETCH, 1);
            for (int64_t i = 0; i < count; ++i)
                stretches[k].push_back({piece.item, static_cast<int32_t>(piece.begin + length * i / count),
                                        static_cast<int32_t>(piece.begin + length * (i + 1) / count)});
        }
    for (size_t i = 0; i < std::max(stretches[0].size(), stretches[1].size()); ++i)
        for (const auto& one : stretches)
            if (i < one.size()) made.push_back(one[i]);
}

// The walk of each group cut among teams of as many workers as the group has heavy tiles; for the light ones every
// pair of teams has a worker more. As planner_twin._alike. False where that is much less even than `allowed`.
bool alike(const Costs& costs, const std::vector<Group>& groups, int64_t heads, int64_t workers, int64_t min_chunk,
           int64_t allowed, Buffer<Piece>& made, Ints& made_indptr) {
    const std::vector<Item>& items = costs.items;
    const auto width = static_cast<int64_t>(groups[0].heavy.size());
    bool light = false;
    std::vector<Item> walked;  // from the first to the last KV tile that a tile of the group sees
    for (const Group& group : groups) {
        Item one = items[group.heavy[0] * heads];
        for (const auto* tiles : {&group.heavy, &group.light})
            for (int64_t tile : *tiles) {
                one.begin = std::min(one.begin, items[tile * heads].begin);
                one.end = std::max(one.end, items[tile * heads].end);
            }
        walked.resize(walked.size() + heads, one);
        light |= !group.light.empty();
    }
    const int64_t size = PAIR * width + 1, rest = workers % size;
    const int64_t teams = light ? workers / size * PAIR + (rest > width) : workers / width;
    if (!teams) return false;
    Buffer<Piece> cuts;
    Ints cut_indptr;
    cut(Costs{walked, costs.turns, costs.unit, costs.work}, teams, min_chunk, cuts, cut_indptr);
    // What a tile sees of one of the cuts.
    const auto seen = [&](const Piece& piece, int64_t tile) {
        const int64_t head = piece.item % heads;
        const Item& mine = items[tile * heads];
        const int64_t skipped = mine.begin - walked[piece.item].begin;
        return Piece{static_cast<int32_t>(tile * heads + head),
                     static_cast<int32_t>(std::max<int64_t>(piece.begin - skipped, 0)),
                     static_cast<int32_t>(std::min(piece.end - skipped, mine.end - mine.begin))};
    };
    made.clear();
    made_indptr.assign(1, 0);
    std::vector<Piece> lists[PAIR];
    int64_t largest = 0;
    for (int64_t team = 0; team < teams; ++team) {
        for (int64_t member = 0; member < width; ++member) {
            int64_t cost = 0;
            for (int32_t i = cut_indptr[team]; i < cut_indptr[team + 1]; ++i) {
                const Piece one = seen(cuts[i], groups[cuts[i].item / heads].heavy[member]);
                if (one.begin >= one.end) continue;
                made.push_back(one);
                cost += costs.of(one);
            }
            made_indptr.push_back(static_cast<int32_t>(made.size()));
            largest = std::max(largest, cost);
        }
        if (!light) continue;
        for (int32_t i = cut_indptr[team]; i < cut_indptr[team + 1]; ++i)
            for (int64_t tile : groups[cuts[i].item / heads].light) {
                const Piece one = seen(cuts[i], tile);
                if (one.begin < one.end) lists[team % PAIR].push_back(one);
            }
        if (team % PAIR != PAIR - 1 && team + 1 != teams) continue;
        int64_t cost = 0;
        for (const auto& list : lists)
            for (const Piece& one : list) cost += costs.of(one);
        largest = std::max(largest, cost);
        alternate(lists, made);
        for (auto& list : lists) list.clear();
        made_indptr.push_back(static_cast<int32_t>(made.size()));
    }
    made_indptr.resize(workers + 1, static_cast<int32_t>(made.size()));
    return 10 * largest <= allowed;
}

}  // namespace

void share(const std::vector<Item>& items, const int64_t* turns, int64_t heads, int64_t workers,
           const Parameters& parameters, Buffer<Piece>& pieces, Ints& indptr) {
    const int64_t chunk = parameters.min_chunk;
    const bool any_light = std::any_of(items.begin(), items.end(), [](const Item& item) { return item.light; });
    const int64_t unit = any_light ? 2 : 1;
    const Costs costs{items, turns, unit, unit * parameters.work_cost};
    cut(costs, workers, chunk, pieces, indptr);
    std::vector<Group> groups;
    const int64_t tiles = static_cast<int64_t>(items.size()) / heads;
    for (int64_t tile = 0; tile < tiles; ++tile) {
        if (!tile || items[tile * heads].walk != items[(tile - 1) * heads].walk) groups.emplace_back();
        (items[tile * heads].light ? groups.back().light : groups.back().heavy).push_back(tile);
    }
    if (static_cast<int64_t>(groups.size()) == tiles) return;

    Buffer<Piece> other;
    Ints other_indptr;
    const int64_t allowed = 11 * makespan(costs, pieces, indptr);
    deal(costs, heads, workers, other, other_indptr);
    if (10 * makespan(costs, other, other_indptr) > allowed) {
        const auto width = static_cast<int64_t>(groups[0].heavy.size());
        for (const Group& group : groups)
            if (static_cast<int64_t>(group.heavy.size()) != width) return;
        if (!width || width > workers) return;
        if (!alike(costs, groups, heads, workers, chunk, allowed, other, other_indptr)) return;
    }
    pieces = std::move(other);
    indptr = std::move(other_indptr);
}

}  // namespace dagengine::planner
