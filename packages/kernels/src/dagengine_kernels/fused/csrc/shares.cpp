// Equal shares of the walks for the workers.
#include <algorithm>

#include "planner.h"

namespace dagengine::planner {

namespace {

// How many KV tiles from `begin` on cost at most `room`.
int64_t affordable(const int64_t* turn, int64_t begin, int64_t end, int64_t room) {
    int64_t low = 0, high = end - begin;
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
bool share_out(const std::vector<Walked>& items, const std::vector<int64_t>& turns, int64_t workers,
               int64_t min_chunk, int64_t work_cost, int64_t bound, Take&& take, Close&& close) {
    int64_t room = bound;
    for (size_t item = 0; item < items.size(); ++item) {
        const int64_t length = items[item].end - items[item].begin;
        const int64_t* const turn = turns.data() + items[item].begin;
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
            if (piece >= min_chunk) {
                // What stays must be divisible into pieces that are neither too small nor too large.
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

}  // namespace

void cut(const std::vector<Walked>& items, const std::vector<int64_t>& turns, int64_t workers, int64_t min_chunk,
         int64_t work_cost, std::vector<Piece>& pieces, Ints& indptr) {
    int64_t total = work_cost * static_cast<int64_t>(items.size());
    for (const Walked& item : items) total += item.end - item.begin + turns[item.end - 1] - turns[item.begin];
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

}  // namespace dagengine::planner
