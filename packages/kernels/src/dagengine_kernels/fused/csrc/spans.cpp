// Segment tables -> spans, and the checks that keep the planner inside its arrays.
#include <algorithm>
#include <limits>

#include "planner.h"

namespace dagengine::planner {

namespace {

constexpr int64_t LIMIT = int64_t{1} << 31;

bool rises(const int32_t* indptr, int64_t count, int64_t end) {
    if (indptr[0] != 0 || indptr[count] != end) return false;
    for (int64_t i = 0; i < count; ++i)
        if (indptr[i + 1] < indptr[i]) return false;
    return true;
}

// Where a page is in the lists; valid if `stamp` is that of the call.
struct Place {
    uint32_t stamp;
    int32_t list, index;
};

struct Places {
    std::vector<Place> of_page;
    uint32_t stamp = 0;

    void begin(int64_t num_pages) {
        if (static_cast<int64_t>(of_page.size()) < num_pages) of_page.resize(num_pages, Place{0, 0, 0});
        if (++stamp == 0) {
            std::fill(of_page.begin(), of_page.end(), Place{0, 0, 0});
            stamp = 1;
        }
    }
};

}  // namespace

bool valid(const Batch& batch) {
    if (batch.page_size < 1 || batch.page_size > std::numeric_limits<int16_t>::max()) return false;
    if (!rises(batch.q_indptr, batch.sequences, batch.rows)) return false;
    if (!rises(batch.list_indptr, batch.lists, batch.pages)) return false;
    if (!rises(batch.span_indptr, batch.sequences, batch.num_spans)) return false;
    for (int64_t i = 0; i < batch.rows; ++i)
        if (batch.q_positions[i] < 0 || batch.q_positions[i] >= LIMIT) return false;
    for (int64_t b = 0; b < batch.sequences; ++b)
        for (int64_t i = batch.q_indptr[b] + 1; i < batch.q_indptr[b + 1]; ++i)
            if (batch.q_positions[i] != batch.q_positions[i - 1] + 1) return false;
    for (int64_t i = 0; i < batch.pages; ++i)
        if (batch.list_pages[i] < 0) return false;
    for (int64_t i = 0; i < batch.num_spans; ++i) {
        const Span& span = batch.spans[i];
        if (span.list < 0 || span.list >= batch.lists) return false;
        const int64_t room = (batch.list_indptr[span.list + 1] - batch.list_indptr[span.list]) * batch.page_size;
        if (span.start < 0 || span.start >= span.stop || span.stop > room) return false;
        const int64_t length = int64_t{span.stop} - span.start, view = int64_t{span.stored} + span.delta;
        if (span.stored < 0 || span.stored + length >= LIMIT) return false;
        if (view < 0 || view + length >= LIMIT) return false;
    }
    return true;
}

bool find_spans(const int32_t* extent_indptr, int64_t sequences, const Extent* extents, int64_t page_size,
                int64_t num_pages, Spans& found) {
    static thread_local Places places;
    places.begin(num_pages);
    Place* const of_page = places.of_page.data();
    const uint32_t stamp = places.stamp;

    std::vector<int64_t> base;
    Ints size_of;
    std::vector<std::pair<int32_t, int32_t>> listed;  // (list, page) in the order in which lists grow
    found.span_indptr.assign(1, 0);
    for (int64_t b = 0; b < sequences; ++b) {
        Extent previous{-1, 0, 0, 0, 0};
        int64_t index = -1;
        for (int64_t e = extent_indptr[b]; e < extent_indptr[b + 1]; ++e) {
            const Extent& extent = extents[e];
            if (extent.page < 0 || extent.page >= num_pages) return false;
            if (extent.lo < 0 || extent.lo >= extent.hi || extent.hi > page_size) return false;
            Place& place = of_page[extent.page];
            const int64_t pos0 = int64_t{extent.stored} - extent.lo;
            bool known = place.stamp == stamp && base[place.list] + place.index * page_size == pos0;
            int64_t step = -1;
            if (previous.page >= 0 && previous.delta == extent.delta &&
                int64_t{previous.stored} + previous.hi - previous.lo == extent.stored) {
                if (extent.lo == previous.hi && extent.page == previous.page)
                    step = 0;
                else if (extent.lo == 0 && previous.hi == page_size)
                    step = 1;
            }
            previous = extent;
            if (step == 1 && !known) {
                const int32_t list = found.spans.back().list;
                if (index + 1 == size_of[list]) {
                    place = Place{stamp, list, size_of[list]++};
                    listed.emplace_back(list, extent.page);
                    known = true;
                }
            }
            if (step >= 0 && known && place.list == found.spans.back().list && place.index == index + step) {
                index += step;
                found.spans.back().stop += extent.hi - extent.lo;
                continue;
            }
            if (!known) {
                place = Place{stamp, static_cast<int32_t>(base.size()), 0};
                listed.emplace_back(place.list, extent.page);
                size_of.push_back(1);
                base.push_back(pos0);
            }
            index = place.index;
            const int64_t start = index * page_size + extent.lo;
            if (start + page_size >= LIMIT) return false;
            found.spans.push_back({place.list, static_cast<int32_t>(start),
                                   static_cast<int32_t>(start + extent.hi - extent.lo), extent.stored, extent.delta});
        }
        found.span_indptr.push_back(static_cast<int32_t>(found.spans.size()));
    }

    found.list_indptr.assign(base.size() + 1, 0);
    for (size_t l = 0; l < base.size(); ++l) found.list_indptr[l + 1] = found.list_indptr[l] + size_of[l];
    found.list_pages.resize(listed.size());
    Ints next(found.list_indptr.begin(), found.list_indptr.end() - 1);
    for (const auto& [list, page] : listed) found.list_pages[next[list]++] = page;
    return true;
}

}  // namespace dagengine::planner
