// Greedy clusters of units that see much of the same: which of them read together in one query tile.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ranges.h"

namespace dagengine::planner {

struct Cluster {
    int64_t first, last;  // into Clusters::units, ascending there
    int64_t union_tokens, rows;
    // The units that were chosen first, as far as the lowest tile holds them, and the longest of the others.
    int64_t head_rows, head_tokens, longest_other;
};

// Found for one batch after another; the vectors keep their memory from one to the next.
class Clusters {
  public:
    Ints units;

    // `lowest`: the rows of the lowest tile.
    void begin(const Ranges& ranges, int64_t lowest) {
        in = &ranges;
        head_cap = lowest;
        units.clear();
        gain.assign(in->units.size(), 0);
        covered.assign(in->ranges.size(), 0);
        stamp = 0;
    }

    // Appends clusters of at most `cap` rows of `chosen` units to `made`.
    void find(const int32_t* chosen, int64_t count, int64_t cap, std::vector<Cluster>& made) {
        left.resize(count);
        for (int64_t i = 0; i < count; ++i) {
            const Unit& unit = in->units[chosen[i]];
            left[i] = {unit.length, chosen[i], static_cast<int32_t>(unit.size)};
        }
        std::sort(left.begin(), left.end(), [](const Candidate& a, const Candidate& b) {
            return a.length != b.length ? a.length > b.length : a.unit < b.unit;
        });
        while (!left.empty()) made.push_back(take(cap));
    }

  private:
    static constexpr int64_t MIN_GAIN = 64;
    static constexpr int64_t MIN_GAIN_SHARE = 8;

    struct Candidate {
        int64_t length;
        int32_t unit, size;
    };

    const Ranges* in = nullptr;
    int64_t head_cap = 0;
    std::vector<int64_t> gain;
    std::vector<Candidate> left;  // the longest first
    std::vector<uint32_t> covered;  // ranges, by the stamp of the cluster that covers them
    uint32_t stamp = 0;

    Cluster take(int64_t cap) {
        ++stamp;
        for (const Candidate& one : left) gain[one.unit] = 0;
        Cluster made{static_cast<int64_t>(units.size()), 0, 0, 0, 0, 0, 0};
        bool head = true;
        size_t best = 0;
        while (best < left.size()) {
            const Candidate taken = left[best];
            left.erase(left.begin() + best);
            units.push_back(taken.unit);
            made.rows += taken.size;
            head = head && made.rows <= head_cap;
            // One whose tokens are all covered brings none.
            if (gain[taken.unit] != taken.length) made.union_tokens += cover(taken.unit);
            if (head) {
                made.head_rows = made.rows;
                made.head_tokens = made.union_tokens;
            } else {
                made.longest_other = std::max(made.longest_other, in->units[taken.unit].distinct);
            }
            best = made.rows == cap ? left.size() : next(cap - made.rows);
        }
        made.last = static_cast<int64_t>(units.size());
        std::sort(units.begin() + made.first, units.end());
        return made;
    }

    // The place in `left` of the unit that gains most, of those that fit in and gain enough; its end where none does.
    size_t next(int64_t free) const {
        size_t best = left.size();
        int64_t most = MIN_GAIN;
        for (size_t i = 0; i < left.size(); ++i) {
            const Candidate& one = left[i];
            const int64_t tokens = gain[one.unit];
            if (tokens < most || one.size > free || tokens * MIN_GAIN_SHARE < one.length) continue;
            if (tokens == most && best < left.size() && one.unit > left[best].unit) continue;
            most = tokens;
            best = i;
        }
        return best;
    }

    // Tokens that a unit sees and that are not covered yet. They now are, which others gain from.
    int64_t cover(int32_t unit) {
        int64_t tokens = 0;
        for (int64_t i = in->units[unit].first_piece; i < in->units[unit].last_piece; ++i)
            in->each_range(in->seen[i], [&](int32_t r) {
                if (covered[r] == stamp) return;
                covered[r] = stamp;
                const Range& range = in->ranges[r];
                const int64_t length = range.stop - range.start;
                tokens += length;
                const int32_t* const end = in->members.data() + range.last_member;
                for (const int32_t* m = in->members.data() + range.first_member; m < end; ++m) gain[*m] += length;
            });
        return tokens;
    }
};

}  // namespace dagengine::planner
