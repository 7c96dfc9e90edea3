// The planner: spans of many sequences -> row-masked query tiles, their walks, equal shares of them, merge lists.
// Knows integers only; no Python, no tensors. fused/plan.py has the format, fused/planner_twin.py the method, step by
// step: both give exactly the same arrays.
#pragma once

#include <cstdint>
#include <vector>

#include "buffer.h"

namespace dagengine::planner {

using Ints = std::vector<int32_t>;

struct Span {
    int32_t list, start, stop, stored, delta;
};

struct Entry {
    int32_t page, rows, pos0, run;
};

struct Run {
    int32_t delta, vec;
};

struct Work {
    int32_t tile, head, begin, end, part;
};

struct Tail {
    int32_t entry, room, stride;
};

constexpr Tail NO_TAIL{-1, 0, 1};
constexpr int32_t OWNER_SHIFT = 8;  // of an entry's rows

// A batch: the arrays of SpanTable (fused/spans.py), which outlive the planning.
struct Batch {
    const int32_t* q_indptr;
    int64_t sequences;
    const int64_t* q_positions;
    int64_t rows;
    const int32_t* list_indptr;
    int64_t lists;
    const int32_t* list_pages;
    int64_t pages;
    const int32_t* span_indptr;
    const Span* spans;
    int64_t num_spans;
    int64_t page_size;
};

// PAGE, LO, HI, STORED, DELTA of a SegmentTable.
struct Extent {
    int32_t page, lo, hi, stored, delta;
};

// The spans and page lists of a segment table's extents.
struct Spans {
    Ints list_indptr, list_pages, span_indptr;
    std::vector<Span> spans;
};

struct Parameters {
    int64_t group, heads;
    std::vector<int64_t> heights, workers;
    int64_t boxes;
    int64_t window;  // 0: none
    int64_t min_chunk, work_cost, run_cost;
    double wide_cost;
    bool owners;
    int64_t invariant_chunk;  // 0: not batch-invariant
};

// Pages that each sequence will grow into: indptr [sequences + 1], or null where the plan is for one step.
struct Reserve {
    const int32_t* indptr = nullptr;
    const int32_t* pages = nullptr;
};

struct Class {
    int64_t height;
    int64_t slots;
    Ints tile_rows;
    Buffer<Work> works;
    Ints work_indptr;
};

struct Plan {
    Buffer<Entry> entries;
    Buffer<Run> runs;
    Buffer<int32_t> deltas;
    std::vector<Class> classes;
    Buffer<int32_t> merge_rows, merge_indptr, merge_parts;
    std::vector<Tail> tails;
    int64_t num_parts = 0, tokens_read = 0, tokens_unique = 0;
};

// Whether the batch is one that SpanTable.validate accepts.
bool valid(const Batch& batch);

// A valid batch -> its plan.
Plan plan(const Batch& batch, const Parameters& parameters, const Reserve& reserve);

// The same for parameters with an invariant_chunk.
Plan plan_alone(const Batch& batch, const Parameters& parameters, const Reserve& reserve);

// As to_spans of fused/spans.py; false where an extent is not one that SegmentTable.validate accepts.
bool find_spans(const int32_t* extent_indptr, int64_t sequences, const Extent* extents, int64_t page_size,
                int64_t num_pages, Spans& found);

// A head of a query tile: KV tiles begin .. end - 1.
struct Item {
    int64_t begin, end;
    int64_t walk;  // where the walk begins that it is of
    int64_t kin;   // that of the first item that reads what it reads
};

// A stretch of an item, from its begin on.
struct Piece {
    int32_t item, begin, end;
};

// Shares of the items for the workers, as planner_twin.share: the items of the query tiles in order, `heads` of each.
// turns[k] is what the changes of run up to KV tile k cost.
void share(const std::vector<Item>& items, const int64_t* turns, int64_t heads, int64_t workers,
           const Parameters& parameters, Buffer<Piece>& pieces, Ints& indptr);

}  // namespace dagengine::planner
