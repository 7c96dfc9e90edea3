// What a batch's sequences share: units, tracks and ranges, as planner_twin.py explains them.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "planner.h"

namespace dagengine::planner {

struct Unit {
    int64_t first_row, size, first_piece, last_piece;
    int64_t length;    // tokens that it sees, each as often as it sees it
    int64_t distinct;  // each once
};

// What a unit sees of a track at one delta: ranges first_range .. last_range - 1.
struct Seen {
    int32_t unit, track, start, stop, delta, first_range, last_range;

    Seen(int32_t unit, int32_t track, int64_t start, int64_t stop, int32_t delta)
        : unit(unit),
          track(track),
          start(static_cast<int32_t>(start)),
          stop(static_cast<int32_t>(stop)),
          delta(delta),
          first_range(0),
          last_range(0) {}
};

struct Track {
    int32_t list, base;
    int32_t tail_of;  // the sequence whose growing tail it is, or -1
    int32_t next;     // the next track of the list, or -1
};

struct Range {
    int32_t track, start, stop, first_member, last_member;

    Range(int32_t track, int32_t start, int32_t stop, int32_t first_member, int32_t last_member)
        : track(track), start(start), stop(stop), first_member(first_member), last_member(last_member) {}
};

struct Member {
    int32_t unit, delta;
};

// Found for one batch after another; the vectors keep their memory from one to the next.
class Ranges {
  public:
    std::vector<Track> tracks;
    std::vector<Unit> units;       // those that share tiles
    std::vector<Unit> long_units;  // those that are cut into chunks
    std::vector<Seen> seen, long_seen;
    std::vector<Range> ranges;
    std::vector<Member> members;

    // `slots`: the rows of the highest tile.
    void find(const Batch& batch, int64_t window, const Reserve& reserve, int64_t slots);

    // Distinct tokens that the batch lists.
    int64_t tokens_unique(const Batch& batch);

  private:
    bool plain = false;  // whether the ranges are all that the batch lists, each once
    Ints first, next, at, ends, count, order;
    std::vector<std::pair<int32_t, int32_t>> listed;

    int32_t track_of(int32_t list, int32_t base);
    void find_units(const Batch& batch, int64_t window, const Reserve& reserve, int64_t slots);
    void find_ranges();
    void add_range(int32_t track, const int32_t* begin, const int32_t* end);
    void add_ranges(int32_t track, const int32_t* begin, const int32_t* end);
};

}  // namespace dagengine::planner
