// Spans -> units, tracks, and the ranges between the ends of what is seen.
#include "ranges.h"

#include <algorithm>

namespace dagengine::planner {

namespace {

constexpr size_t FEW_ENDS = 32;

}  // namespace

void Ranges::find(const Batch& batch, int64_t window, const Reserve& reserve, int64_t slots) {
    find_units(batch, window, reserve, slots);
    find_ranges();
}

void Ranges::find_units(const Batch& batch, int64_t window, const Reserve& reserve, int64_t slots) {
    const size_t most = batch.num_spans + batch.sequences;  // a growing tail is a piece more
    first.assign(batch.lists, -1);
    tracks.resize(most);
    seen.resize(most);
    ends_of.resize(most);
    units.clear();
    long_units.clear();
    plain = true;
    num_tracks = 0;
    int64_t num_pieces = 0;
    for (int64_t b = 0; b < batch.sequences; ++b) {
        Unit unit{batch.q_indptr[b], batch.q_indptr[b + 1] - batch.q_indptr[b], num_pieces, 0, 0, 0, 0};
        const bool is_long = unit.size > slots;
        plain = plain && unit.size && !is_long;
        if (unit.size) find_pieces(batch, b, window, reserve.indptr && unit.size == 1, is_long, unit);
        if (unit.first_piece >= unit.last_piece) continue;
        num_pieces = unit.last_piece;
        (is_long ? long_units : units).push_back(unit);
    }
    tracks.resize(num_tracks);
}

// What a sequence sees, from unit.first_piece on.
void Ranges::find_pieces(const Batch& batch, int64_t b, int64_t window, bool grows, bool is_long, Unit& unit) {
    const int64_t size = batch.page_size, position = batch.q_positions[unit.first_row], limit = position + unit.size;
    Track* const all = tracks.data();
    int32_t* const track_of_list = first.data();
    Seen* piece = seen.data() + unit.first_piece;
    Ends* ends = ends_of.data() + unit.first_piece;
    int64_t length = 0;
    const Span* const last = batch.spans + batch.span_indptr[b + 1];
    for (const Span* span = batch.spans + batch.span_indptr[b]; span < last; ++span) {
        const int32_t base = span->stored - span->start;
        const int64_t view = int64_t{base} + span->delta;
        int32_t start = span->start, stop = span->stop, tail = stop;
        if (grows || window || view + stop > limit) {
            if (!grows) stop = static_cast<int32_t>(std::max<int64_t>(start, std::min(int64_t{stop}, limit - view)));
            if (grows && span + 1 == last)
                stop = tail = std::max(start, static_cast<int32_t>((stop - 1) / size * size));
            if (window)
                start = static_cast<int32_t>(std::clamp(position - window + 1 - view, int64_t{start}, int64_t{stop}));
            plain = plain && start == span->start && stop == span->stop;
        }
        if (start < stop) {
            int32_t* link = &track_of_list[span->list];
            while (*link >= 0 && all[*link].base != base) {
                plain = false;
                link = &all[*link].next;
            }
            const int32_t number = *link;
            if (number < 0) {
                *piece++ = {num_tracks, span->delta};
                *link = num_tracks;
                all[num_tracks++] = {span->list, base, -1, -1, start, stop, !is_long, true};
            } else {
                *piece++ = {number, span->delta};
                Track& track = all[number];
                track.count += !is_long;
                track.alike = track.alike && track.start == start && track.stop == stop;
            }
            *ends++ = {start, stop};
            length += int64_t{stop} - start;
        }
        if (tail < span->stop) {
            *piece++ = {num_tracks, span->delta};
            *ends++ = {tail, span->stop};
            all[num_tracks++] = {span->list, base, static_cast<int32_t>(b), -1, tail, span->stop, 1, true};
            length += int64_t{span->stop} - tail;
        }
    }
    unit.length = unit.distinct = length;
    unit.last_piece = piece - seen.data();
    unit.times = unit.last_piece - unit.first_piece;
}

void Ranges::find_ranges() {
    ranges.resize(tracks.size());
    next.resize(tracks.size());
    cuts.clear();
    int32_t alike = 0, other = 0;
    for (size_t t = 0; t < tracks.size(); ++t) {
        const Track& track = tracks[t];
        if (track.alike) {
            ranges[t] = {static_cast<int32_t>(t), track.start, track.stop, alike, alike};
            alike += track.count;
        } else {
            ranges[t] = {static_cast<int32_t>(t), 0, 0, -1, -1};
            next[t] = other;
            other += track.count;
        }
        if (!track.count) ranges[t].stop = ranges[t].start;
    }
    members.resize(alike);
    at.resize(other);  // pieces of the tracks that are not alike
    Range* const all = ranges.data();
    int32_t* const units_of = members.data();
    for (size_t u = 0; u < units.size(); ++u) {
        const auto unit = static_cast<int32_t>(u);
        for (int64_t i = units[u].first_piece; i < units[u].last_piece; ++i) {
            Range& range = all[seen[i].where];
            if (range.first_member < 0) {
                at[next[seen[i].where]++] = {static_cast<int32_t>(i), unit};
                continue;
            }
            const int32_t member = range.last_member++;
            units_of[member] = unit;
            if (member > range.first_member && units_of[member - 1] == unit)
                units[u].distinct -= range.stop - range.start;
        }
    }
    if (!other) return;
    for (size_t t = 0; t < tracks.size(); ++t)
        if (!tracks[t].alike && tracks[t].count)
            add_ranges(static_cast<int32_t>(t), at.data() + next[t] - tracks[t].count, at.data() + next[t]);
}

// The ends of these pieces, ascending, and in `places` which of them the starts and stops of the pieces are.
void Ranges::find_ends(const Place* begin, const Place* end) {
    const size_t count = end - begin;
    tokens.resize(2 * count);
    places.assign(2 * count, 0);
    for (size_t i = 0; i < count; ++i) {
        tokens[i] = ends_of[begin[i].piece].start;
        tokens[count + i] = ends_of[begin[i].piece].stop;
    }
    ends.clear();
    const int32_t* const all = tokens.data();
    const int32_t last = *std::max_element(all, all + 2 * count);
    int32_t reached = *std::min_element(all, all + 2 * count);
    ends.push_back(reached);
    // A pass for each end beats sorting as long as they are few: it has no branches.
    while (reached != last && ends.size() < FEW_ENDS) {
        int32_t following = last;
        int32_t* const place = places.data();
        for (size_t i = 0; i < 2 * count; ++i) {
            const int32_t token = all[i], behind = token > reached ? -1 : 0;
            place[i] -= behind;
            const int32_t found = (token & behind) | (last & ~behind);
            following = found < following ? found : following;
        }
        ends.push_back(reached = following);
    }
    if (reached == last) return;
    ends.assign(all, all + 2 * count);
    std::sort(ends.begin(), ends.end());
    ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
    for (size_t i = 0; i < 2 * count; ++i)
        places[i] = static_cast<int32_t>(std::lower_bound(ends.begin(), ends.end(), all[i]) - ends.begin());
}

void Ranges::add_ranges(int32_t track, const Place* begin, const Place* end) {
    find_ends(begin, end);
    const int64_t count = end - begin;
    const int32_t *const starts = places.data(), *const stops = starts + count;
    first.assign(ends.size(), 0);  // how many pieces more, or less, there are behind each end
    for (int64_t i = 0; i < count; ++i) {
        ++first[starts[i]];
        --first[stops[i]];
    }
    auto member = static_cast<int32_t>(members.size());
    order.resize(ends.size());  // stretch between ends -> range; those that nobody sees are none
    int32_t seeing = 0;
    for (size_t r = 0; r < ends.size(); ++r) {
        order[r] = static_cast<int32_t>(ranges.size());
        seeing += first[r];
        if (seeing) ranges.push_back({track, ends[r], ends[r + 1], member, member});
        member += seeing;
    }
    members.resize(member);
    Range* const all = ranges.data();
    int32_t* const units_of = members.data();
    int32_t previous = -1;
    for (int64_t i = 0; i < count; ++i) {
        const int32_t unit = begin[i].unit, first_range = order[starts[i]];
        const int32_t last_range = first_range + stops[i] - starts[i];
        seen[begin[i].piece].where = ~static_cast<int32_t>(cuts.size());
        cuts.push_back({first_range, last_range});
        units[unit].times += last_range - first_range - 1;
        if (unit == previous)
            for (int32_t r = first_range; r < last_range; ++r)
                if (all[r].last_member > all[r].first_member && units_of[all[r].last_member - 1] == unit)
                    units[unit].distinct -= all[r].stop - all[r].start;
        for (int32_t r = first_range; r < last_range; ++r) units_of[all[r].last_member++] = unit;
        previous = unit;
    }
}

int64_t Ranges::tokens_unique(const Batch& batch) {
    int64_t total = 0;
    if (plain) {
        for (const Range& range : ranges) total += range.stop - range.start;
        return total;
    }
    first.assign(batch.lists + 1, 0);
    for (int64_t i = 0; i < batch.num_spans; ++i) ++first[batch.spans[i].list + 1];
    for (int64_t l = 0; l < batch.lists; ++l) first[l + 1] += first[l];
    next.assign(first.begin(), first.end() - 1);
    listed.resize(batch.num_spans);
    for (int64_t i = 0; i < batch.num_spans; ++i)
        listed[next[batch.spans[i].list]++] = {batch.spans[i].start, batch.spans[i].stop};
    for (int64_t l = 0; l < batch.lists; ++l) {
        const auto begin = listed.begin() + first[l], end = listed.begin() + first[l + 1];
        if (!std::is_sorted(begin, end)) std::sort(begin, end);
        int64_t reached = 0;
        for (auto one = begin; one != end; ++one) {
            const int64_t from = std::max<int64_t>(one->first, reached);
            total += std::max<int64_t>(one->second - from, 0);
            reached = std::max<int64_t>(reached, one->second);
        }
    }
    return total;
}

}  // namespace dagengine::planner
