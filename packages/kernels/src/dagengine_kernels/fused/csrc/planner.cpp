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
constexpr int64_t LANES = 4;  // vectors of deltas are multiples of this

struct Tile {
    int32_t height;
    int64_t first_row, num_rows;  // into tile_rows
    int64_t begin, end;           // KV tiles
    bool masked;                  // whether `masks` of the runs are to be looked at
    int64_t walk;                 // where the walk begins that it is of
    int64_t read;                 // pages
};

struct Cluster {
    int64_t first, last;  // into cluster_units
    int64_t union_tokens, rows;
    // The units that were chosen first, as far as the lowest tile holds them, and the longest of the others.
    int64_t head_rows, head_tokens, longest_other;
};

struct Candidate {
    int64_t length;
    int32_t unit, size;
};

// What a tile's slots see of a range: a vector of deltas, INVISIBLE where they do not. The k-th time that a unit sees
// the range is in layer k, each a sight of its own.
struct Sight {
    int32_t range, layer;
    int32_t deeper;  // the sight of the next layer, or -1
};

struct Local {
    uint32_t stamp;
    int32_t sight;
};

// Part of a group's walk.
struct Stretch {
    int32_t group, layer, track, start, stop;
};

struct Group {
    uint64_t hash;
    int32_t sight;      // one that has its vector
    int32_t tail = -1;  // its growing tail's stretch, or -1
    int32_t count = 0;

    Group(uint64_t hash, int32_t sight) : hash(hash), sight(sight) {}
};

// A work that leaves a partial result.
struct Cut {
    int64_t item;
    int32_t part;
    int32_t mask;  // into cut_masks: the slots that see something there; -1: all of them
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
        page_shift = -1;
        for (int shift = 0; shift < 15; ++shift)
            if (batch.page_size == int64_t{1} << shift) page_shift = shift;
        hash_keys(up(slots.back(), LANES) * LANES / 2);
        out = Plan{};
        out.entries.reserve(usual_entries);
        out.runs.reserve(usual_runs);
        out.deltas.reserve(usual_deltas);
        out.tails.assign(batch.sequences, Tail{-1, 0});
        in.find(batch, parameters.window, reserve, slots.back());
        range_stamp.assign(in.ranges.size(), 0);
        local.assign(in.ranges.size(), Local{0, 0});
        stamp = 0;
        gain.assign(in.units.size(), 0);
        pack();
        assemble();
        out.tokens_unique = in.tokens_unique(batch);
        usual_entries = out.entries.size() + out.entries.size() / 8;
        usual_runs = out.runs.size() + out.runs.size() / 8;
        usual_deltas = out.deltas.size() + out.deltas.size() / 8;
        return std::move(out);
    }

  private:
    Batch batch;
    Parameters parameters;
    Reserve reserve;
    Plan out;
    std::vector<int64_t> slots;
    size_t usual_entries = 0, usual_runs = 0, usual_deltas = 0;
    int64_t words = 0;  // 64-bit words of a mask of slots
    int page_shift = -1;  // of a page size that is a power of two

    Ranges in;
    std::vector<int64_t> gain;
    Ints cluster_units, tile_units;
    std::vector<Candidate> left;
    std::vector<Cluster> clusters, split;
    std::vector<uint32_t> range_stamp;
    uint32_t stamp = 0;

    std::vector<Tile> tiles;
    Ints tile_rows;
    Buffer<uint64_t> masks;  // slots that see something, `words` each
    Buffer<int64_t> mask_of_run;

    // Of the tile that is being written. A vector has `width` deltas, the last ones beyond the tile's rows.
    std::vector<Local> local;  // range -> its sight in layer 0
    Buffer<Sight> sights;
    int32_t num_sights = 0;
    Buffer<int32_t> vectors;  // by sight
    int64_t width = 0;
    int64_t first_mask = 0;  // that of sight 0
    std::vector<uint64_t> keys;  // odd, of each two deltas
    Ints table;                  // groups by hash
    Buffer<Stretch> stretches, sorted;
    std::vector<Group> groups;

    Ints next, order, distinct;
    std::vector<Item> items;
    std::vector<int64_t> turns;  // cost of the changes of run up to each KV tile
    std::vector<int64_t> flat;   // no such costs
    Buffer<Piece> shares;
    Ints tile_of, slot_of;       // by row of the batch
    std::vector<Cut> cuts;
    Buffer<Cut> sorted_cuts;  // by item
    std::vector<uint64_t> cut_masks;

    // Greedy clusters of `chosen` units, appended to `made`; their units go to cluster_units.
    void cluster(const int32_t* chosen, int64_t count, int64_t cap, std::vector<Cluster>& made) {
        left.resize(count);
        for (int64_t i = 0; i < count; ++i) {
            const Unit& unit = in.units[chosen[i]];
            left[i] = {unit.length, chosen[i], static_cast<int32_t>(unit.size)};
        }
        std::sort(left.begin(), left.end(), [&](const Candidate& a, const Candidate& b) {
            return a.length != b.length ? a.length > b.length : a.unit < b.unit;
        });
        while (!left.empty()) {
            ++stamp;
            for (const Candidate& one : left) gain[one.unit] = 0;
            Cluster one{static_cast<int64_t>(cluster_units.size()), 0, 0, 0, 0, 0, 0};
            bool head = true;
            size_t best = 0;
            while (best < left.size()) {
                const Candidate taken = left[best];
                left.erase(left.begin() + best);
                cluster_units.push_back(taken.unit);
                one.rows += taken.size;
                head = head && one.rows <= slots.front();
                // One whose tokens are all covered brings none.
                if (gain[taken.unit] != taken.length) one.union_tokens += cover(taken.unit, !left.empty());
                if (head) {
                    one.head_rows = one.rows;
                    one.head_tokens = one.union_tokens;
                } else {
                    one.longest_other = std::max(one.longest_other, in.units[taken.unit].distinct);
                }
                best = left.size();
                if (one.rows == cap) break;
                int64_t most = -1;
                for (size_t i = 0; i < left.size(); ++i) {
                    const Candidate& other = left[i];
                    const int64_t tokens = gain[other.unit];
                    if (tokens < most || other.size > cap - one.rows || tokens < MIN_GAIN ||
                        tokens * MIN_GAIN_SHARE < other.length)
                        continue;
                    if (tokens == most && other.unit > left[best].unit) continue;
                    most = tokens;
                    best = i;
                }
            }
            one.last = static_cast<int64_t>(cluster_units.size());
            std::sort(cluster_units.begin() + one.first, cluster_units.end());
            made.push_back(one);
        }
    }

    // Tokens that a unit sees and that are not covered yet. They now are, which others gain from.
    int64_t cover(int32_t unit, bool others) {
        int64_t tokens = 0;
        for (int64_t i = in.units[unit].first_piece; i < in.units[unit].last_piece; ++i)
            for (int32_t r = in.seen[i].first_range; r < in.seen[i].last_range; ++r) {
                if (range_stamp[r] == stamp) continue;
                range_stamp[r] = stamp;
                const Range& range = in.ranges[r];
                const int64_t length = range.stop - range.start;
                tokens += length;
                if (!others) continue;
                for (int32_t m = range.first_member; m < range.last_member; ++m) gain[in.members[m]] += length;
            }
        return tokens;
    }

    void pack() {
        tiles.clear();
        tile_rows.clear();
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
        // The first part begins as the whole does, and is no more than that where it is full then: the longest of the
        // others is in another part. Each other one reads at least what its shortest unit sees.
        distinct.clear();
        for (int32_t u : tile_units) distinct.push_back(static_cast<int32_t>(in.units[u].distinct));
        const bool full = whole.head_rows == slots.front();
        const int64_t parts = up(whole.rows, slots.front()) - (full ? 2 : 1);
        std::partial_sort(distinct.begin(), distinct.begin() + parts, distinct.end());
        const double wide = static_cast<double>(whole.union_tokens) * parameters.wide_cost;
        int64_t least = whole.head_tokens + (full ? whole.longest_other : 0);
        for (int64_t part = 0; part < parts; ++part) least += distinct[part];
        if (wide <= static_cast<double>(least)) return false;
        cluster(tile_units.data(), static_cast<int64_t>(tile_units.size()), slots.front(), split);
        int64_t read = 0;
        for (const Cluster& part : split) read += part.union_tokens;
        if (wide > static_cast<double>(read)) return true;
        split.clear();
        return false;
    }

    void walk_tile(const int32_t* mine, int64_t number, int64_t height) {
        Tile tile{static_cast<int32_t>(height), static_cast<int64_t>(tile_rows.size()), 0, end_tile(), 0, true,
                  end_tile(), 0};
        for (int64_t i = 0; i < number; ++i) tile.num_rows += in.units[mine[i]].size;
        width = up(tile.num_rows, LANES) * LANES;
        begin_sights(mine, number);
        int64_t slot = 0;
        for (int64_t i = 0; i < number; ++i) {
            const Unit& unit = in.units[mine[i]];
            see(unit, slot);
            for (int64_t row = 0; row < unit.size; ++row)
                tile_rows.push_back(static_cast<int32_t>(unit.first_row + row));
            slot += unit.size;
        }
        group_sights();
        write_groups(tile);
        tile.end = end_tile();
        tiles.push_back(tile);
    }

    // Room for the sights of these units: at most one for each time that one of them sees a range.
    void begin_sights(const int32_t* mine, int64_t number) {
        int64_t most = 0;
        for (int64_t i = 0; i < number; ++i)
            for (int64_t p = in.units[mine[i]].first_piece; p < in.units[mine[i]].last_piece; ++p)
                most += in.seen[p].last_range - in.seen[p].first_range;
        num_sights = 0;
        sights.resize(most);
        vectors.resize(most * width);
        first_mask = static_cast<int64_t>(masks.size());
        masks.resize(first_mask + most * words);
        ++stamp;
    }

    // A unit, whose rows are in the slots from `slot` on, sees its pieces.
    void see(const Unit& unit, int64_t slot) {
        const int64_t across = width, mask_words = words, size = unit.size;
        const uint32_t now = stamp;
        const uint64_t bit = uint64_t{1} << slot % 64;
        Local* const locals = local.data();
        int32_t* const deltas = vectors.data() + slot;
        uint64_t* const bits = masks.data() + first_mask + slot / 64;
        const Seen* const end = in.seen.data() + unit.last_piece;
        for (const Seen* piece = in.seen.data() + unit.first_piece; piece != end; ++piece)
            for (int32_t r = piece->first_range; r < piece->last_range; ++r) {
                if (locals[r].stamp != now) locals[r] = {now, add_sight(r, 0)};
                int64_t sight = locals[r].sight;
                if (deltas[sight * across] != INVISIBLE) sight = deeper_sight(r, slot);
                deltas[sight * across] = piece->delta;
                bits[sight * mask_words] |= bit;
                for (int64_t row = 1; row < size; ++row) {
                    deltas[sight * across + row] = piece->delta;
                    masks[first_mask + sight * mask_words + (slot + row) / 64] |= uint64_t{1} << (slot + row) % 64;
                }
            }
    }

    // The sight of the first layer in which a slot does not see the range yet.
    int32_t deeper_sight(int32_t range, int64_t slot) {
        int32_t sight = local[range].sight;
        while (vectors[sight * width + slot] != INVISIBLE) {
            if (sights[sight].deeper < 0) {
                const int32_t deeper = add_sight(range, sights[sight].layer + 1);
                sights[sight].deeper = deeper;
            }
            sight = sights[sight].deeper;
        }
        return sight;
    }

    int32_t add_sight(int32_t range, int32_t layer) {
        const int32_t sight = num_sights++;
        sights[sight] = {range, layer, -1};
        std::fill_n(vectors.data() + sight * width, width, INVISIBLE);
        for (int64_t word = 0; word < words; ++word) masks[first_mask + sight * words + word] = 0;
        return sight;
    }

    // What is seen at one vector of deltas is one group, in the order in which the slots come upon it.
    void group_sights() {
        groups.clear();
        stretches.clear();
        size_t size = 64;
        while (static_cast<int64_t>(size) < 2 * num_sights) size *= 2;
        table.assign(size, -1);
        masks.resize(first_mask + num_sights * words);
        for (int32_t s = 0; s < num_sights; ++s) {
            const Sight& first = sights[s];
            if (first.layer) continue;
            const Range& range = in.ranges[first.range];
            const bool tail = in.tracks[range.track].tail_of >= 0;
            const Sight* sight = &first;
            while (true) {
                const int32_t g = group_of(static_cast<int32_t>(sight - sights.data()));
                if (tail) groups[g].tail = static_cast<int32_t>(stretches.size());
                ++groups[g].count;
                stretches.push_back({g, sight->layer, range.track, range.start, range.stop});
                if (sight->deeper < 0) break;
                sight = &sights[sight->deeper];
            }
        }
    }

    int32_t group_of(int32_t sight) {
        const int32_t* const vector = vectors.data() + sight * width;
        uint64_t hash = 0;
        for (int64_t i = 0; i < width / 2; ++i) {
            const uint64_t low = static_cast<uint32_t>(vector[2 * i]), high = static_cast<uint32_t>(vector[2 * i + 1]);
            hash += (low | high << 32) * keys[i];
        }
        hash ^= hash >> 32;
        hash *= keys[0];
        const size_t mask = table.size() - 1;
        size_t place = hash >> 32 & mask;
        while (table[place] >= 0) {
            const Group& group = groups[table[place]];
            if (group.hash == hash && std::equal(vector, vector + width, vectors.data() + group.sight * width))
                return table[place];
            place = (place + 1) & mask;
        }
        table[place] = static_cast<int32_t>(groups.size());
        groups.emplace_back(hash, sight);
        return table[place];
    }

    void hash_keys(size_t count) {
        while (keys.size() < count) {
            uint64_t key = (keys.size() + 1) * 0x9E3779B97F4A7C15u;
            key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9u;
            key = (key ^ key >> 27) * 0x94D049BB133111EBu;
            keys.push_back((key ^ key >> 31) | 1);
        }
    }

    void write_groups(Tile& tile) {
        // Groups with a tail go last; the stretches of each are brought together.
        order.clear();
        for (int tail = 0; tail < (reserve.indptr ? 2 : 1); ++tail)
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
        auto run = static_cast<int32_t>(out.runs.size());
        out.runs.resize(run + groups.size());
        mask_of_run.resize(out.runs.size());
        for (int32_t g : order) {
            const Group& group = groups[g];
            out.runs[run] = run_of(vectors.data() + group.sight * width, tile);
            mask_of_run[run] = first_mask + group.sight * words;
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
                if (open) tile.read += enter(open->track, open->start, stop, run);
                open = stretch;
                stop = stretch->stop;
            }
            if (open) tile.read += enter(open->track, open->start, stop, run);
            if (tail >= 0) {
                tile.read += enter(tail, stretches[group.tail].start, stretches[group.tail].stop, run);
                enter_reserve(tail, stretches[group.tail].stop, run);
            }
            pad(run);
            ++run;
        }
    }

    Run run_of(const int32_t* vector, const Tile& tile) {
        const int64_t rows = tile.num_rows;
        if (std::find_if(vector, vector + rows, [&](int32_t d) { return d != vector[0]; }) == vector + rows)
            return {vector[0], -1};
        const size_t at = out.deltas.size();
        out.deltas.resize(at + slots[tile.height]);
        std::copy_n(vector, rows, out.deltas.data() + at);
        std::fill_n(out.deltas.data() + at + rows, slots[tile.height] - rows, INVISIBLE);
        return {0, static_cast<int32_t>(at)};
    }

    int64_t end_tile() const { return static_cast<int64_t>(out.entries.size()) / parameters.boxes; }

    int64_t page_of(int64_t token) const {
        return page_shift >= 0 ? token >> page_shift : token / batch.page_size;
    }

    // Appends a stretch of a track; returns how many pages that are.
    int64_t enter(int32_t track, int64_t start, int64_t stop, int32_t run) {
        const auto size = static_cast<int32_t>(batch.page_size);
        const int64_t first = page_of(start), count = page_of(stop - 1) - first + 1;
        const int32_t* const pages = batch.list_pages + batch.list_indptr[in.tracks[track].list] + first;
        const size_t filled = out.entries.size();
        out.entries.resize(filled + count);
        Entry* const entries = out.entries.data() + filled;
        int64_t at = first * size;
        auto pos0 = static_cast<int32_t>(in.tracks[track].base + at);
        for (int64_t i = 0; i < count; ++i, pos0 += size) entries[i] = {pages[i], size << 16, pos0, run};
        entries[0].rows |= static_cast<int32_t>(start - at);
        at += (count - 1) * size;
        entries[count - 1].rows = (entries[count - 1].rows & 0xFFFF) | static_cast<int32_t>(stop - at) << 16;
        return count;
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
        if (parameters.boxes == 1) return;
        const int64_t filled = up(static_cast<int64_t>(out.entries.size()), parameters.boxes) * parameters.boxes;
        out.entries.resize(filled, Entry{-1, 0, 0, run});
    }

    int32_t run_at(int64_t tile) const { return out.entries[tile * parameters.boxes].run; }

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
        mask_of_run.resize(out.runs.size());  // not looked at

        const int64_t walk_end = end_tile(), boxes = parameters.boxes;
        std::vector<std::pair<int64_t, int64_t>> views;  // of each KV tile, first and last
        std::vector<int64_t> pages(1, 0);                // in front of each KV tile
        for (int64_t tile = walk_begin; tile < walk_end; ++tile) {
            int64_t low = INT64_MAX, high = INT64_MIN, count = 0;
            for (int64_t e = tile * boxes; e < (tile + 1) * boxes; ++e) {
                const Entry& entry = out.entries[e];
                if (!entry.rows) continue;
                ++count;
                const int64_t view = int64_t{entry.pos0} + out.runs[entry.run].delta;
                low = std::min(low, view + (entry.rows & 0xFFFF));
                high = std::max(high, view + (entry.rows >> 16) - 1);
            }
            views.emplace_back(low, high);
            pages.push_back(pages.back() + count);
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
            tiles.push_back({height, static_cast<int64_t>(tile_rows.size()), rows, begin, end, false, walk_begin,
                             pages[end - walk_begin] - pages[begin - walk_begin]});
            for (int64_t row = 0; row < rows; ++row)
                tile_rows.push_back(static_cast<int32_t>(unit.first_row + from + row));
        }
    }

    void assemble() {
        const int64_t heads = parameters.heads;
        const size_t items_of_tiles = tiles.size() * heads;
        cuts.clear();
        cut_masks.clear();
        const int64_t* const costs = turn_costs();
        for (size_t height = 0; height < slots.size(); ++height) {
            order.clear();
            items.clear();
            for (size_t t = 0; t < tiles.size(); ++t) {
                if (tiles[t].height != static_cast<int32_t>(height)) continue;
                order.push_back(static_cast<int32_t>(t));
                items.resize(items.size() + heads, Item{{tiles[t].begin, tiles[t].end}, tiles[t].walk});
            }
            if (order.empty()) continue;
            Class one{parameters.heights[height], slots[height], {}, {}, {}};
            one.tile_rows.reserve(order.size() * one.slots);
            for (int32_t t : order) {
                const auto rows = tile_rows.begin() + tiles[t].first_row;
                one.tile_rows.insert(one.tile_rows.end(), rows, rows + tiles[t].num_rows);
                one.tile_rows.resize(one.tile_rows.size() + one.slots - tiles[t].num_rows, -1);
            }
            share(items, costs, heads, parameters.workers[height], parameters, shares, one.work_indptr);
            one.works.reserve(shares.size());
            for (const Piece& piece : shares) {
                const auto number = static_cast<int32_t>(piece.item / heads), head = static_cast<int32_t>(piece.item % heads);
                const Tile& tile = tiles[order[number]];
                Work work{number, head, static_cast<int32_t>(tile.begin + piece.begin),
                          static_cast<int32_t>(tile.begin + piece.end), -1};
                if (piece.begin || piece.end != tile.end - tile.begin) {
                    work.part = static_cast<int32_t>(out.num_parts);
                    out.num_parts += tile.num_rows;
                    cuts.push_back({order[number] * heads + head, work.part, mask_of(tile, work)});
                }
                one.works.push_back(work);
            }
            out.classes.push_back(std::move(one));
        }
        merge(items_of_tiles);
        for (const Tile& tile : tiles) out.tokens_read += tile.read * batch.page_size;
    }

    // What the changes of run up to each KV tile cost.
    const int64_t* turn_costs() {
        const size_t count = end_tile();
        if (!parameters.run_cost) {
            if (flat.size() < count) flat.resize(count, 0);
            return flat.data();
        }
        turns.assign(count, 0);
        for (size_t k = 1; k < count; ++k)
            turns[k] = turns[k - 1] + parameters.run_cost * (run_at(k) != run_at(k - 1));
        return turns.data();
    }

    // The slots that see a run of the work, in cut_masks; -1 for all of the tile's.
    int32_t mask_of(const Tile& tile, const Work& work) {
        if (!tile.masked) return -1;
        const auto at = static_cast<int32_t>(cut_masks.size());
        cut_masks.resize(at + words, ~uint64_t{0});  // first the others
        uint64_t* const others = cut_masks.data() + at;
        for (int64_t word = 0; word < words; ++word) {
            const int64_t rows = tile.num_rows - word * 64;  // of the tile, from this word on
            if (rows < 64) others[word] = rows <= 0 ? 0 : ~uint64_t{0} >> (64 - rows);
        }
        const int32_t last = run_at(work.end - 1);
        for (int32_t run = run_at(work.begin); run <= last; ++run) {
            const uint64_t* const seeing = masks.data() + mask_of_run[run];
            uint64_t any = 0;
            for (int64_t word = 0; word < words; ++word) any |= others[word] &= ~seeing[word];
            if (any) continue;
            cut_masks.resize(at);
            return -1;
        }
        for (int64_t word = 0; word < words; ++word) others[word] = ~others[word];
        return at;
    }

    // The merge lists: the cuts of each row's and head's item, in the order in which they were made.
    void merge(size_t num_items) {
        const int64_t heads = parameters.heads;
        next.assign(num_items + 1, 0);  // behind the cuts of each item; those of an item that is not cut are none
        for (const Cut& one : cuts) ++next[one.item];
        int32_t total = 0;
        for (int32_t& count : next) count = total += count;
        sorted_cuts.resize(cuts.size());
        for (size_t i = cuts.size(); i-- > 0;) sorted_cuts[--next[cuts[i].item]] = cuts[i];
        tile_of.assign(batch.rows, -1);
        slot_of.resize(batch.rows);
        for (size_t t = 0; t < tiles.size(); ++t)
            for (int64_t slot = 0; slot < tiles[t].num_rows; ++slot) {
                const int32_t row = tile_rows[tiles[t].first_row + slot];
                tile_of[row] = static_cast<int32_t>(t);
                slot_of[row] = static_cast<int32_t>(slot);
            }

        out.merge_rows.resize(batch.rows * heads);
        out.merge_indptr.resize(batch.rows * heads + 1);
        out.merge_parts.resize(out.num_parts);
        int32_t *rows = out.merge_rows.data(), *indptr = out.merge_indptr.data();
        int32_t *const parts = out.merge_parts.data(), *part = parts;
        *indptr++ = 0;
        for (int64_t row = 0; row < batch.rows; ++row) {
            const int32_t slot = slot_of[row];
            for (int64_t head = 0; head < heads; ++head) {
                if (tile_of[row] >= 0) {
                    const int64_t item = tile_of[row] * heads + head;
                    if (next[item] == next[item + 1]) continue;
                    for (int32_t i = next[item]; i < next[item + 1]; ++i) {
                        const Cut& one = sorted_cuts[i];
                        if (one.mask >= 0 && !(cut_masks[one.mask + slot / 64] >> slot % 64 & 1)) continue;
                        *part++ = one.part + slot;
                    }
                }
                *rows++ = static_cast<int32_t>(row * heads + head);
                *indptr++ = static_cast<int32_t>(part - parts);
            }
        }
        out.merge_rows.resize(rows - out.merge_rows.data());
        out.merge_indptr.resize(indptr - out.merge_indptr.data());
        out.merge_parts.resize(part - parts);
    }
};

}  // namespace

Plan plan(const Batch& batch, const Parameters& parameters, const Reserve& reserve) {
    // Behind a pointer: the address of a thread's own object is looked up again at every use otherwise.
    static thread_local const auto planner = std::make_unique<Planner>();
    return planner->run(batch, parameters, reserve);
}

}  // namespace dagengine::planner
