// Equal shares of the walks for the workers.
#include <algorithm>

#include "planner.h"

namespace dagengine::planner {

namespace {

// Shares of cost at most `bound`, each filled as far as it goes: calls take(item, begin, end) for each work and close()
// behind each full share. False if the workers do not suffice.
template <typename Take, typename Close>
bool share_out(const std::vector<int64_t>& lengths, int64_t workers, int64_t min_chunk, int64_t work_cost,
               int64_t bound, Take&& take, Close&& close) {
    int64_t room = bound;
    for (size_t item = 0; item < lengths.size(); ++item) {
        const int64_t length = lengths[item];
        int64_t begin = 0;
        while (begin < length) {
            const int64_t rest = length - begin;
            if (room >= work_cost + rest) {
                take(item, begin, length);
                room -= work_cost + rest;
                break;
            }
            int64_t piece = std::min(room - work_cost, rest - min_chunk);
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

void cut(const std::vector<int64_t>& lengths, int64_t workers, int64_t min_chunk, int64_t work_cost,
         std::vector<Piece>& pieces, Ints& indptr) {
    int64_t total = work_cost * static_cast<int64_t>(lengths.size());
    for (int64_t length : lengths) total += length;
    int64_t low = std::max<int64_t>((total + workers - 1) / workers, 1), high = low, step = 1;
    auto fits = [&](int64_t bound) {
        return share_out(lengths, workers, min_chunk, work_cost, bound, [](auto...) {}, [] {});
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
        lengths, workers, min_chunk, work_cost, high,
        [&](size_t item, int64_t begin, int64_t end) {
            pieces.push_back({static_cast<int32_t>(item), static_cast<int32_t>(begin), static_cast<int32_t>(end)});
        },
        [&] { indptr.push_back(static_cast<int32_t>(pieces.size())); });
    indptr.resize(workers + 1, static_cast<int32_t>(pieces.size()));
}

}  // namespace dagengine::planner
