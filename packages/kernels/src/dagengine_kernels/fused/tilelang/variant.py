"""What a compiled kernel is fixed to. Knows numbers only, so that it can be named where TileLang is not installed."""

from __future__ import annotations

from dataclasses import dataclass

PAGE_SIZE = 64
"""Tokens per page: the rows of a TMA box and a warpgroup's tile."""

FARTHEST = 2**30
"""Positions and deltas are smaller than this; what is not, marks rows that see everything or nothing."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What a compiled kernel is fixed to.

    Attributes:
        dtype: "bfloat16" or "float16".
        head_dim: D, 64 or 128.
        group: G, query heads per kv head.
        rows_per_tile: 64 or 128, one consumer warpgroup per 64.
        boxes: pages per KV tile, 1 or 2.
        stages: KV tiles in the ring.
        rotary_dim: leading elements of a head that turn; 0 for none.
        interleaved: neighbours turn together (else halves).
        windowed, capped: whether the kernel takes a window and a soft cap.
        ctas_per_sm: what the registers are bounded for.
    """

    dtype: str
    head_dim: int
    group: int
    rows_per_tile: int
    boxes: int
    stages: int
    rotary_dim: int
    interleaved: bool
    windowed: bool
    capped: bool
    ctas_per_sm: int

    @property
    def pingpong(self) -> bool:
        return self.consumers == 2

    @property
    def consumers(self) -> int:
        return self.rows_per_tile // 64

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)

    @property
    def registers(self) -> tuple[int, int] | None:
        """Per thread of the producer and of the consumers, out of a pool of 65536; None: as the compiler likes."""
        return {(2, 1): (24, 240), (1, 2): (24, 232)}.get((self.consumers, self.ctas_per_sm))

    @property
    def smem_bytes(self) -> int:
        """Shared memory of the tiles (barriers and row tables come on top: under 2 KiB)."""
        return 2 * self.head_dim * (self.rows_per_tile + 2 * self.stages * self.boxes * PAGE_SIZE)
