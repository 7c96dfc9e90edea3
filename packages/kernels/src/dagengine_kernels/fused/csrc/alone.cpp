// Batch-invariant plans: every sequence walks by itself and is cut at fixed places. alone_twin.py explains the steps and
// gives the same arrays.
#include <algorithm>
#include <functional>
#include <queue>
#include <tuple>
#include <utility>

#include "planner.h"

namespace dagengine::planner {

namespace {

struct Tile {
    int64_t height, first, count;           // rows of the batch
    int64_t first_piece, last_piece;        // of what it walks
};

struct Stretch {
    int32_t begin, end;  // KV tiles
};

class Alone {
  public:
    Alone(const Batch& batch, const Parameters& parameters, const Reserve& reserve)
        : batch(batch), parameters(parameters), reserve(reserve) {
        for (int64_t height : parameters.heights) slots.push_back(height / parameters.group);
    }

    Plan plan() {
        out.tails.assign(batch.sequences, NO_TAIL);
        for (int64_t b = 0; b < batch.sequences; ++b)
            if (batch.q_indptr[b] < batch.q_indptr[b + 1] && batch.span_indptr[b] < batch.span_indptr[b + 1]) walk(b);
        parts.resize(batch.rows * parameters.heads);
        direct.assign(batch.rows * parameters.heads, 0);
        for (size_t height = 0; height < slots.size(); ++height) assemble(height);
        merge();
        for (const Stretch& piece : pieces) out.tokens_read += pages_in(piece) * batch.page_size;
        out.tokens_unique = tokens_unique();
        return std::move(out);
    }

  private:
    const Batch& batch;
    const Parameters& parameters;
    const Reserve& reserve;
    std::vector<int64_t> slots;
    Plan out;
    std::vector<Tile> tiles;
    std::vector<Stretch> pieces;
    std::vector<Ints> parts;   // of each row and head
    std::vector<char> direct;  // whether a work writes it

    int32_t end_tile() const { return static_cast<int32_t>(out.entries.size() / parameters.boxes); }

    void pad() {
        while (out.entries.size() % parameters.boxes)
            out.entries.push_back({-1, 0, 0, static_cast<int32_t>(out.runs.size()) - 1});
    }

    void walk(int64_t b) {
        const int32_t begin = end_tile();
        const int64_t first_row = batch.q_indptr[b], rows = batch.q_indptr[b + 1] - first_row;
        enter(b);
        const bool grows = reserve.indptr && rows == 1;
        const auto tail = static_cast<int32_t>((out.entries.size() - 1) / parameters.boxes);
        if (grows) grow(b);
        pad();
        const int32_t end = end_tile();
        std::vector<std::pair<int64_t, int64_t>> views;
        for (int32_t tile = begin; tile < end; ++tile) views.push_back(views_of(tile));
        const int64_t position = batch.q_positions[first_row], window = parameters.window;
        for (int64_t at = 0; at < rows; at += slots.back()) {
            const int64_t count = std::min(rows - at, slots.back()), first = position + at, last = first + count - 1;
            auto sees = [&](int32_t tile) {
                if (grows && tile >= tail) return true;
                const auto& [low, high] = views[tile - begin];
                return (grows || low <= last) && (!window || high > first - window);
            };
            const auto first_piece = static_cast<int64_t>(pieces.size());
            for (int64_t part = begin; part < end; part += parameters.invariant_chunk) {
                Stretch piece{static_cast<int32_t>(part),
                              static_cast<int32_t>(std::min<int64_t>(part + parameters.invariant_chunk, end))};
                while (piece.begin < piece.end && !sees(piece.begin)) ++piece.begin;
                while (piece.begin < piece.end && !sees(piece.end - 1)) --piece.end;
                if (piece.begin < piece.end) pieces.push_back(piece);
            }
            const auto last_piece = static_cast<int64_t>(pieces.size());
            const int64_t height = count <= slots.front() ? 0 : static_cast<int64_t>(slots.size()) - 1;
            if (first_piece < last_piece) tiles.push_back({height, first_row + at, count, first_piece, last_piece});
        }
    }

    // All that the sequence lists.
    void enter(int64_t b) {
        const int64_t size = batch.page_size;
        int32_t page = -1;
        int64_t hi = -1, stored_end = -1, delta_before = 0;
        for (int32_t j = batch.span_indptr[b]; j < batch.span_indptr[b + 1]; ++j) {
            const Span& span = batch.spans[j];
            const int32_t* const pages = batch.list_pages + batch.list_indptr[span.list];
            for (int64_t index = span.start / size; index <= (span.stop - 1) / size; ++index) {
                const int64_t lo = std::max(span.start - index * size, int64_t{0});
                const int64_t end = std::min(span.stop - index * size, size);
                const int64_t pos0 = int64_t{span.stored} - span.start + index * size;
                const bool follows = page >= 0 && span.delta == delta_before && stored_end == pos0 + lo;
                if (follows && page == pages[index] && lo == hi) {
                    int32_t& rows = out.entries.back().rows;
                    rows = static_cast<int32_t>((rows & 0xFFFF) | end << 16);
                } else {
                    if (!(follows && lo == 0 && hi == size)) {
                        pad();
                        out.runs.push_back({span.delta, -1});
                    }
                    out.entries.push_back({pages[index], static_cast<int32_t>(lo | end << 16),
                                           static_cast<int32_t>(pos0), static_cast<int32_t>(out.runs.size()) - 1});
                }
                page = pages[index];
                hi = end;
                stored_end = pos0 + end;
                delta_before = span.delta;
            }
        }
    }

    // The entries that the sequence grows into, behind its last one.
    void grow(int64_t b) {
        const auto last = static_cast<int32_t>(out.entries.size()) - 1;
        const Entry entry = out.entries.back();
        int64_t pos0 = entry.pos0;
        for (int32_t i = reserve.indptr[b]; i < reserve.indptr[b + 1]; ++i) {
            pos0 += batch.page_size;
            out.entries.push_back({reserve.pages[i], 0, static_cast<int32_t>(pos0), entry.run});
        }
        const int32_t full = entry.rows >> 16 == batch.page_size;
        const int32_t room = static_cast<int32_t>(out.entries.size()) - last - full;
        if (room) out.tails[b] = {last + full, room, 1};
    }

    // The first and the last view position in a KV tile; of one that is reserved, nothing that is looked at.
    std::pair<int64_t, int64_t> views_of(int32_t tile) const {
        int64_t low = INT64_MAX, high = INT64_MIN;
        for (int64_t e = tile * parameters.boxes; e < (tile + 1) * parameters.boxes; ++e) {
            const Entry& entry = out.entries[e];
            const int32_t lo = entry.rows & 0xFFFF, hi = entry.rows >> 16;
            if (lo >= hi) continue;
            const int64_t view = int64_t{entry.pos0} + out.runs[entry.run].delta;
            low = std::min(low, view + lo);
            high = std::max(high, view + hi - 1);
        }
        return {low, high};
    }

    int64_t pages_in(const Stretch& piece) const {
        int64_t count = 0;
        for (int64_t e = piece.begin * parameters.boxes; e < piece.end * parameters.boxes; ++e)
            count += out.entries[e].rows >> 16 > (out.entries[e].rows & 0xFFFF);
        return count;
    }

    void assemble(size_t height) {
        const int64_t heads = parameters.heads;
        Class one{parameters.heights[height], slots[height], {}, {}, {}};
        std::vector<Work> items;
        int32_t number = 0;
        for (const Tile& tile : tiles) {
            if (tile.height != static_cast<int64_t>(height)) continue;
            for (int64_t slot = 0; slot < one.slots; ++slot)
                one.tile_rows.push_back(slot < tile.count ? static_cast<int32_t>(tile.first + slot) : -1);
            for (int64_t head = 0; head < heads; ++head)
                for (int64_t i = tile.first_piece; i < tile.last_piece; ++i) {
                    Work work{number, static_cast<int32_t>(head), pieces[i].begin, pieces[i].end, -1};
                    if (tile.last_piece - tile.first_piece > 1) {
                        work.part = static_cast<int32_t>(out.num_parts);
                        out.num_parts += tile.count;
                    }
                    for (int64_t slot = 0; slot < tile.count; ++slot) {
                        const int64_t key = (tile.first + slot) * heads + head;
                        if (work.part < 0)
                            direct[key] = 1;
                        else
                            parts[key].push_back(static_cast<int32_t>(work.part + slot));
                    }
                    items.push_back(work);
                }
            ++number;
        }
        if (!number) return;
        deal(items, parameters.workers[height], one);
        out.classes.push_back(std::move(one));
    }

    // Long works first; of those the query tiles that read the same KV tiles one after the other. Each to the worker
    // that has least so far.
    void deal(std::vector<Work>& items, int64_t workers, Class& one) const {
        std::sort(items.begin(), items.end(), [](const Work& a, const Work& b) {
            return std::make_tuple(a.begin - a.end, a.head, a.begin, a.tile) <
                   std::make_tuple(b.begin - b.end, b.head, b.begin, b.tile);
        });
        using Load = std::pair<int64_t, int64_t>;
        std::priority_queue<Load, std::vector<Load>, std::greater<Load>> loads;
        for (int64_t worker = 0; worker < workers; ++worker) loads.emplace(0, worker);
        std::vector<std::vector<Work>> dealt(workers);
        for (const Work& work : items) {
            const auto [load, worker] = loads.top();
            loads.pop();
            dealt[worker].push_back(work);
            const int64_t boxes = parameters.boxes;
            const int64_t changes = out.entries[(work.end - 1) * boxes].run - out.entries[work.begin * boxes].run;
            loads.emplace(load + work.end - work.begin + parameters.work_cost + parameters.run_cost * changes, worker);
        }
        one.work_indptr.assign(1, 0);
        for (const auto& mine : dealt) {
            one.works.insert(one.works.end(), mine.begin(), mine.end());
            one.work_indptr.push_back(static_cast<int32_t>(one.works.size()));
        }
    }

    void merge() {
        out.merge_indptr.push_back(0);
        for (size_t key = 0; key < parts.size(); ++key) {
            if (direct[key]) continue;
            out.merge_rows.push_back(static_cast<int32_t>(key));
            out.merge_parts.insert(out.merge_parts.end(), parts[key].begin(), parts[key].end());
            out.merge_indptr.push_back(static_cast<int32_t>(out.merge_parts.size()));
        }
    }

    // Distinct tokens of the lists that the spans name.
    int64_t tokens_unique() const {
        std::vector<std::tuple<int32_t, int32_t, int32_t>> listed;
        for (int64_t i = 0; i < batch.num_spans; ++i)
            listed.emplace_back(batch.spans[i].list, batch.spans[i].start, batch.spans[i].stop);
        std::sort(listed.begin(), listed.end());
        int64_t total = 0;
        int32_t list = -1, reached = 0;
        for (const auto& [which, start, stop] : listed) {
            const int32_t from = which == list ? std::max(start, reached) : start;
            total += std::max(stop - from, 0);
            list = which;
            reached = std::max(from, stop);
        }
        return total;
    }
};

}  // namespace

Plan plan_alone(const Batch& batch, const Parameters& parameters, const Reserve& reserve) {
    return Alone(batch, parameters, reserve).plan();
}

}  // namespace dagengine::planner
