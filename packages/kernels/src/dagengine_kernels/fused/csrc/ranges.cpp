// Spans -> units, tracks, and the ranges between the ends of what is seen.
#include "ranges.h"

#include <algorithm>

namespace dagengine::planner {

void Ranges::find(const Batch& batch, int64_t window, const Reserve& reserve, int64_t slots) {
    find_units(batch, window, reserve, slots);
    find_ranges();
}

int32_t Ranges::track_of(int32_t list, int32_t base) {
    int32_t* link = &first[list];
    while (*link >= 0) {
        if (tracks[*link].base == base) return *link;
        plain = false;
        link = &tracks[*link].next;
    }
    const auto found = static_cast<int32_t>(tracks.size());
    *link = found;
    tracks.push_back({list, base, -1, -1});
    return found;
}

void Ranges::find_units(const Batch& batch, int64_t window, const Reserve& reserve, int64_t slots) {
    const int64_t size = batch.page_size;
    first.assign(batch.lists, -1);
    tracks.clear();
    tracks.reserve(batch.num_spans + batch.sequences);
    units.clear();
    long_units.clear();
    long_seen.clear();
    seen.clear();
    seen.reserve(batch.num_spans + batch.sequences);
    plain = true;
    for (int64_t b = 0; b < batch.sequences; ++b) {
        Unit unit{batch.q_indptr[b], batch.q_indptr[b + 1] - batch.q_indptr[b], 0, 0, 0, 0};
        const bool is_long = unit.size > slots;
        plain = plain && unit.size && !is_long;
        if (unit.size == 0) continue;
        auto& mine = is_long ? long_seen : seen;
        const auto number = static_cast<int32_t>(is_long ? long_units.size() : units.size());
        unit.first_piece = static_cast<int64_t>(mine.size());
        const int64_t position = batch.q_positions[unit.first_row];
        const int32_t end_span = batch.span_indptr[b + 1];
        const bool grows = reserve.indptr && unit.size == 1;
        bool whole = true;
        int64_t length = 0;
        for (int32_t j = batch.span_indptr[b]; j < end_span; ++j) {
            const Span span = batch.spans[j];
            const int32_t base = span.stored - span.start;
            const int64_t view = int64_t{base} + span.delta;
            int64_t begin = span.start, end = span.stop, tail = span.stop;
            if (window) begin = std::max(begin, position - window + 1 - view);
            if (!grows)
                end = std::min(end, position + unit.size - view);
            else if (j == end_span - 1)
                end = tail = std::max(int64_t{span.start}, (span.stop - 1) / size * size);
            whole &= begin == span.start && end == span.stop;
            if (begin < end) {
                int32_t track = first[span.list];
                if (track < 0 || tracks[track].base != base) track = track_of(span.list, base);
                mine.emplace_back(number, track, begin, end, span.delta);
                length += end - begin;
            }
            if (tail < span.stop) {
                mine.emplace_back(number, static_cast<int32_t>(tracks.size()), tail, span.stop, span.delta);
                length += span.stop - tail;
                tracks.push_back({span.list, base, static_cast<int32_t>(b), -1});
            }
        }
        plain = plain && whole;
        unit.length = unit.distinct = length;
        unit.last_piece = static_cast<int64_t>(mine.size());
        if (unit.first_piece < unit.last_piece) (is_long ? long_units : units).push_back(unit);
    }
}

void Ranges::find_ranges() {
    first.assign(tracks.size() + 1, 0);
    for (const Seen& one : seen) ++first[one.track + 1];
    for (size_t t = 0; t < tracks.size(); ++t) first[t + 1] += first[t];
    next.assign(first.begin(), first.end() - 1);
    at.resize(seen.size());
    for (size_t i = 0; i < seen.size(); ++i) at[next[seen[i].track]++] = static_cast<int32_t>(i);
    members.clear();
    members.reserve(seen.size());
    ranges.clear();
    ranges.reserve(tracks.size());
    for (size_t t = 0; t < tracks.size(); ++t) {
        const int32_t* const begin = at.data() + first[t];
        const int32_t* const end = at.data() + first[t + 1];
        if (begin == end) continue;
        const int32_t start = seen[*begin].start, stop = seen[*begin].stop;
        bool one = true;
        for (const int32_t* i = begin; i != end; ++i)
            one = one && seen[*i].start == start && seen[*i].stop == stop;
        if (one)
            add_range(static_cast<int32_t>(t), begin, end);
        else
            add_ranges(static_cast<int32_t>(t), begin, end);
    }
}

// The range of a track of which everyone sees the same.
void Ranges::add_range(int32_t track, const int32_t* begin, const int32_t* end) {
    const auto range = static_cast<int32_t>(ranges.size()), first_member = static_cast<int32_t>(members.size());
    const int32_t start = seen[*begin].start, stop = seen[*begin].stop;
    int32_t previous = -1;
    for (const int32_t* i = begin; i != end; ++i) {
        Seen& one = seen[*i];
        one.first_range = range;
        one.last_range = range + 1;
        members.push_back({one.unit, one.delta});
        if (one.unit == previous) units[one.unit].distinct -= stop - start;
        previous = one.unit;
    }
    ranges.emplace_back(track, start, stop, first_member, static_cast<int32_t>(members.size()));
}

void Ranges::add_ranges(int32_t track, const int32_t* begin, const int32_t* end) {
    // Counting the ends in front of a token beats a search as long as they are few.
    auto place = [&](int32_t token) {
        if (ends.size() > 32)
            return static_cast<int32_t>(std::lower_bound(ends.begin(), ends.end(), token) - ends.begin());
        int32_t before = 0;
        for (int32_t one : ends) before += one < token;
        return before;
    };
    ends.clear();
    for (const int32_t* i = begin; i != end; ++i)
        for (int32_t token : {seen[*i].start, seen[*i].stop}) {
            const size_t found = place(token);
            if (found == ends.size() || ends[found] != token) ends.insert(ends.begin() + found, token);
        }
    count.assign(ends.size(), 0);
    for (const int32_t* i = begin; i != end; ++i) {
        Seen& one = seen[*i];
        one.first_range = place(one.start);
        one.last_range = place(one.stop);
        for (int32_t r = one.first_range; r < one.last_range; ++r) ++count[r];
    }
    auto member = static_cast<int32_t>(members.size());
    order.resize(ends.size());  // stretch between ends -> range; those that nobody sees are none
    for (size_t r = 0; r < ends.size(); ++r) {
        order[r] = static_cast<int32_t>(ranges.size());
        if (count[r]) ranges.emplace_back(track, ends[r], ends[r + 1], member, member);
        member += count[r];
    }
    members.resize(member);
    for (const int32_t* i = begin; i != end; ++i) {
        Seen& one = seen[*i];
        const int32_t length = one.last_range - one.first_range;
        one.first_range = order[one.first_range];
        one.last_range = one.first_range + length;
        for (int32_t r = one.first_range; r < one.last_range; ++r) {
            Range& range = ranges[r];
            if (range.last_member > range.first_member && members[range.last_member - 1].unit == one.unit)
                units[one.unit].distinct -= range.stop - range.start;
            members[range.last_member++] = {one.unit, one.delta};
        }
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
