"""Bytes of paged KV. Knows shapes and sizes; knows no page that exists.

One layer's arena is `[num_pages, 2, num_kv_heads, page_size, head_dim]` (0 = K, 1 = V). A slot is
`page * page_size + row`.
"""

from __future__ import annotations

from dataclasses import dataclass

from dagengine_kvstore.errors import KVStoreError

DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True, slots=True)
class LayerGroupLayout:
    """Layers whose KV has one shape."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, field) < 1:
                raise KVStoreError("invalid_layout", f"{field} must be at least 1", field=field)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """All layer groups of a model under one page size and dtype.

    Raises KVStoreError `invalid_layout` for a dtype without a known size or a size below 1.
    """

    groups: tuple[LayerGroupLayout, ...]
    page_size: int
    dtype: str

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise KVStoreError("invalid_layout", "page_size must be at least 1", field="page_size")
        if self.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise KVStoreError("invalid_layout", f"dtype {self.dtype!r} is not one of {known}", field="dtype")

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token in all layers."""
        values = sum(group.num_layers * group.num_kv_heads * group.head_dim for group in self.groups)
        return 2 * values * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_page(self) -> int:
        return self.bytes_per_token * self.page_size

    def pages_in(self, num_bytes: int) -> int:
        """Whole pages that fit into a budget of bytes."""
        return num_bytes // self.bytes_per_page

    def pages_for(self, num_tokens: int) -> int:
        """Pages that one node of `num_tokens` tokens takes; the last one may stay partial."""
        return -(-num_tokens // self.page_size)
