// Equal shares of the walks for the workers.
#include <algorithm>
#include <functional>
#include <queue>
#include <tuple>

#include "planner.h"

namespace dagengine::planner {

namespace {

// How many KV tiles from `begin` on cost at most `room`.
int64_t affordable(const int64_t* turn, int64_t begin, int64_t end, int64_t room) {
    int64_t low = 0, high = std::max<int64_t>(std::min(end - begin, room), 0);
    if (high && turn[begin + high - 1] == turn[begin]) return high;
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (middle + turn[begin + middle - 1] - turn[begin] <= room)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

// Shares of cost at most `bound`, each filled as far as it goes: calls take(item, begin, end) for each work and close()
// behind each full share. False if the workers do not suffice.
template <typename Take, typename Close>
bool share_out(const std::vector<Item>& items, const int64_t* turns, int64_t workers,
               int64_t min_chunk, int64_t work_cost, int64_t bound, Take&& take, Close&& close) {
    int64_t room = bound;
    for (size_t item = 0; item < items.size(); ++item) {
        const int64_t length = items[item].end - items[item].begin;
        const int64_t* const turn = turns + items[item].begin;
        int64_t begin = 0;
        while (begin < length) {
            const int64_t rest = length - begin;
            const int64_t cost = work_cost + rest + turn[length - 1] - turn[begin];
            if (room >= cost) {
                take(item, begin, length);
                room -= cost;
                break;
            }
            int64_t piece = std::min(affordable(turn, begin, length, room - work_cost), rest - min_chunk);
            if (piece >= min_chunk && bound - work_cost < 2 * min_chunk) {
                // What stays must be divisible into pieces that are neither too small nor too large: what is at least
                // the smallest one is, where the largest piece is twice that.
                const int64_t largest = bound - work_cost, more = (rest - piece + largest - 1) / largest;
                piece = std::min(piece, rest - more * min_chunk);
            }
            if (piece >= min_chunk) {
                take(item, begin, begin + piece);
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
void cut(const std::vector<Item>& items, const int64_t* turns, int64_t workers, int64_t min_chunk,
         int64_t work_cost, Buffer<Piece>& pieces, Ints& indptr) {
    int64_t total = work_cost * static_cast<int64_t>(items.size());
    for (const Item& item : items) total += item.end - item.begin + turns[item.end - 1] - turns[item.begin];
    int64_t low = std::max<int64_t>((total + workers - 1) / workers, 1), high = low, step = 1;
    auto fits = [&](int64_t bound) {
        return share_out(items, turns, workers, min_chunk, work_cost, bound, [](auto...) {}, [] {});
    };
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
        items, turns, workers, min_chunk, work_cost, high,
        [&](size_t item, int64_t begin, int64_t end) {
            pieces.push_back({static_cast<int32_t>(item), static_cast<int32_t>(begin), static_cast<int32_t>(end)});
        },
        [&] { indptr.push_back(static_cast<int32_t>(pieces.size())); });
    indptr.resize(workers + 1, static_cast<int32_t>(pieces.size()));
}

constexpr int64_t MANY = 8;  // as in shares_twin.py

int64_t cost_of(const Piece& piece, const std::vector<Item>& items, const int64_t* turns,
                int64_t work_cost) {
    const int64_t* const turn = turns + items[piece.item].begin;
    return piece.end - piece.begin + work_cost + turn[piece.end - 1] - turn[piece.begin];
}

int64_t makespan(const Buffer<Piece>& pieces, const Ints& indptr, const std::vector<Item>& items,
                 const int64_t* turns, int64_t work_cost) {
    int64_t largest = 0;
    for (size_t worker = 0; worker + 1 < indptr.size(); ++worker) {
        int64_t sum = 0;
        for (int32_t i = indptr[worker]; i < indptr[worker + 1]; ++i)
            sum += cost_of(pieces[i], items, turns, work_cost);
        largest = std::max(largest, sum);
    }
    return largest;
}

void deal(const std::vector<Item>& items, const int64_t* turns, int64_t heads, int64_t workers,
          int64_t work_cost, Buffer<Piece>& pieces, Ints& indptr) {
    std::vector<int32_t> order(items.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    int64_t largest = 0, total = 0;
    for (size_t i = 0; i < items.size(); ++i) {
        const Piece all{static_cast<int32_t>(i), 0, static_cast<int32_t>(items[i].end - items[i].begin)};
        const int64_t cost = cost_of(all, items, turns, work_cost);
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
        const Piece whole{item, 0, static_cast<int32_t>(items[item].end - items[item].begin)};
        loads.emplace(load + cost_of(whole, items, turns, work_cost), worker);
    }
    pieces.clear();
    indptr.assign(1, 0);
    for (const auto& mine : dealt) {
        for (int32_t item : mine)
            pieces.push_back({item, 0, static_cast<int32_t>(items[item].end - items[item].begin)});
        indptr.push_back(static_cast<int32_t>(pieces.size()));
    }
}

}  // namespace

void share(const std::vector<Item>& items, const int64_t* turns, int64_t heads, int64_t workers,
           const Parameters& parameters, Buffer<Piece>& pieces, Ints& indptr) {
    const int64_t chunk = parameters.min_chunk, cost = parameters.work_cost;
    std::vector<int64_t> groups;  // the first of the tiles that are kin, and the end
    const int64_t tiles = static_cast<int64_t>(items.size()) / heads;
    for (int64_t tile = 0; tile < tiles; ++tile)
        if (!tile || items[tile * heads].kin != items[(tile - 1) * heads].kin) groups.push_back(tile);
    groups.push_back(tiles);
    const int64_t number = static_cast<int64_t>(groups.size()) - 1, width = groups[1] - groups[0];
    bool alike = true;
    for (int64_t g = 0; g < number; ++g) alike &= groups[g + 1] - groups[g] == width;
    cut(items, turns, workers, chunk, cost, pieces, indptr);
    if (number == tiles) return;

    Buffer<Piece> whole;
    Ints whole_indptr;
    deal(items, turns, heads, workers, cost, whole, whole_indptr);
    const int64_t allowed = 11 * makespan(pieces, indptr, items, turns, cost);
    if (10 * makespan(whole, whole_indptr, items, turns, cost) <= allowed) {
        pieces = std::move(whole);
        indptr = std::move(whole_indptr);
        return;
    }
    if (!alike || width > workers) return;

    std::vector<Item> walked;  // the longest walk of a group, from the first to the last KV tile that one of it sees
    for (int64_t g = 0; g < number; ++g) {
        Item one = items[groups[g] * heads];
        int64_t first = one.begin - one.walk;
        for (int64_t tile = groups[g]; tile < groups[g + 1]; ++tile) {
            const Item& other = items[tile * heads];
            first = std::min(first, other.begin - other.walk);
            if (other.end - other.walk > one.end - one.walk) one = other;
        }
        one.begin = one.walk + first;
        walked.resize(walked.size() + heads, one);
    }
    const int64_t teams = workers / width;
    Buffer<Piece> cuts;
    Ints cut_indptr;
    cut(walked, turns, teams, chunk, cost, cuts, cut_indptr);
    Buffer<Piece> made;
    Ints made_indptr(1, 0);
    for (int64_t team = 0; team < teams; ++team)
        for (int64_t member = 0; member < width; ++member) {
            for (int32_t i = cut_indptr[team]; i < cut_indptr[team + 1]; ++i) {
                const int64_t tile = groups[cuts[i].item / heads] + member, head = cuts[i].item % heads;
                const Item& mine = items[tile * heads];
                const Item& all = walked[cuts[i].item];
                const int64_t skipped = mine.begin - mine.walk - (all.begin - all.walk);
                const int64_t low = std::max<int64_t>(cuts[i].begin - skipped, 0);
                const int64_t high = std::min(cuts[i].end - skipped, mine.end - mine.begin);
                if (low < high)
                    made.push_back({static_cast<int32_t>(tile * heads + head), static_cast<int32_t>(low),
                                    static_cast<int32_t>(high)});
            }
            made_indptr.push_back(static_cast<int32_t>(made.size()));
        }
    made_indptr.resize(workers + 1, static_cast<int32_t>(made.size()));
    if (10 * makespan(made, made_indptr, items, turns, cost) > allowed) return;
    pieces = std::move(made);
    indptr = std::move(made_indptr);
}

}  // namespace dagengine::planner
