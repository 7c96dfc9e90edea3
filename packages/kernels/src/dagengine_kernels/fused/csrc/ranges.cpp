// Spans -> units, tracks, and the ranges between the ends of what is seen.
#include "ranges.h"

#include <algorithm>

namespace dagengine::planner {

namespace {

constexpr size_t FEW_ENDS = 32;

// Field by field: compilers bring a whole struct together in vector registers, which takes longer.
inline void enter(Seen* piece, int32_t track, int32_t start, int32_t stop, int32_t delta) {
    piece->track = track;
    piece->start = start;
    piece->stop = stop;
    piece->delta = delta;
    piece->first_range = track;
    piece->last_range = track + 1;
}

}  // namespace

void Ranges::find(const Batch& batch, int64_t window, const Reserve& reserve, int64_t slots) {
    find_units(batch, window, reserve, slots);
    find_ranges();
}

void Ranges::find_units(const Batch& batch, int64_t window, const Reserve& reserve, int64_t slots) {
    const int64_t size = batch.page_size;
    const size_t most = batch.num_spans + batch.sequences;  // a growing tail is a piece more
    first.assign(batch.lists, -1);
    tracks.resize(most);
    seen.resize(most);
    units.clear();
    long_units.clear();
    long_seen.clear();
    plain = true;
    Track* const all = tracks.data();
    int32_t* const track_of_list = first.data();
    bool alone = true;  // whether each list is in one track
    int32_t num_tracks = 0;
    int64_t num_seen = 0;
    for (int64_t b = 0; b < batch.sequences; ++b) {
        Unit unit{batch.q_indptr[b], batch.q_indptr[b + 1] - batch.q_indptr[b], 0, 0, 0, 0};
        const bool is_long = unit.size > slots;
        plain = plain && unit.size && !is_long;
        const int32_t first_span = batch.span_indptr[b], end_span = batch.span_indptr[b + 1];
        if (unit.size == 0 || first_span == end_span) continue;
        if (is_long) long_seen.resize(long_seen.size() + end_span - first_span);
        Seen* const mine = is_long ? long_seen.data() + long_seen.size() - (end_span - first_span) : seen.data() + num_seen;
        Seen* piece = mine;
        const int64_t position = batch.q_positions[unit.first_row];
        const bool grows = reserve.indptr && unit.size == 1;
        bool whole = true;
        int64_t length = 0;
        for (int32_t j = first_span; j < end_span; ++j) {
            const Span& span = batch.spans[j];
            const int32_t base = span.stored - span.start;
            const int64_t view = int64_t{base} + span.delta;
            int64_t begin = span.start, end = span.stop, tail = end;
            if (window) begin = std::max(begin, position - window + 1 - view);
            if (!grows)
                end = std::min(end, position + unit.size - view);
            else if (j == end_span - 1)
                end = tail = std::max(int64_t{span.start}, (span.stop - 1) / size * size);
            whole &= begin == span.start && end == span.stop;
            if (begin < end) {
                const auto start = static_cast<int32_t>(begin), stop = static_cast<int32_t>(end);
                int32_t* link = &track_of_list[span.list];
                while (*link >= 0 && all[*link].base != base) {
                    alone = false;
                    link = &all[*link].next;
                }
                const int32_t track = *link;
                if (track >= 0) {
                    all[track].count += !is_long;
                    all[track].alike &= all[track].start == start && all[track].stop == stop;
                    enter(piece++, track, start, stop, span.delta);
                } else {
                    *link = num_tracks;
                    enter(piece++, num_tracks, start, stop, span.delta);
                    all[num_tracks++] = {span.list, base, -1, -1, start, stop, !is_long, true};
                }
                length += end - begin;
            }
            if (tail < span.stop) {
                const auto start = static_cast<int32_t>(tail);
                enter(piece++, num_tracks, start, span.stop, span.delta);
                all[num_tracks++] = {span.list, base, static_cast<int32_t>(b), -1, start, span.stop, 1, true};
                length += span.stop - tail;
            }
        }
        plain = plain && whole;
        unit.length = unit.distinct = length;
        if (is_long) {
            unit.first_piece = mine - long_seen.data();
            unit.last_piece = piece - long_seen.data();
            long_seen.resize(unit.last_piece);
        } else {
            unit.first_piece = num_seen;
            num_seen = unit.last_piece = piece - seen.data();
        }
        if (unit.first_piece < unit.last_piece) (is_long ? long_units : units).push_back(unit);
    }
    plain = plain && alone;
    tracks.resize(num_tracks);
    seen.resize(num_seen);
}

void Ranges::find_ranges() {
    ranges.resize(tracks.size());
    members.resize(seen.size());
    next.resize(tracks.size());
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
    at.resize(other);  // pieces of the tracks that are not alike
    Range* const all = ranges.data();
    int32_t* const units_of = members.data();
    for (size_t u = 0; u < units.size(); ++u) {
        const auto unit = static_cast<int32_t>(u);
        for (int64_t i = units[u].first_piece; i < units[u].last_piece; ++i) {
            Range& range = all[seen[i].track];
            if (range.first_member < 0) {
                at[next[seen[i].track]++] = {static_cast<int32_t>(i), unit};
                continue;
            }
            const int32_t member = range.last_member++;
            units_of[member] = unit;
            if (member > range.first_member && units_of[member - 1] == unit)
                units[u].distinct -= range.stop - range.start;
        }
    }
    members.resize(alike);
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
        tokens[i] = seen[begin[i].piece].start;
        tokens[count + i] = seen[begin[i].piece].stop;
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
            const bool behind = all[i] > reached;
            place[i] += behind;
            following = std::min(following, behind ? all[i] : last);
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
        Seen& one = seen[begin[i].piece];
        const int32_t unit = begin[i].unit, first_range = order[starts[i]];
        const int32_t last_range = first_range + stops[i] - starts[i];
        one.first_range = first_range;
        one.last_range = last_range;
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
