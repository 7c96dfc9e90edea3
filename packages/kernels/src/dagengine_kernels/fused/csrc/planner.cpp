// Spans -> a plan. planner_twin.py explains each step (units, tracks, ranges, tiles, groups, packs, shares) and gives the
// same arrays; what is done differently here is only how it is found.
#include "planner.h"

#include <algorithm>
#include <memory>
#include <tuple>

#include "clusters.h"
#include "ranges.h"
#include "sights.h"

namespace dagengine::planner {

namespace {

struct Tile {
    int32_t height;
    int64_t first_row, num_rows;  // into tile_rows
    int64_t begin, end;           // KV tiles
    bool masked;                  // whether `masks` of the runs are to be looked at
    int64_t walk;                 // where the walk begins that it is of
    int64_t read;                 // pages
};

// A work that leaves a partial result.
struct Cut {
    int64_t item;
    int32_t part;
    int32_t mask;  // into cut_masks: the slots that see something there; -1: all of them
};

constexpr int64_t PACKED = 4;  // as in planner_twin.py

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
        page_shift = -1;
        for (int shift = 0; shift < 15; ++shift)
            if (batch.page_size == int64_t{1} << shift) page_shift = shift;
        out = Plan{};
        out.entries.reserve(usual_entries);
        out.runs.reserve(usual_runs);
        out.deltas.reserve(usual_deltas);
        out.tails.assign(batch.sequences, NO_TAIL);
        in.find(batch, parameters.window, reserve, slots.back());
        clusters.begin(in, slots.front());
        sights.begin(in, slots.back());
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
    int page_shift = -1;  // of a page size that is a power of two

    Ranges in;
    Clusters clusters;
    std::vector<Cluster> whole, split;
    Sights sights;
    std::vector<Tile> tiles;
    Ints tile_rows;
    Buffer<int64_t> mask_of_run;  // into sights.masks

    Buffer<Stretch> sorted;
    Ints next, order, distinct, tile_units;
    std::vector<Ints> packs;  // groups; the last ones may be left of a tile before
    size_t num_packs = 0;
    Ints owners;              // of each group the slot that sees it where it is packed, else -1
    Ints times;               // groups of each slot that are in packs so far
    Ints union_of_pack;       // deltas
    std::vector<Item> items;
    std::vector<int64_t> turns;  // cost of the changes of run up to each KV tile
    std::vector<int64_t> flat;   // no such costs
    Buffer<Piece> shares;
    Ints tile_of, slot_of;       // by row of the batch
    std::vector<Cut> cuts;
    Buffer<Cut> sorted_cuts;  // by item
    std::vector<uint64_t> cut_masks;

    void pack() {
        tiles.clear();
        tile_rows.clear();
        for (const Unit& unit : in.long_units) walk_long(unit);
        tile_units.resize(in.units.size());
        for (size_t u = 0; u < in.units.size(); ++u) tile_units[u] = static_cast<int32_t>(u);
        whole.clear();
        clusters.find(tile_units.data(), static_cast<int64_t>(in.units.size()), slots.back(), whole);
        for (const Cluster& one : whole) {
            tile_units.assign(clusters.units.begin() + one.first, clusters.units.begin() + one.last);
            split.clear();
            if (one.rows <= slots.front())
                walk_tile(tile_units.data(), tile_units.size(), 0);
            else if (!is_split(one))
                walk_tile(tile_units.data(), tile_units.size(), slots.size() - 1);
            for (const Cluster& part : split)
                walk_tile(clusters.units.data() + part.first, part.last - part.first, 0);
        }
    }

    // Whether tiles of the lowest height read less for the units of a cluster (tile_units); they are then in `split`.
    bool is_split(const Cluster& one) {
        if (slots.size() == 1) return false;
        for (int32_t u : tile_units)
            if (in.units[u].size > slots.front()) return false;
        // The first part begins as the whole does, and is no more than that where it is full then: the longest of the
        // others is in another part. Each other one reads at least what its shortest unit sees.
        distinct.clear();
        for (int32_t u : tile_units) distinct.push_back(static_cast<int32_t>(in.units[u].distinct));
        const bool full = one.head_rows == slots.front();
        const int64_t parts = up(one.rows, slots.front()) - (full ? 2 : 1);
        std::partial_sort(distinct.begin(), distinct.begin() + parts, distinct.end());
        const double wide = static_cast<double>(one.union_tokens) * parameters.wide_cost;
        int64_t least = one.head_tokens + (full ? one.longest_other : 0);
        for (int64_t part = 0; part < parts; ++part) least += distinct[part];
        if (wide <= static_cast<double>(least)) return false;
        clusters.find(tile_units.data(), static_cast<int64_t>(tile_units.size()), slots.front(), split);
        int64_t read = 0;
        for (const Cluster& part : split) read += part.union_tokens;
        if (wide > static_cast<double>(read)) return true;
        split.clear();
        return false;
    }

    void walk_tile(const int32_t* mine, int64_t number, int64_t height) {
        Tile tile{static_cast<int32_t>(height), static_cast<int64_t>(tile_rows.size()), 0, end_tile(), 0, true,
                  end_tile(), 0};
        for (int64_t i = 0; i < number; ++i) {
            const Unit& unit = in.units[mine[i]];
            tile.num_rows += unit.size;
            for (int64_t row = 0; row < unit.size; ++row)
                tile_rows.push_back(static_cast<int32_t>(unit.first_row + row));
        }
        sights.find(mine, number, tile.num_rows);
        write_groups(tile);
        tile.end = end_tile();
        tiles.push_back(tile);
    }

    void write_groups(Tile& tile) {
        const auto& groups = sights.groups;
        const auto& stretches = sights.stretches;
        auto run = static_cast<int32_t>(out.runs.size());
        sort_stretches();
        const size_t packed = find_packs(tile);
        out.runs.resize(run + groups.size() - packed + num_packs);
        mask_of_run.resize(out.runs.size());
        // Groups with a tail go last.
        for (int tail = 0; tail < (reserve.indptr ? 2 : 1); ++tail)
            for (const Group& group : groups) {
                if ((group.tail >= 0) != (tail == 1)) continue;
                if (packed && owners[&group - groups.data()] >= 0) continue;
                out.runs[run] = run_of(sights.vector_of(group), tile);
                mask_of_run[run] = sights.mask_of(group);
                if (group.count == 1 && !tail) {
                    const Stretch& only = stretches[group.first];
                    tile.read += enter(only.track, only.start, only.stop, run);
                } else {
                    tile.read += enter_group(group, run);
                }
                pad(run);
                ++run;
            }
        for (size_t pack = 0; pack < num_packs; ++pack) write_pack(packs[pack], run++, tile);
    }

    // Which groups of one slot are packed (`owners`), and with which others (`packs`); returns how many.
    size_t find_packs(const Tile& tile) {
        num_packs = 0;
        if (!parameters.owners || tile.num_rows == 1) return 0;
        const auto& groups = sights.groups;
        const int64_t most = PACKED * parameters.boxes * batch.page_size;
        owners.assign(groups.size(), -1);
        times.assign(tile.num_rows, 0);
        size_t found = 0;
        bool grows = false;
        for (int32_t g = 0; g < static_cast<int32_t>(groups.size()); ++g) {
            const int32_t slot = sights.only_slot(groups[g]);
            if (slot < 0 || tokens_of(groups[g]) >= most) continue;
            owners[g] = slot;
            ++found;
            if (groups[g].tail >= 0)
                grows = true;
            else
                pack_at(times[slot]++).push_back(g);
        }
        if (grows) {
            Ints& last = pack_at(num_packs);
            for (int32_t g = 0; g < static_cast<int32_t>(groups.size()); ++g)
                if (owners[g] >= 0 && groups[g].tail >= 0) last.push_back(g);
        }
        size_t kept = 0;
        for (size_t pack = 0; pack < num_packs; ++pack) {
            if (packs[pack].size() == 1) {
                owners[packs[pack][0]] = -1;
                --found;
            } else if (kept++ != pack) {
                std::swap(packs[kept - 1], packs[pack]);
            }
        }
        num_packs = kept;
        return found;
    }

    Ints& pack_at(size_t number) {
        if (number == packs.size()) packs.emplace_back();
        if (number == num_packs) packs[num_packs++].clear();
        return packs[number];
    }

    int64_t tokens_of(const Group& group) {
        const Stretch* stretch = stretches_of(group);
        int64_t tokens = 0;
        for (int32_t i = 0; i < group.count; ++i, ++stretch) tokens += stretch->stop - stretch->start;
        return tokens;
    }

    // The pages of tails come behind all others, and behind them, for each page to grow into, one entry of each.
    void write_pack(const Ints& pack, int32_t run, Tile& tile) {
        const auto& groups = sights.groups;
        union_of_pack.assign(tile.num_rows, INVISIBLE);
        mask_of_run[run] = sights.add_mask();
        for (int32_t g : pack) {
            union_of_pack[owners[g]] = sights.vector_of(groups[g])[owners[g]];
            sights.see(mask_of_run[run], owners[g]);
        }
        out.runs[run] = run_of(union_of_pack.data(), tile);
        for (int32_t g : pack) {
            const size_t first = out.entries.size();
            tile.read += enter_parts(groups[g], run);
            own(first, owners[g]);
        }
        if (groups[pack[0]].tail >= 0) {
            const auto first = static_cast<int32_t>(out.entries.size());
            const auto width = static_cast<int32_t>(pack.size());
            int32_t longest = 0;
            for (int32_t g : pack) {
                const Stretch& tail = sights.stretches[groups[g].tail];
                tile.read += enter(tail.track, tail.start, tail.stop, run);
                own(out.entries.size() - 1, owners[g]);
                longest = std::max(longest, reserved_for(tail.track));
            }
            for (int32_t at = 0; at < longest; ++at)
                for (int32_t g : pack) {
                    const Stretch& tail = sights.stretches[groups[g].tail];
                    if (at >= reserved_for(tail.track)) {
                        out.entries.push_back({-1, 0, 0, run});
                        continue;
                    }
                    out.entries.push_back(reserved(tail.track, tail.stop, at, run));
                    own(out.entries.size() - 1, owners[g]);
                }
            for (int32_t place = 0; place < width; ++place) {
                const Stretch& tail = sights.stretches[groups[pack[place]].tail];
                grow(tail.track, tail.stop, first + place, width);
            }
        }
        pad(run);
    }

    void own(size_t first, int32_t owner) {
        for (size_t i = first; i < out.entries.size(); ++i) out.entries[i].rows |= (owner + 1) << OWNER_SHIFT;
    }

    // Brings the stretches of each group that has several together.
    void sort_stretches() {
        const auto& groups = sights.groups;
        if (groups.size() == sights.stretches.size()) return;
        next.resize(groups.size());
        int32_t total = 0;
        for (size_t g = 0; g < groups.size(); ++g) {
            next[g] = total;
            total += groups[g].count;
        }
        sorted.resize(total);
        for (const Stretch& stretch : sights.stretches) sorted[next[stretch.group]++] = stretch;
    }

    // The stretches of a group, together; sort_stretches came before.
    Stretch* stretches_of(const Group& group) {
        if (sights.groups.size() == sights.stretches.size()) return sights.stretches.data() + group.first;
        return sorted.data() + next[&group - sights.groups.data()] - group.count;
    }

    int64_t enter_group(const Group& group, int32_t run) {
        int64_t read = enter_parts(group, run);
        if (group.tail >= 0) {
            const Stretch& tail = sights.stretches[group.tail];
            read += enter(tail.track, tail.start, tail.stop, run);
            enter_reserve(tail.track, tail.stop, run);
        }
        return read;
    }

    // All of a group but its tail, neighbours as one; returns how many pages that are.
    int64_t enter_parts(const Group& group, int32_t run) {
        int64_t read = 0;
        const Stretch* const tail = group.tail >= 0 ? &sights.stretches[group.tail] : nullptr;
        if (group.count > 1 || !tail) {
            Stretch* const begin = stretches_of(group);
            Stretch* const end = begin + group.count;
            auto before = [](const Stretch& a, const Stretch& b) {
                return std::tie(a.layer, a.track, a.start) < std::tie(b.layer, b.track, b.start);
            };
            if (!std::is_sorted(begin, end, before)) std::sort(begin, end, before);
            const Stretch* open = nullptr;
            int32_t stop = 0;
            for (const Stretch* stretch = begin; stretch != end; ++stretch) {
                if (tail && stretch->track == tail->track) continue;
                if (open && open->layer == stretch->layer && open->track == stretch->track && stop == stretch->start) {
                    stop = stretch->stop;
                    continue;
                }
                if (open) read += enter(open->track, open->start, stop, run);
                open = stretch;
                stop = stretch->stop;
            }
            if (open) read += enter(open->track, open->start, stop, run);
        }
        return read;
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

    // How many pages a tail grows into when its last one is full.
    int32_t reserved_for(int32_t track) const {
        const int64_t sequence = in.tracks[track].tail_of;
        return reserve.indptr[sequence + 1] - reserve.indptr[sequence];
    }

    // The entry of the number-th of them.
    Entry reserved(int32_t track, int64_t stop, int32_t number, int32_t run) const {
        const int64_t size = batch.page_size, at = ((stop - 1) / size + 1 + number) * size;
        const int32_t page = reserve.pages[reserve.indptr[in.tracks[track].tail_of] + number];
        return {page, 0, static_cast<int32_t>(in.tracks[track].base + at), run};
    }

    // The entries that a tail grows into, behind the one of its last page.
    void enter_reserve(int32_t track, int64_t stop, int32_t run) {
        const auto last = static_cast<int32_t>(out.entries.size()) - 1;
        for (int32_t i = 0; i < reserved_for(track); ++i) out.entries.push_back(reserved(track, stop, i, run));
        grow(track, stop, last, 1);
    }

    // Notes where a tail grows, whose last page is in entry `last`, and the next ones `stride` apart behind it.
    void grow(int32_t track, int64_t stop, int32_t last, int32_t stride) {
        const int32_t full = stop % batch.page_size == 0, room = 1 + reserved_for(track) - full;
        if (room) out.tails[in.tracks[track].tail_of] = {last + full * stride, room, stride};
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
            const int32_t delta = in.seen[j].delta;
            const int64_t base = in.tracks[in.seen[j].where].base;
            if (!parameters.window && base + in.ends_of[j].stop - 1 + delta <= position) {
                const auto known = std::find(appeared.begin(), appeared.end(), delta) - appeared.begin();
                if (known == static_cast<int64_t>(appeared.size())) appeared.push_back(delta);
                by_view.push_back({0, known, j});
            } else {
                by_view.push_back({1, base + in.ends_of[j].start + delta, j});
            }
        }
        std::sort(by_view.begin(), by_view.end(), [](const Key& a, const Key& b) {
            return std::tie(a.late, a.key, a.piece) < std::tie(b.late, b.key, b.piece);
        });
        const int64_t walk_begin = end_tile();
        int64_t previous = -1;
        for (const Key& key : by_view) {
            const auto [track, delta] = in.seen[key.piece];
            const auto [first, stop] = in.ends_of[key.piece];
            int64_t start = first;
            if (previous < 0 || in.seen[previous].delta != delta) {
                if (previous >= 0) pad(static_cast<int32_t>(out.runs.size()) - 1);
                out.runs.push_back({delta, -1});
            } else if (in.seen[previous].where == track && in.ends_of[previous].stop == start && start % size) {
                const int64_t at = start / size * size;
                int32_t& rows = out.entries.back().rows;
                rows = static_cast<int32_t>((rows & 0xFFFF) | std::min<int64_t>(stop - at, size) << 16);
                start = std::min<int64_t>(stop, at + size);
            }
            if (start < stop) enter(track, start, stop, static_cast<int32_t>(out.runs.size()) - 1);
            previous = key.piece;
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
            size_t kin = 0;  // the first of the tiles that read what this one reads
            for (size_t t = 0; t < tiles.size(); ++t) {
                if (tiles[t].height != static_cast<int32_t>(height)) continue;
                order.push_back(static_cast<int32_t>(t));
                const Tile* const first = order.size() > 1 ? &tiles[kin] : nullptr;
                if (!first || !are_kin(tiles[t], *first)) kin = t;
                items.resize(items.size() + heads,
                             Item{tiles[t].begin, tiles[t].end, tiles[t].walk, static_cast<int64_t>(kin)});
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
                const auto number = static_cast<int32_t>(piece.item / heads);
                const auto head = static_cast<int32_t>(piece.item % heads);
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

    // Whether two tiles walk the same KV tiles, or begin with them for at least half of the longer walk.
    bool are_kin(const Tile& one, const Tile& other) const {
        if (one.walk == other.walk) return true;
        if (!one.masked || !other.masked) return false;  // chunks of a sequence
        const int64_t length = one.end - one.begin, others = other.end - other.begin;
        const int64_t half = (std::max(length, others) + 1) / 2;
        if (half > std::min(length, others)) return false;
        const Entry* const mine = out.entries.data() + one.begin * parameters.boxes;
        const Entry* const theirs = out.entries.data() + other.begin * parameters.boxes;
        return std::equal(mine, mine + half * parameters.boxes, theirs, [](const Entry& a, const Entry& b) {
            return a.page == b.page && a.rows == b.rows && a.pos0 == b.pos0;
        });
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
        const int64_t words = sights.words;
        const auto at = static_cast<int32_t>(cut_masks.size());
        cut_masks.resize(at + words, ~uint64_t{0});  // first the others
        uint64_t* const others = cut_masks.data() + at;
        for (int64_t word = 0; word < words; ++word) {
            const int64_t rows = tile.num_rows - word * 64;  // of the tile, from this word on
            if (rows < 64) others[word] = rows <= 0 ? 0 : ~uint64_t{0} >> (64 - rows);
        }
        const uint64_t* const all = sights.masks.data();
        const int64_t* mask = mask_of_run.data() + run_at(work.begin);
        for (const int64_t* const last = mask_of_run.data() + run_at(work.end - 1); mask <= last; ++mask) {
            if (words == 1) {
                if (others[0] &= ~all[*mask]) continue;
                cut_masks.resize(at);
                return -1;
            }
            const uint64_t* const seeing = all + *mask;
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
    if (parameters.invariant_chunk) return plan_alone(batch, parameters, reserve);
    // Behind a pointer: the address of a thread's own object is looked up again at every use otherwise.
    static thread_local const auto planner = std::make_unique<Planner>();
    return planner->run(batch, parameters, reserve);
}

}  // namespace dagengine::planner
