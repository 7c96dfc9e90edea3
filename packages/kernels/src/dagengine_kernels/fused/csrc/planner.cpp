// Spans -> a plan. planner_twin.py explains each step (units, tracks, ranges, tiles, groups, shares) and gives the
// same arrays; what is done differently here is only how it is found.
#include "planner.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <tuple>

namespace dagengine::planner {

namespace {

constexpr int32_t INVISIBLE = INT32_MIN;
constexpr int64_t MIN_GAIN = 64;
constexpr int64_t MIN_GAIN_SHARE = 8;

struct Unit {
    int64_t sequence, first_row, size, first_piece, last_piece, length;
};

struct Piece4 {
    int32_t unit, track;
    int64_t start, stop;
    int32_t delta;
    int32_t first_range, last_range;
};

struct Track {
    int32_t list;
    int64_t base;
    int32_t tail_of;  // the sequence whose growing tail it is, or -1
    int32_t next;     // the next track of the list, or -1
};

struct Range {
    int32_t track;
    int64_t start, stop;
    int32_t first_member, last_member;
};

struct Member {
    int32_t unit, delta;
};

struct Tile {
    int32_t height;
    int64_t first_row, num_rows;  // into tile_rows
    int64_t begin, end;           // KV tiles
    bool masked;                  // whether `masks` of the runs are to be looked at
};

struct Cluster {
    int64_t first, last;  // into cluster_units
    int64_t union_tokens, rows;
};

// Part of a group's walk.
struct Stretch {
    int32_t group, layer, track;
    int64_t start, stop;
};

struct Group {
    int64_t vector;  // into the vectors of the tile
    uint64_t hash;
    int32_t tail;  // its growing tail's stretch, or -1
    int32_t count;
};

int64_t up(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }

class Planner {
  public:
    Planner(const Batch& batch, const Parameters& parameters, const Reserve& reserve)
        : batch(batch), parameters(parameters), reserve(reserve) {
        for (int64_t height : parameters.heights) slots.push_back(height / parameters.group);
        out.tails.assign(batch.sequences, Tail{-1, 0});
    }

    Plan run() {
        find_units();
        find_ranges();
        for (const Unit& unit : long_units) walk_long(unit);
        pack();
        assemble();
        out.tokens_unique = tokens_unique();
        return std::move(out);
    }

  private:
    const Batch& batch;
    const Parameters& parameters;
    const Reserve& reserve;
    Plan out;
    std::vector<int64_t> slots;

    std::vector<Track> tracks;
    std::vector<Unit> units, long_units;
    std::vector<Piece4> pieces, long_pieces;
    std::vector<Range> ranges;
    std::vector<Member> members;

    std::vector<int64_t> gain;
    std::vector<int32_t> cluster_units, left;
    std::vector<uint32_t> range_stamp, unit_stamp;
    uint32_t stamp = 0;

    std::vector<Tile> tiles;
    Ints tile_rows;
    Ints tile_run;               // run of each KV tile
    std::vector<uint64_t> masks; // slots that see a run, words() per run

    Ints slot_of, times, vectors, table, order;
    std::vector<Stretch> stretches, sorted;
    std::vector<Group> groups;

    int64_t words() const { return up(slots.back(), 64); }

    int32_t track_of(Ints& first_track, int32_t list, int64_t base) {
        int32_t* link = &first_track[list];
        while (*link >= 0) {
            if (tracks[*link].base == base) return *link;
            link = &tracks[*link].next;
        }
        const auto found = static_cast<int32_t>(tracks.size());
        *link = found;
        tracks.push_back({list, base, -1, -1});
        return found;
    }

    void find_units() {
        const int64_t size = batch.page_size, window = parameters.window;
        Ints first_track(batch.lists, -1);
        tracks.reserve(batch.num_spans + batch.sequences);
        pieces.reserve(batch.num_spans + batch.sequences);
        for (int64_t b = 0; b < batch.sequences; ++b) {
            Unit unit{b, batch.q_indptr[b], batch.q_indptr[b + 1] - batch.q_indptr[b], 0, 0, 0};
            if (unit.size == 0) continue;
            const bool is_long = unit.size > slots.back();
            auto& mine = is_long ? long_pieces : pieces;
            const auto number = static_cast<int32_t>(is_long ? long_units.size() : units.size());
            unit.first_piece = mine.size();
            const int64_t first = batch.q_positions[unit.first_row];
            const int32_t end_span = batch.span_indptr[b + 1];
            const bool grows = reserve.indptr && unit.size == 1;
            for (int32_t j = batch.span_indptr[b]; j < end_span; ++j) {
                const Span& span = batch.spans[j];
                const int64_t start = span.start, stop = span.stop, base = int64_t{span.stored} - start;
                const int64_t view = base + span.delta;
                const int64_t tail = grows && j == end_span - 1 ? std::max(start, (stop - 1) / size * size) : stop;
                const int64_t end = grows ? tail : std::min(tail, first + unit.size - view);
                const int64_t begin = window ? std::max(start, first - window + 1 - view) : start;
                if (begin < end)
                    mine.push_back({number, track_of(first_track, span.list, base), begin, end, span.delta, 0, 0});
                if (tail < stop) {
                    mine.push_back({number, static_cast<int32_t>(tracks.size()), tail, stop, span.delta, 0, 0});
                    tracks.push_back({span.list, base, static_cast<int32_t>(b), -1});
                }
            }
            unit.last_piece = mine.size();
            if (unit.first_piece == unit.last_piece) continue;
            for (int64_t i = unit.first_piece; i < unit.last_piece; ++i) unit.length += mine[i].stop - mine[i].start;
            (is_long ? long_units : units).push_back(unit);
        }
    }

    void find_ranges() {
        Ints first(tracks.size() + 1, 0), at(pieces.size());
        for (const Piece4& piece : pieces) ++first[piece.track + 1];
        for (size_t t = 0; t < tracks.size(); ++t) first[t + 1] += first[t];
        {
            Ints next(first.begin(), first.end() - 1);
            for (size_t i = 0; i < pieces.size(); ++i) at[next[pieces[i].track]++] = static_cast<int32_t>(i);
        }
        members.reserve(pieces.size());
        ranges.reserve(tracks.size());
        std::vector<int64_t> ends;
        Ints count;
        for (size_t t = 0; t < tracks.size(); ++t) {
            const int32_t* const begin = at.data() + first[t];
            const int32_t* const end = at.data() + first[t + 1];
            if (begin == end) continue;
            const auto track = static_cast<int32_t>(t);
            const int64_t start = pieces[*begin].start, stop = pieces[*begin].stop;
            const bool one = std::all_of(begin, end, [&](int32_t i) {
                return pieces[i].start == start && pieces[i].stop == stop;
            });
            const auto first_range = static_cast<int32_t>(ranges.size());
            const auto first_member = static_cast<int32_t>(members.size());
            if (one) {
                for (const int32_t* i = begin; i != end; ++i) {
                    members.push_back({pieces[*i].unit, pieces[*i].delta});
                    pieces[*i].first_range = first_range;
                    pieces[*i].last_range = first_range + 1;
                }
                ranges.push_back({track, start, stop, first_member, static_cast<int32_t>(members.size())});
                continue;
            }
            ends.clear();
            for (const int32_t* i = begin; i != end; ++i) {
                ends.push_back(pieces[*i].start);
                ends.push_back(pieces[*i].stop);
            }
            std::sort(ends.begin(), ends.end());
            ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
            count.assign(ends.size(), 0);
            for (const int32_t* i = begin; i != end; ++i) {
                Piece4& piece = pieces[*i];
                auto place = [&](int64_t token) {
                    return static_cast<int32_t>(std::lower_bound(ends.begin(), ends.end(), token) - ends.begin());
                };
                piece.first_range = place(piece.start);
                piece.last_range = place(piece.stop);
                for (int32_t r = piece.first_range; r < piece.last_range; ++r) ++count[r];
            }
            int32_t member = first_member;
            order.assign(ends.size(), 0);  // stretch between ends -> range; those that nobody sees are none
            for (size_t r = 0; r + 1 < ends.size(); ++r) {
                order[r] = static_cast<int32_t>(ranges.size());
                if (count[r]) ranges.push_back({track, ends[r], ends[r + 1], member, member});
                member += count[r];
            }
            order[ends.size() - 1] = static_cast<int32_t>(ranges.size());
            members.resize(member);
            for (const int32_t* i = begin; i != end; ++i) {
                Piece4& piece = pieces[*i];
                const int32_t length = piece.last_range - piece.first_range;
                piece.first_range = order[piece.first_range];
                piece.last_range = piece.first_range + length;
                for (int32_t r = piece.first_range; r < piece.last_range; ++r)
                    members[ranges[r].last_member++] = {piece.unit, piece.delta};
            }
        }
        range_stamp.assign(ranges.size(), 0);
        unit_stamp.assign(units.size(), 0);
        gain.assign(units.size(), 0);
        slot_of.assign(units.size(), -1);
        times.assign(units.size(), 0);
    }

    // Greedy clusters of `chosen` units, appended to `clusters`; their units go to cluster_units.
    void cluster(const int32_t* chosen, int64_t count, int64_t cap, std::vector<Cluster>& clusters) {
        left.assign(chosen, chosen + count);
        std::sort(left.begin(), left.end(), [&](int32_t a, int32_t b) {
            return units[a].length != units[b].length ? units[a].length > units[b].length : a < b;
        });
        while (!left.empty()) {
            ++stamp;
            for (int32_t u : left) gain[u] = 0;
            const auto first = static_cast<int64_t>(cluster_units.size());
            int64_t free = cap, covered = 0;
            size_t best = 0;
            while (best < left.size()) {
                const int32_t u = left[best];
                left.erase(left.begin() + best);
                cluster_units.push_back(u);
                free -= units[u].size;
                for (int64_t i = units[u].first_piece; i < units[u].last_piece; ++i)
                    for (int32_t r = pieces[i].first_range; r < pieces[i].last_range; ++r) {
                        if (range_stamp[r] == stamp) continue;
                        range_stamp[r] = stamp;
                        const Range& range = ranges[r];
                        covered += range.stop - range.start;
                        for (int32_t m = range.first_member; m < range.last_member; ++m)
                            gain[members[m].unit] += range.stop - range.start;
                    }
                best = left.size();
                if (!free) break;
                for (size_t i = 0; i < left.size(); ++i) {
                    const int32_t v = left[i];
                    if (units[v].size > free || gain[v] < MIN_GAIN || gain[v] * MIN_GAIN_SHARE < units[v].length)
                        continue;
                    if (best == left.size() || gain[v] > gain[left[best]] ||
                        (gain[v] == gain[left[best]] && v < left[best]))
                        best = i;
                }
            }
            std::sort(cluster_units.begin() + first, cluster_units.end());
            clusters.push_back({first, static_cast<int64_t>(cluster_units.size()), covered, cap - free});
        }
    }

    void pack() {
        Ints all(units.size());
        for (size_t u = 0; u < units.size(); ++u) all[u] = static_cast<int32_t>(u);
        std::vector<Cluster> clusters, split;
        cluster(all.data(), static_cast<int64_t>(all.size()), slots.back(), clusters);
        Ints mine;
        for (const Cluster& one : clusters) {
            mine.assign(cluster_units.begin() + one.first, cluster_units.begin() + one.last);
            const auto highest = static_cast<int32_t>(slots.size()) - 1;
            if (one.rows <= slots.front()) {
                walk_tile(mine.data(), static_cast<int64_t>(mine.size()), 0);
                continue;
            }
            if (highest && std::all_of(mine.begin(), mine.end(),
                                       [&](int32_t u) { return units[u].size <= slots.front(); })) {
                split.clear();
                cluster(mine.data(), static_cast<int64_t>(mine.size()), slots.front(), split);
                int64_t read = 0;
                for (const Cluster& part : split) read += part.union_tokens;
                if (static_cast<double>(one.union_tokens) * parameters.wide_cost > static_cast<double>(read)) {
                    for (const Cluster& part : split)
                        walk_tile(cluster_units.data() + part.first, part.last - part.first, 0);
                    continue;
                }
            }
            walk_tile(mine.data(), static_cast<int64_t>(mine.size()), highest);
        }
    }

    // The group of the vector that was appended last to `vectors`, at `at`; a new one keeps it there.
    int32_t group_of(int64_t at, int64_t width) {
        const int32_t* vector = vectors.data() + at;
        uint64_t hash = 1469598103934665603u;
        for (int64_t i = 0; i < width; ++i) hash = (hash ^ static_cast<uint32_t>(vector[i])) * 1099511628211u;
        hash ^= hash >> 29;
        const size_t mask = table.size() - 1;
        size_t place = hash & mask;
        while (table[place] >= 0) {
            const Group& group = groups[table[place]];
            if (group.hash == hash && std::equal(vector, vector + width, vectors.data() + group.vector)) {
                vectors.resize(at);
                return table[place];
            }
            place = (place + 1) & mask;
        }
        table[place] = static_cast<int32_t>(groups.size());
        groups.push_back({at, hash, -1, 0});
        if (groups.size() * 2 > table.size()) grow();
        return static_cast<int32_t>(groups.size()) - 1;
    }

    void grow() {
        const size_t size = std::max<size_t>(64, table.size() * 2);
        table.assign(size, -1);
        for (size_t g = 0; g < groups.size(); ++g) {
            size_t place = groups[g].hash & (size - 1);
            while (table[place] >= 0) place = (place + 1) & (size - 1);
            table[place] = static_cast<int32_t>(g);
        }
    }

    void walk_tile(const int32_t* mine, int64_t count, int32_t height) {
        Tile tile{height, static_cast<int64_t>(tile_rows.size()), 0, end_tile(), 0, true};
        for (int64_t i = 0; i < count; ++i) {
            const Unit& unit = units[mine[i]];
            slot_of[mine[i]] = static_cast<int32_t>(tile.num_rows);
            tile.num_rows += unit.size;
            for (int64_t row = 0; row < unit.size; ++row)
                tile_rows.push_back(static_cast<int32_t>(unit.first_row + row));
        }
        groups.clear();
        vectors.clear();
        stretches.clear();
        if (table.empty()) grow();
        std::fill(table.begin(), table.end(), -1);
        ++stamp;
        for (int64_t i = 0; i < count; ++i) {
            const Unit& unit = units[mine[i]];
            for (int64_t p = unit.first_piece; p < unit.last_piece; ++p)
                for (int32_t r = pieces[p].first_range; r < pieces[p].last_range; ++r) {
                    if (range_stamp[r] == stamp) continue;
                    range_stamp[r] = stamp;
                    group_range(ranges[r], tile.num_rows);
                }
        }
        write_groups(tile);
        for (int64_t i = 0; i < count; ++i) slot_of[mine[i]] = -1;
        tile.end = end_tile();
        tiles.push_back(tile);
    }

    void group_range(const Range& range, int64_t width) {
        const auto first = static_cast<int64_t>(vectors.size());
        int32_t layers = 0;
        for (int32_t m = range.first_member; m < range.last_member; ++m) {
            const Member& member = members[m];
            const int32_t slot = slot_of[member.unit];
            if (slot < 0) continue;
            const int32_t layer = times[member.unit]++;
            if (layer == layers) {
                ++layers;
                vectors.resize(vectors.size() + width, INVISIBLE);
            }
            std::fill_n(vectors.begin() + first + layer * width + slot, units[member.unit].size, member.delta);
        }
        for (int32_t m = range.first_member; m < range.last_member; ++m) times[members[m].unit] = 0;
        if (layers == 1) {
            place(group_of(first, width), 0, range);
            return;
        }
        scratch.assign(vectors.begin() + first, vectors.end());
        vectors.resize(first);
        for (int32_t layer = 0; layer < layers; ++layer) {
            const auto at = static_cast<int64_t>(vectors.size());
            vectors.insert(vectors.end(), scratch.begin() + layer * width, scratch.begin() + (layer + 1) * width);
            place(group_of(at, width), layer, range);
        }
    }
    Ints scratch;

    void place(int32_t group, int32_t layer, const Range& range) {
        if (tracks[range.track].tail_of >= 0)
            groups[group].tail = static_cast<int32_t>(stretches.size());
        ++groups[group].count;
        stretches.push_back({group, layer, range.track, range.start, range.stop});
    }

    void write_groups(const Tile& tile) {
        // Groups with a tail go last; the stretches of each are brought together.
        order.clear();
        for (int tail = 0; tail < 2; ++tail)
            for (size_t g = 0; g < groups.size(); ++g)
                if ((groups[g].tail >= 0) == (tail == 1)) order.push_back(static_cast<int32_t>(g));
        Ints next(groups.size());
        int32_t at = 0;
        for (int32_t g : order) {
            next[g] = at;
            at += groups[g].count;
        }
        sorted.resize(stretches.size());
        for (const Stretch& stretch : stretches) sorted[next[stretch.group]++] = stretch;
        const int64_t width = tile.num_rows;
        for (int32_t g : order) {
            const Group& group = groups[g];
            const int32_t* vector = vectors.data() + group.vector;
            const auto run = static_cast<int32_t>(out.runs.size());
            if (std::all_of(vector, vector + width, [&](int32_t delta) { return delta == vector[0]; })) {
                out.runs.push_back({vector[0], -1});
            } else {
                out.runs.push_back({0, static_cast<int32_t>(out.deltas.size())});
                out.deltas.insert(out.deltas.end(), vector, vector + width);
                out.deltas.resize(out.deltas.size() + slots[tile.height] - width, INVISIBLE);
            }
            masks.resize(out.runs.size() * words(), 0);
            uint64_t* const mask = masks.data() + run * words();
            for (int64_t slot = 0; slot < width; ++slot)
                if (vector[slot] != INVISIBLE) mask[slot / 64] |= uint64_t{1} << slot % 64;

            Stretch* const end = sorted.data() + next[g];
            Stretch* const begin = end - group.count;
            auto before = [](const Stretch& a, const Stretch& b) {
                return std::tie(a.layer, a.track, a.start) < std::tie(b.layer, b.track, b.start);
            };
            if (!std::is_sorted(begin, end, before)) std::sort(begin, end, before);
            const int32_t tail = group.tail >= 0 ? stretches[group.tail].track : -1;
            const Stretch* open = nullptr;
            int64_t stop = 0;
            for (const Stretch* stretch = begin; stretch != end; ++stretch) {
                if (stretch->track == tail) continue;
                if (open && open->layer == stretch->layer && open->track == stretch->track && stop == stretch->start) {
                    stop = stretch->stop;
                    continue;
                }
                if (open) enter(open->track, open->start, stop, run);
                open = stretch;
                stop = stretch->stop;
            }
            if (open) enter(open->track, open->start, stop, run);
            if (tail >= 0) {
                enter(tail, stretches[group.tail].start, stretches[group.tail].stop, run);
                enter_reserve(tail, stretches[group.tail].stop, run);
            }
            pad(run);
        }
    }

    int64_t end_tile() const { return static_cast<int64_t>(out.entries.size()) / parameters.boxes; }

    void enter(int32_t track, int64_t start, int64_t stop, int32_t run) {
        const int64_t size = batch.page_size, base = tracks[track].base;
        const int32_t* const pages = batch.list_pages + batch.list_indptr[tracks[track].list];
        const int64_t last = (stop - 1) / size;
        for (int64_t index = start / size; index <= last; ++index) {
            const int64_t at = index * size;
            const int64_t lo = std::max<int64_t>(start - at, 0), hi = std::min(stop - at, size);
            out.entries.push_back(
                {pages[index], static_cast<int32_t>(lo | hi << 16), static_cast<int32_t>(base + at), run});
        }
    }

    // The entries that a tail grows into, behind the one of its last page.
    void enter_reserve(int32_t track, int64_t stop, int32_t run) {
        const int64_t size = batch.page_size, sequence = tracks[track].tail_of;
        const auto last = static_cast<int32_t>(out.entries.size()) - 1;
        int64_t at = (stop - 1) / size * size + size;
        for (int32_t i = reserve.indptr[sequence]; i < reserve.indptr[sequence + 1]; ++i, at += size)
            out.entries.push_back({reserve.pages[i], 0, static_cast<int32_t>(tracks[track].base + at), run});
        const int32_t full = stop % size == 0;
        const int32_t room = static_cast<int32_t>(out.entries.size()) - last - full;
        if (room) out.tails[sequence] = {last + full, room};
    }

    void pad(int32_t run) {
        while (static_cast<int64_t>(out.entries.size()) % parameters.boxes) out.entries.push_back({-1, 0, 0, run});
        tile_run.resize(end_tile(), run);
    }

    void walk_long(const Unit& unit) {
        const int64_t first = batch.q_positions[unit.first_row], size = batch.page_size;
        struct Key {
            int64_t late, key, piece;
        };
        std::vector<Key> keys;
        Ints appeared;
        for (int64_t j = unit.first_piece; j < unit.last_piece; ++j) {
            const Piece4& piece = long_pieces[j];
            const int64_t base = tracks[piece.track].base;
            if (!parameters.window && base + piece.stop - 1 + piece.delta <= first) {
                const auto at = std::find(appeared.begin(), appeared.end(), piece.delta) - appeared.begin();
                if (at == static_cast<int64_t>(appeared.size())) appeared.push_back(piece.delta);
                keys.push_back({0, at, j});
            } else {
                keys.push_back({1, base + piece.start + piece.delta, j});
            }
        }
        std::sort(keys.begin(), keys.end(), [](const Key& a, const Key& b) {
            return std::tie(a.late, a.key, a.piece) < std::tie(b.late, b.key, b.piece);
        });
        const int64_t walk_begin = end_tile();
        const Piece4* previous = nullptr;
        for (const Key& key : keys) {
            const Piece4& piece = long_pieces[key.piece];
            int64_t start = piece.start;
            if (!previous || previous->delta != piece.delta) {
                if (previous) pad(static_cast<int32_t>(out.runs.size()) - 1);
                out.runs.push_back({piece.delta, -1});
            } else if (previous->track == piece.track && previous->stop == start && start % size) {
                const int64_t at = start / size * size;
                int32_t& rows = out.entries.back().rows;
                rows = static_cast<int32_t>((rows & 0xFFFF) | std::min(piece.stop - at, size) << 16);
                start = std::min(piece.stop, at + size);
            }
            if (start < piece.stop) enter(piece.track, start, piece.stop, static_cast<int32_t>(out.runs.size()) - 1);
            previous = &piece;
        }
        pad(static_cast<int32_t>(out.runs.size()) - 1);
        masks.resize(out.runs.size() * words(), 0);

        const int64_t walk_end = end_tile(), boxes = parameters.boxes;
        std::vector<std::pair<int64_t, int64_t>> views;  // of each KV tile, first and last
        for (int64_t tile = walk_begin; tile < walk_end; ++tile) {
            int64_t low = INT64_MAX, high = INT64_MIN;
            for (int64_t e = tile * boxes; e < (tile + 1) * boxes; ++e) {
                const Entry& entry = out.entries[e];
                if (!entry.rows) continue;
                const int64_t view = int64_t{entry.pos0} + out.runs[entry.run].delta;
                low = std::min(low, view + (entry.rows & 0xFFFF));
                high = std::max(high, view + (entry.rows >> 16) - 1);
            }
            views.emplace_back(low, high);
        }
        for (int64_t at = 0; at < unit.size; at += slots.back()) {
            const int64_t count = std::min(unit.size - at, slots.back());
            const int64_t last = first + at + count - 1, window = parameters.window;
            auto sees = [&](int64_t tile) {
                const auto& [low, high] = views[tile - walk_begin];
                return low <= last && (!window || high > first + at - window);
            };
            int64_t begin = walk_begin, end = walk_end;
            while (begin < end && !sees(begin)) ++begin;
            while (begin < end && !sees(end - 1)) --end;
            if (begin == end) continue;
            const int32_t height = count <= slots.front() ? 0 : static_cast<int32_t>(slots.size()) - 1;
            tiles.push_back({height, static_cast<int64_t>(tile_rows.size()), count, begin, end, false});
            for (int64_t row = 0; row < count; ++row)
                tile_rows.push_back(static_cast<int32_t>(unit.first_row + at + row));
        }
    }

    void assemble() {
        const int64_t heads = parameters.heads, keys = batch.rows * heads;
        Ints count(keys, 0);  // parts of (row, head); -1: written directly
        struct Cut {
            const Tile* tile;
            int32_t head, part;
            int64_t mask;  // into cut_masks, or -1: every slot
        };
        std::vector<Cut> cuts;
        std::vector<uint64_t> cut_masks;
        auto each_slot = [&](const Cut& one, auto&& visit) {
            for (int64_t slot = 0; slot < one.tile->num_rows; ++slot) {
                if (one.mask >= 0 && !(cut_masks[one.mask + slot / 64] >> slot % 64 & 1)) continue;
                visit(tile_rows[one.tile->first_row + slot] * heads + one.head, slot);
            }
        };
        std::vector<const Tile*> mine;
        std::vector<int64_t> lengths;
        std::vector<Piece> shares;
        for (size_t height = 0; height < slots.size(); ++height) {
            mine.clear();
            lengths.clear();
            for (const Tile& tile : tiles)
                if (tile.height == static_cast<int32_t>(height)) {
                    mine.push_back(&tile);
                    lengths.resize(lengths.size() + heads, tile.end - tile.begin);
                }
            if (mine.empty()) continue;
            Class one{parameters.heights[height], slots[height], {}, {}, {}};
            one.tile_rows.reserve(mine.size() * one.slots);
            for (const Tile* tile : mine) {
                const auto rows = tile_rows.begin() + tile->first_row;
                one.tile_rows.insert(one.tile_rows.end(), rows, rows + tile->num_rows);
                one.tile_rows.resize(one.tile_rows.size() + one.slots - tile->num_rows, -1);
            }
            cut(lengths, parameters.workers[height], parameters.min_chunk, parameters.work_cost, shares,
                one.work_indptr);
            one.works.reserve(shares.size());
            for (const Piece& share : shares) {
                const auto number = static_cast<int32_t>(share.item / heads);
                const Tile& tile = *mine[number];
                Work work{number, static_cast<int32_t>(share.item % heads), static_cast<int32_t>(tile.begin + share.begin),
                          static_cast<int32_t>(tile.begin + share.end), -1};
                Cut made{&tile, work.head, -1, -1};
                if (share.begin == 0 && share.end == lengths[share.item]) {
                    each_slot(made, [&](int64_t key, int64_t) { count[key] = -1; });
                } else {
                    work.part = made.part = static_cast<int32_t>(out.num_parts);
                    out.num_parts += tile.num_rows;
                    if (tile.masked) {
                        made.mask = static_cast<int64_t>(cut_masks.size());
                        cut_masks.resize(cut_masks.size() + words(), 0);
                        for (int32_t run = tile_run[work.begin]; run <= tile_run[work.end - 1]; ++run)
                            for (int64_t word = 0; word < words(); ++word)
                                cut_masks[made.mask + word] |= masks[run * words() + word];
                    }
                    each_slot(made, [&](int64_t key, int64_t) { ++count[key]; });
                    cuts.push_back(made);
                }
                one.works.push_back(work);
            }
            out.classes.push_back(std::move(one));
        }

        Ints next(keys, 0);
        int32_t total = 0;
        out.merge_indptr.push_back(0);
        for (int64_t key = 0; key < keys; ++key) {
            if (count[key] < 0) continue;
            next[key] = total;
            total += count[key];
            out.merge_rows.push_back(static_cast<int32_t>(key));
            out.merge_indptr.push_back(total);
        }
        out.merge_parts.resize(total);
        for (const Cut& one : cuts)
            each_slot(one, [&](int64_t key, int64_t slot) {
                out.merge_parts[next[key]++] = static_cast<int32_t>(one.part + slot);
            });

        std::vector<int64_t> read;  // entries that read, in front of each KV tile
        read.reserve(end_tile() + 1);
        int64_t entries = 0;
        for (size_t e = 0; e < out.entries.size(); ++e) {
            if (e % parameters.boxes == 0) read.push_back(entries);
            entries += out.entries[e].page >= 0 && out.entries[e].rows;
        }
        read.push_back(entries);
        for (const Tile& tile : tiles) out.tokens_read += (read[tile.end] - read[tile.begin]) * batch.page_size;
    }

    int64_t tokens_unique() const {
        Ints first(batch.lists + 1, 0);
        std::vector<std::pair<int32_t, int32_t>> ends(batch.num_spans);
        for (int64_t i = 0; i < batch.num_spans; ++i) ++first[batch.spans[i].list + 1];
        for (int64_t l = 0; l < batch.lists; ++l) first[l + 1] += first[l];
        Ints next(first.begin(), first.end() - 1);
        for (int64_t i = 0; i < batch.num_spans; ++i)
            ends[next[batch.spans[i].list]++] = {batch.spans[i].start, batch.spans[i].stop};
        int64_t total = 0;
        for (int64_t l = 0; l < batch.lists; ++l) {
            const auto begin = ends.begin() + first[l], end = ends.begin() + first[l + 1];
            if (begin == end) continue;
            if (std::all_of(begin, end, [&](const auto& one) { return one == *begin; })) {
                total += begin->second - begin->first;
                continue;
            }
            std::sort(begin, end);
            int64_t reached = 0;
            for (auto one = begin; one != end; ++one) {
                const int64_t from = std::max<int64_t>(one->first, reached);
                total += std::max<int64_t>(one->second - from, 0);
                reached = std::max<int64_t>(reached, one->second);
            }
        }
        return total;
    }
};

// Shares of cost at most `bound`, each filled as far as it goes; false if the workers do not suffice.
bool share_out(const std::vector<int64_t>& lengths, int64_t workers, int64_t min_chunk, int64_t work_cost,
               int64_t bound, std::vector<Piece>& pieces, Ints& indptr) {
    pieces.clear();
    indptr.assign(1, 0);
    int64_t room = bound;
    for (size_t item = 0; item < lengths.size(); ++item) {
        const int64_t length = lengths[item];
        int64_t begin = 0;
        auto take = [&](int64_t end) {
            pieces.push_back({static_cast<int32_t>(item), static_cast<int32_t>(begin), static_cast<int32_t>(end)});
        };
        while (begin < length) {
            const int64_t rest = length - begin;
            if (room >= work_cost + rest) {
                take(length);
                room -= work_cost + rest;
                break;
            }
            const int64_t piece = std::min(room - work_cost, rest - min_chunk);
            if (piece >= min_chunk) {
                take(begin + piece);
                begin += piece;
            } else if (room == bound) {
                return false;
            }
            if (static_cast<int64_t>(indptr.size()) == workers) return false;
            indptr.push_back(static_cast<int32_t>(pieces.size()));
            room = bound;
        }
    }
    indptr.resize(workers + 1, static_cast<int32_t>(pieces.size()));
    return true;
}

}  // namespace

void cut(const std::vector<int64_t>& lengths, int64_t workers, int64_t min_chunk, int64_t work_cost,
         std::vector<Piece>& pieces, Ints& indptr) {
    int64_t total = work_cost * static_cast<int64_t>(lengths.size());
    for (int64_t length : lengths) total += length;
    int64_t low = std::max<int64_t>(up(total, workers), 1), high = low, step = 1;
    auto fits = [&](int64_t bound) {
        return share_out(lengths, workers, min_chunk, work_cost, bound, pieces, indptr);
    };
    while (!fits(high)) {
        low = high + 1;
        high += step;
        step *= 2;
    }
    int64_t made = high;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (fits(middle))
            high = middle;
        else
            low = middle + 1;
        made = middle;
    }
    if (made != high) fits(high);
}

Plan plan(const Batch& batch, const Parameters& parameters, const Reserve& reserve) {
    return Planner(batch, parameters, reserve).run();
}

}  // namespace dagengine::planner
