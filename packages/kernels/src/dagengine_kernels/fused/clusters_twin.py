"""Which units read together, in Python, as csrc/clusters.h has it. Knows ranges and numbers of slots; not walks."""

from __future__ import annotations

from collections.abc import Sequence

from dagengine_kernels.fused.ranges_twin import Ranges

MIN_GAIN = 64
"""Tokens in common below which sharing a tile is not worth its masks."""

MIN_GAIN_SHARE = 8
"""A unit joins a tile only with at least 1 / MIN_GAIN_SHARE of its tokens in common."""


def find_tiles(found: Ranges, slots: Sequence[int], wide_cost: float) -> list[tuple[list[int], int]]:
    """Tiles as (units ascending, height)."""
    packed = []
    for units, union in cluster(found, range(len(found.units)), slots[-1]):
        if sum(found.units[u].size for u in units) <= slots[0]:
            packed.append((units, 0))
            continue
        highest = len(slots) - 1
        if highest and all(found.units[u].size <= slots[0] for u in units):
            parts = cluster(found, units, slots[0])
            if union * wide_cost > sum(part for _, part in parts):
                packed += [(part, 0) for part, _ in parts]
                continue
        packed.append((units, highest))
    return packed


def cluster(found: Ranges, units: Sequence[int], slots: int) -> list[tuple[list[int], int]]:
    """Greedy clusters of at most `slots` rows: (units ascending, tokens of the union of what they see)."""
    length = {u: found.units[u].length for u in units}
    left = dict.fromkeys(sorted(units, key=lambda u: (-length[u], u)))
    clusters = []
    while left:
        chosen: list[int] = []
        covered: set[int] = set()
        gain = dict.fromkeys(units, 0)
        free = slots
        best: int | None = next(iter(left))
        while best is not None:
            chosen.append(best)
            free -= found.units[best].size
            del left[best]
            for index in found.unit_ranges[best]:
                if index not in covered:
                    covered.add(index)
                    for u, _ in found.ranges[index].members:
                        if u in gain:
                            gain[u] += found.ranges[index].stop - found.ranges[index].start
            fit = [
                u
                for u in left
                if found.units[u].size <= free
                and gain[u] >= MIN_GAIN
                and gain[u] * MIN_GAIN_SHARE >= length[u]
            ]
            best = min(fit, key=lambda u: (-gain[u], u), default=None)
        union = sum(found.ranges[index].stop - found.ranges[index].start for index in covered)
        clusters.append((sorted(chosen), union))
    return clusters
