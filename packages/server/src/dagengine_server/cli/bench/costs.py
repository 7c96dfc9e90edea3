"""What a model reads and computes, counted from its geometry. Floors that times are set beside; nothing is measured.

N layers, H hidden size, Hq query and Hkv KV heads of D, I intermediate size, V vocabulary, b bytes of a number:

    linear = N (H (Hq + 2 Hkv) D + Hq D H + 3 H I)      numbers of the matrices that every token goes through
    a decode step reads    b (linear + H V)  once, and  2 b N Hkv D  for every token that a sequence sees
    a prefill computes     2 linear a token, and  4 N Hq D  for every pair of a token and one that it sees
Biases, norms and embedding rows are left out: less than a thousandth.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Costs:
    """Counts of one model in one dtype.

    Attributes:
        weight_bytes: read by every step that samples.
        kv_bytes: of one token over all layers.
        linear_flops: of one token outside of attention, the output matrix left out.
        pair_flops: of one token that attends one other.
    """

    weight_bytes: int
    kv_bytes: int
    linear_flops: int
    pair_flops: int

    @classmethod
    def of(cls, geometry: Any, dtype: str) -> Costs:
        """From the engine's `ModelGeometry`, and the dtype of weights and KV."""
        size = ITEM_BYTES[dtype]
        hidden, dim = geometry.hidden_size, geometry.head_dim
        heads, kv_heads = geometry.num_heads, geometry.num_kv_heads
        matrices = hidden * (heads + 2 * kv_heads) * dim + heads * dim * hidden
        linear = geometry.num_layers * (matrices + 3 * hidden * geometry.intermediate_size)
        return cls(
            weight_bytes=size * (linear + hidden * geometry.vocab_size),
            kv_bytes=sum(2 * g.num_kv_heads * g.head_dim * len(g.layers) for g in geometry.groups) * size,
            linear_flops=2 * linear,
            pair_flops=4 * geometry.num_layers * heads * dim,
        )

    def step_bytes(self, seen: int) -> int:
        """Read by a decode step of sequences that see `seen` tokens together, each token once per sequence."""
        return self.weight_bytes + seen * self.kv_bytes

    def prefill_flops(self, parts: Iterable[tuple[int, int]]) -> int:
        """Of computing parts of (new tokens, tokens seen before them)."""
        total = 0
        for new, before in parts:
            total += new * self.linear_flops + (new * before + new * (new + 1) // 2) * self.pair_flops
        return total
