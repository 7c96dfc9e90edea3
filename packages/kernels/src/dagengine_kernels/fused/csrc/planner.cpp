// Spans -> a plan. planner_twin.py explains each step (units, tracks, ranges, tiles, groups, shares) and gives the
// same arrays; what is done differently here is only how it is found.
#include "planner.h"

#include <algorithm>
#include <climits>
#include <memory>
#include <tuple>

#include "ranges.h"

namespace dagengine::planner {

namespace {

constexpr int32_t INVISIBLE = INT32_MIN;
constexpr int64_t MIN_GAIN = 64;
constexpr int64_t MIN_GAIN_SHARE = 8;

struct Tile {
    int32_t height;
    int64_t first_row, num_rows;  // into tile_rows
    int64_t begin, end;           // KV tiles
    bool masked;                  // whether `masks` of the runs are to be looked at
    int64_t walk;                 // where the walk begins that it is of
};

struct Cluster {
    int64_t first, last;  // into cluster_units
    int64_t union_tokens, rows;
};

// Part of a group's walk.
struct Stretch {
    int32_t group, layer, track, start, stop;

    Stretch() = default;
    Stretch(int32_t group, int32_t layer, const Range& range)
        : group(group), layer(layer), track(range.track), start(range.start), stop(range.stop) {}
};

struct Group {
    int64_t vector;  // into the vectors of the tile
    uint64_t hash;
    int32_t tail = -1;  // its growing tail's stretch, or -1
    int32_t count = 0;

    Group(int64_t vector, uint64_t hash) : vector(vector), hash(hash) {}
};

int64_t up(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }

// Plans one batch after another; its vectors keep their memory from one to the next.
class Planner {
  public:
    Plan run(const Batch& given_batch, const Parameters& given_parameters, const Reserve& given_reserve) {
        batch = given_batch;
        parameters = given_parameters;
        reserve = given_reserve;
        slots.clear();
        for (int64_t height : parameters.heights) slots.push_back(height / parameters.group);
        words = up(slots.back(), 64);
        out = Plan{};
        out.entries.reserve(usual_entries);
        out.runs.reserve(usual_runs);
        out.tails.assign(batch.sequences, Tail{-1, 0});
        in.find(batch, parameters.window, reserve, slots.back());
        range_stamp.assign(in.ranges.size(), 0);
        stamp = 0;
        gain.assign(in.units.size(), 0);
        slot_of.assign(in.units.size(), -1);
        pack();
        assemble();
        out.tokens_unique = in.tokens_unique(batch);
        usual_entries = out.entries.size() + out.entries.size() / 8;
        usual_runs = out.runs.size() + out.runs.size() / 8;
        return std::move(out);
    }

  private:
    Batch batch;
    Parameters parameters;
    Reserve reserve;
    Plan out;
    std::vector<int64_t> slots;
    size_t usual_entries = 0, usual_runs = 0;
    int64_t words = 0;  // 64-bit words of a mask of slots

    Ranges in;
    std::vector<int64_t> gain;
    Ints cluster_units, left, tile_units;
    std::vector<Cluster> clusters, split;
    std::vector<uint32_t> range_stamp;
    uint32_t stamp = 0;

    std::vector<Tile> tiles;
    Ints tile_rows;
    Ints tile_run;                // run of each KV tile
    std::vector<uint64_t> masks;  // slots that see a run, `words` per run

    Ints slot_of, vectors, layered, table;
    std::vector<Stretch> stretches, sorted;
    std::vector<Group> groups;

    Ints first, next, count, order, keys;
    std::vector<const Tile*> tiles_of_height;
    std::vector<Item> items;
    std::vector<int64_t> turns;      // cost of the changes of run up to each KV tile
    std::vector<Piece> shares;

    // Greedy clusters of `chosen` units, appended to `made`; their units go to cluster_units.
    void cluster(const int32_t* chosen, int64_t count, int64_t cap, std::vector<Cluster>& made) {
        left.assign(chosen, chosen + count);
        std::sort(left.begin(), left.end(), [&](int32_t a, int32_t b) {
            return in.units[a].length != in.units[b].length ? in.units[a].length > in.units[b].length : a < b;
        });
        while (!left.empty()) {
            ++stamp;
            for (int32_t u : left) gain[u] = 0;
            const auto begin = static_cast<int64_t>(cluster_units.size());
            int64_t free = cap, covered = 0;
            size_t best = 0;
            while (best < left.size()) {
                const int32_t u = left[best];
                left.erase(left.begin() + best);
                cluster_units.push_back(u);
                free -= in.units[u].size;
                for (int64_t i = in.units[u].first_piece; i < in.units[u].last_piece; ++i)
                    for (int32_t r = in.seen[i].first_range; r < in.seen[i].last_range; ++r) {
                        if (range_stamp[r] == stamp) continue;
                        range_stamp[r] = stamp;
                        const Range& range = in.ranges[r];
                        const int32_t length = range.stop - range.start;
                        covered += length;
                        if (left.empty()) continue;
                        for (int32_t m = range.first_member; m < range.last_member; ++m)
                            gain[in.members[m].unit] += length;
                    }
                best = left.size();
                if (!free) break;
                for (size_t i = 0; i < left.size(); ++i) {
                    const int32_t v = left[i];
                    if (in.units[v].size > free || gain[v] < MIN_GAIN || gain[v] * MIN_GAIN_SHARE < in.units[v].length)
                        continue;
                    if (best == left.size() || gain[v] > gain[left[best]] ||
                        (gain[v] == gain[left[best]] && v < left[best]))
                        best = i;
                }
            }
            std::sort(cluster_units.begin() + begin, cluster_units.end());
            made.push_back({begin, static_cast<int64_t>(cluster_units.size()), covered, cap - free});
        }
    }

    void pack() {
        tiles.clear();
        tile_rows.clear();
        tile_run.clear();
        masks.clear();
        for (const Unit& unit : in.long_units) walk_long(unit);
        tile_units.resize(in.units.size());
        for (size_t u = 0; u < in.units.size(); ++u) tile_units[u] = static_cast<int32_t>(u);
        cluster_units.clear();
        clusters.clear();
        cluster(tile_units.data(), static_cast<int64_t>(in.units.size()), slots.back(), clusters);
        for (const Cluster& one : clusters) {
            tile_units.assign(cluster_units.begin() + one.first, cluster_units.begin() + one.last);
            split.clear();
            if (one.rows <= slots.front())
                walk_tile(tile_units.data(), tile_units.size(), 0);
            else if (!is_split(one))
                walk_tile(tile_units.data(), tile_units.size(), slots.size() - 1);
            for (const Cluster& part : split)
                walk_tile(cluster_units.data() + part.first, part.last - part.first, 0);
        }
    }

    // Whether tiles of the lowest height read less for the units of a cluster (tile_units); they are then in `split`.
    bool is_split(const Cluster& whole) {
        if (slots.size() == 1) return false;
        for (int32_t u : tile_units)
            if (in.units[u].size > slots.front()) return false;
        // Each part reads at least what its longest unit sees.
        keys.clear();
        for (int32_t u : tile_units) keys.push_back(static_cast<int32_t>(in.units[u].distinct));
        std::sort(keys.begin(), keys.end());
        const double wide = static_cast<double>(whole.union_tokens) * parameters.wide_cost;
        int64_t least = 0;
        for (int64_t part = 0; part < up(whole.rows, slots.front()); ++part) least += keys[part];
        if (wide <= static_cast<double>(least)) return false;
        cluster(tile_units.data(), static_cast<int64_t>(tile_units.size()), slots.front(), split);
        int64_t read = 0;
        for (const Cluster& part : split) read += part.union_tokens;
        if (wide > static_cast<double>(read)) return true;
        split.clear();
        return false;
    }

    // The group of the vector that was appended last to `vectors`, at `at`; a new one keeps it there.
    int32_t group_of(int64_t at, int64_t width) {
        const int32_t* vector = vectors.data() + at;
        uint64_t hash = 0;
        int64_t i = 0;
        for (; i + 1 < width; i += 2) {
            const uint64_t low = static_cast<uint32_t>(vector[i]), high = static_cast<uint32_t>(vector[i + 1]);
            hash = (hash ^ (low | high << 32)) * 0x9E3779B97F4A7C15u;
            hash ^= hash >> 32;
        }
        if (i < width) hash = (hash ^ static_cast<uint32_t>(vector[i])) * 0x9E3779B97F4A7C15u;
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
        groups.emplace_back(at, hash);
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

    void walk_tile(const int32_t* mine, int64_t number, int64_t height) {
        Tile tile{static_cast<int32_t>(height), static_cast<int64_t>(tile_rows.size()), 0, end_tile(), 0, true, end_tile()};
        for (int64_t i = 0; i < number; ++i) {
            const Unit& unit = in.units[mine[i]];
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
        for (int64_t i = 0; i < number; ++i) {
            const Unit& unit = in.units[mine[i]];
            for (int64_t p = unit.first_piece; p < unit.last_piece; ++p)
                for (int32_t r = in.seen[p].first_range; r < in.seen[p].last_range; ++r) {
                    if (range_stamp[r] == stamp) continue;
                    range_stamp[r] = stamp;
                    group_range(in.ranges[r], tile.num_rows);
                }
        }
        write_groups(tile);
        for (int64_t i = 0; i < number; ++i) slot_of[mine[i]] = -1;
        tile.end = end_tile();
        tiles.push_back(tile);
    }

    void group_range(const Range& range, int64_t width) {
        const auto begin = static_cast<int64_t>(vectors.size());
        vectors.resize(begin + width, INVISIBLE);
        int32_t layers = 1, layer = 0, previous = -1;
        for (int32_t m = range.first_member; m < range.last_member; ++m) {
            const Member member = in.members[m];
            const int32_t slot = slot_of[member.unit];
            if (slot < 0) continue;
            layer = member.unit == previous ? layer + 1 : 0;
            previous = member.unit;
            if (layer == layers) {
                ++layers;
                vectors.resize(vectors.size() + width, INVISIBLE);
            }
            int32_t* const vector = vectors.data() + begin + layer * width + slot;
            const int64_t size = in.units[member.unit].size;
            for (int64_t row = 0; row < size; ++row) vector[row] = member.delta;
        }
        if (layers == 1) {
            place(group_of(begin, width), 0, range);
            return;
        }
        layered.assign(vectors.begin() + begin, vectors.end());
        vectors.resize(begin);
        for (layer = 0; layer < layers; ++layer) {
            const auto one = layered.begin() + layer * width;
            const auto to = static_cast<int64_t>(vectors.size());
            vectors.insert(vectors.end(), one, one + width);
            place(group_of(to, width), layer, range);
        }
    }

    void place(int32_t group, int32_t layer, const Range& range) {
        if (in.tracks[range.track].tail_of >= 0)
            groups[group].tail = static_cast<int32_t>(stretches.size());
        ++groups[group].count;
        stretches.emplace_back(group, layer, range);
    }

    void write_groups(const Tile& tile) {
        // Groups with a tail go last; the stretches of each are brought together.
        order.clear();
        for (int tail = 0; tail < 2; ++tail)
            for (size_t g = 0; g < groups.size(); ++g)
                if ((groups[g].tail >= 0) == (tail == 1)) order.push_back(static_cast<int32_t>(g));
        next.resize(groups.size());
        int32_t total = 0;
        for (int32_t g : order) {
            next[g] = total;
            total += groups[g].count;
        }
        sorted.resize(stretches.size());
        for (const Stretch& stretch : stretches) sorted[next[stretch.group]++] = stretch;
        const int64_t width = tile.num_rows;
        for (int32_t g : order) {
            const Group& group = groups[g];
            const int32_t* vector = vectors.data() + group.vector;
            const auto run = static_cast<int32_t>(out.runs.size());
            if (std::find_if(vector, vector + width, [&](int32_t d) { return d != vector[0]; }) == vector + width) {
                out.runs.push_back({vector[0], -1});
            } else {
                out.runs.push_back({0, static_cast<int32_t>(out.deltas.size())});
                out.deltas.insert(out.deltas.end(), vector, vector + width);
                out.deltas.resize(out.deltas.size() + slots[tile.height] - width, INVISIBLE);
            }
            masks.resize(out.runs.size() * words, 0);
            uint64_t* const mask = masks.data() + run * words;
            for (int64_t slot = 0; slot < width; ++slot)
                mask[slot / 64] |= uint64_t{vector[slot] != INVISIBLE} << slot % 64;

            Stretch* const end = sorted.data() + next[g];
            Stretch* const begin = end - group.count;
            auto before = [](const Stretch& a, const Stretch& b) {
                return std::tie(a.layer, a.track, a.start) < std::tie(b.layer, b.track, b.start);
            };
            if (!std::is_sorted(begin, end, before)) std::sort(begin, end, before);
            const int32_t tail = group.tail >= 0 ? stretches[group.tail].track : -1;
            const Stretch* open = nullptr;
            int32_t stop = 0;
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

    int64_t end_tile() const { return static_cast<int64_t>(tile_run.size()); }

    void enter(int32_t track, int64_t start, int64_t stop, int32_t run) {
        const int64_t size = batch.page_size, base = in.tracks[track].base;
        const int32_t* const pages = batch.list_pages + batch.list_indptr[in.tracks[track].list];
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
        const int64_t size = batch.page_size, sequence = in.tracks[track].tail_of;
        const auto last = static_cast<int32_t>(out.entries.size()) - 1;
        int64_t at = (stop - 1) / size * size + size;
        for (int32_t i = reserve.indptr[sequence]; i < reserve.indptr[sequence + 1]; ++i, at += size)
            out.entries.push_back({reserve.pages[i], 0, static_cast<int32_t>(in.tracks[track].base + at), run});
        const int32_t full = stop % size == 0;
        const int32_t room = static_cast<int32_t>(out.entries.size()) - last - full;
        if (room) out.tails[sequence] = {last + full, room};
    }

    // Ends a run: fills its last KV tile.
    void pad(int32_t run) {
        const auto boxes = static_cast<size_t>(parameters.boxes);
        const size_t filled = tile_run.size() * boxes;
        const size_t count = (out.entries.size() - filled + boxes - 1) / boxes;
        out.entries.resize(filled + count * boxes, Entry{-1, 0, 0, run});
        tile_run.resize(tile_run.size() + count, run);
    }

    void walk_long(const Unit& unit) {
        const int64_t position = batch.q_positions[unit.first_row], size = batch.page_size;
        struct Key {
            int64_t late, key, piece;
        };
        std::vector<Key> by_view;
        Ints appeared;
        for (int64_t j = unit.first_piece; j < unit.last_piece; ++j) {
            const Seen& piece = in.long_seen[j];
            const int64_t base = in.tracks[piece.track].base;
            if (!parameters.window && base + piece.stop - 1 + piece.delta <= position) {
                const auto known = std::find(appeared.begin(), appeared.end(), piece.delta) - appeared.begin();
                if (known == static_cast<int64_t>(appeared.size())) appeared.push_back(piece.delta);
                by_view.push_back({0, known, j});
            } else {
                by_view.push_back({1, base + piece.start + piece.delta, j});
            }
        }
        std::sort(by_view.begin(), by_view.end(), [](const Key& a, const Key& b) {
            return std::tie(a.late, a.key, a.piece) < std::tie(b.late, b.key, b.piece);
        });
        const int64_t walk_begin = end_tile();
        const Seen* previous = nullptr;
        for (const Key& key : by_view) {
            const Seen& piece = in.long_seen[key.piece];
            int64_t start = piece.start;
            if (!previous || previous->delta != piece.delta) {
                if (previous) pad(static_cast<int32_t>(out.runs.size()) - 1);
                out.runs.push_back({piece.delta, -1});
            } else if (previous->track == piece.track && previous->stop == start && start % size) {
                const int64_t at = start / size * size;
                int32_t& rows = out.entries.back().rows;
                rows = static_cast<int32_t>((rows & 0xFFFF) | std::min<int64_t>(piece.stop - at, size) << 16);
                start = std::min<int64_t>(piece.stop, at + size);
            }
            if (start < piece.stop) enter(piece.track, start, piece.stop, static_cast<int32_t>(out.runs.size()) - 1);
            previous = &piece;
        }
        pad(static_cast<int32_t>(out.runs.size()) - 1);
        masks.resize(out.runs.size() * words, 0);

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
        for (int64_t from = 0; from < unit.size; from += slots.back()) {
            const int64_t rows = std::min(unit.size - from, slots.back());
            const int64_t last = position + from + rows - 1, window = parameters.window;
            auto sees = [&](int64_t tile) {
                const auto& [low, high] = views[tile - walk_begin];
                return low <= last && (!window || high > position + from - window);
            };
            int64_t begin = walk_begin, end = walk_end;
            while (begin < end && !sees(begin)) ++begin;
            while (begin < end && !sees(end - 1)) --end;
            if (begin == end) continue;
            const int32_t height = rows <= slots.front() ? 0 : static_cast<int32_t>(slots.size()) - 1;
            tiles.push_back({height, static_cast<int64_t>(tile_rows.size()), rows, begin, end, false, walk_begin});
            for (int64_t row = 0; row < rows; ++row)
                tile_rows.push_back(static_cast<int32_t>(unit.first_row + from + row));
        }
    }

    void assemble() {
        const int64_t heads = parameters.heads, num_keys = batch.rows * heads;
        count.assign(num_keys, 0);  // parts of (row, head); -1: written directly
        struct Cut {
            const Tile* tile;
            int32_t head, part;
            int64_t mask;  // into cut_masks, or -1: every slot
        };
        std::vector<Cut> cuts;
        std::vector<uint64_t> cut_masks;
        auto each_slot = [&](const Cut& one, auto&& visit) {
            const int32_t* const rows = tile_rows.data() + one.tile->first_row;
            if (one.mask < 0) {
                for (int64_t slot = 0; slot < one.tile->num_rows; ++slot) visit(rows[slot] * heads + one.head, slot);
                return;
            }
            for (int64_t word = 0; word < words; ++word)
                for (uint64_t left = cut_masks[one.mask + word]; left; left &= left - 1) {
                    const int64_t slot = word * 64 + __builtin_ctzll(left);
                    visit(rows[slot] * heads + one.head, slot);
                }
        };
        turns.assign(tile_run.size(), 0);
        for (size_t k = 1; k < tile_run.size(); ++k)
            turns[k] = turns[k - 1] + parameters.run_cost * (tile_run[k] != tile_run[k - 1]);
        for (size_t height = 0; height < slots.size(); ++height) {
            auto& mine = tiles_of_height;
            mine.clear();
            items.clear();
            for (const Tile& tile : tiles)
                if (tile.height == static_cast<int32_t>(height)) {
                    mine.push_back(&tile);
                    items.resize(items.size() + heads, Item{{tile.begin, tile.end}, tile.walk});
                }
            if (mine.empty()) continue;
            Class one{parameters.heights[height], slots[height], {}, {}, {}};
            one.tile_rows.reserve(mine.size() * one.slots);
            for (const Tile* tile : mine) {
                const auto rows = tile_rows.begin() + tile->first_row;
                one.tile_rows.insert(one.tile_rows.end(), rows, rows + tile->num_rows);
                one.tile_rows.resize(one.tile_rows.size() + one.slots - tile->num_rows, -1);
            }
            share(items, turns, heads, parameters.workers[height], parameters, shares, one.work_indptr);
            one.works.reserve(shares.size());
            for (const Piece& share : shares) {
                const auto number = static_cast<int32_t>(share.item / heads);
                const Tile& tile = *mine[number];
                Work work{number, static_cast<int32_t>(share.item % heads),
                          static_cast<int32_t>(tile.begin + share.begin),
                          static_cast<int32_t>(tile.begin + share.end), -1};
                Cut made{&tile, work.head, -1, -1};
                if (share.begin == 0 && share.end == items[share.item].end - items[share.item].begin) {
                    each_slot(made, [&](int64_t key, int64_t) { count[key] = -1; });
                } else {
                    work.part = made.part = static_cast<int32_t>(out.num_parts);
                    out.num_parts += tile.num_rows;
                    if (tile.masked) {
                        made.mask = static_cast<int64_t>(cut_masks.size());
                        cut_masks.resize(cut_masks.size() + words, 0);
                        for (int32_t run = tile_run[work.begin]; run <= tile_run[work.end - 1]; ++run)
                            for (int64_t word = 0; word < words; ++word)
                                cut_masks[made.mask + word] |= masks[run * words + word];
                    }
                    each_slot(made, [&](int64_t key, int64_t) { ++count[key]; });
                    cuts.push_back(made);
                }
                one.works.push_back(work);
            }
            out.classes.push_back(std::move(one));
        }

        next.assign(num_keys, 0);
        int32_t total = 0;
        out.merge_indptr.push_back(0);
        for (int64_t key = 0; key < num_keys; ++key) {
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

        first.assign(1, 0);  // entries that read, in front of each KV tile
        int32_t entries = 0;
        for (auto entry = out.entries.begin(); entry != out.entries.end();) {
            for (int64_t box = 0; box < parameters.boxes; ++box, ++entry) entries += entry->page >= 0 && entry->rows;
            first.push_back(entries);
        }
        for (const Tile& tile : tiles)
            out.tokens_read += int64_t{first[tile.end] - first[tile.begin]} * batch.page_size;
    }
};

}  // namespace

Plan plan(const Batch& batch, const Parameters& parameters, const Reserve& reserve) {
    // Behind a pointer: the address of a thread's own object is looked up again at every use otherwise.
    static thread_local const auto planner = std::make_unique<Planner>();
    return planner->run(batch, parameters, reserve);
}

}  // namespace dagengine::planner
