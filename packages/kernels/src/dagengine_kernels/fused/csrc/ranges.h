// What a batch's sequences share: units, tracks and ranges, as planner_twin.py explains them.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "buffer.h"
#include "planner.h"

namespace dagengine::planner {

struct Unit {
    int64_t first_row, size, first_piece, last_piece;
    int64_t length;    // tokens that it sees, each as often as it sees it
    int64_t distinct;  // each once
    int64_t times;     // ranges that it sees, each as often as it sees it
};

// What a unit sees of a track at one delta. Of a unit that shares tiles `where` is the range that it is, or ~i where it
// is cut into several: those of cuts[i]. Of others it is the track.
struct Seen {
    int32_t where, delta;
};

struct Ends {
    int32_t start, stop;
};

struct Track {
    int32_t list, base;
    int32_t tail_of;      // the sequence whose growing tail it is, or -1
    int32_t next;         // the next track of the list, or -1
    int32_t start, stop;  // of the piece that was found first
    int32_t count;        // pieces of units that share tiles
    bool alike;           // whether all pieces have this start and stop
};

// Range t is all of track t where its pieces are alike (else nothing); those of other tracks come behind.
struct Range {
    int32_t track, start, stop, first_member, last_member;
};

// Found for one batch after another; the vectors keep their memory from one to the next.
class Ranges {
  public:
    Buffer<Track> tracks;
    std::vector<Unit> units;       // those that share tiles
    std::vector<Unit> long_units;  // those that are cut into chunks
    Buffer<Seen> seen;
    Buffer<Ends> ends_of;  // of each piece
    Buffer<Range> ranges;
    Buffer<int32_t> members;  // units that see a range, ascending; each as often as it sees it

    // `slots`: the rows of the highest tile.
    void find(const Batch& batch, int64_t window, const Reserve& reserve, int64_t slots);

    template <typename Visit>
    void each_range(const Seen& piece, Visit&& visit) const {
        if (piece.where >= 0) {
            visit(piece.where);
        } else {
            for (int32_t r = cuts[~piece.where].first; r < cuts[~piece.where].last; ++r) visit(r);
        }
    }

    // Distinct tokens that the batch lists.
    int64_t tokens_unique(const Batch& batch);

  private:
    struct Place {
        int32_t piece, unit;
    };

    struct Stretch {
        int32_t first, last;  // ranges first .. last - 1
    };

    bool plain = false;  // whether the ranges are all that the batch lists, each once
    int32_t num_tracks = 0;
    Buffer<Stretch> cuts;
    Ints first, next, ends, order;
    Buffer<Place> at;
    Buffer<int32_t> tokens, places;
    std::vector<std::pair<int32_t, int32_t>> listed;

    void find_units(const Batch& batch, int64_t window, const Reserve& reserve, int64_t slots);
    void find_pieces(const Batch& batch, int64_t b, int64_t window, bool grows, bool is_long, Unit& unit);
    void find_ranges();
    void add_ranges(int32_t track, const Place* begin, const Place* end);
    void find_ends(const Place* begin, const Place* end);
};

}  // namespace dagengine::planner
