from __future__ import annotations

import pytest
from kvstore_helpers import refused

from dagengine_kvstore import KVLayout, LayerGroupLayout


def test_bytes_are_those_of_k_and_v_in_all_groups() -> None:
    layout = KVLayout((LayerGroupLayout(2, 4, 64), LayerGroupLayout(1, 1, 128)), 16, "bfloat16")
    assert layout.bytes_per_token == 2 * (2 * 4 * 64 + 128) * 2
    assert layout.bytes_per_page == 16 * layout.bytes_per_token
    assert layout.pages_in(3 * layout.bytes_per_page + 1) == 3
    assert [layout.pages_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_impossible_layouts_are_refused() -> None:
    with refused("invalid_layout", "dtype"):
        KVLayout((), 16, "int3")
    with refused("invalid_layout", "page_size"):
        KVLayout((), 0, "float32")
    with refused("invalid_layout", "head_dim"):
        LayerGroupLayout(1, 1, 0)


def test_the_arena_has_the_layout_and_starts_as_zeros() -> None:
    torch = pytest.importorskip("torch")
    from dagengine_kvstore.torch_arena import TorchArena

    arena = TorchArena(2, 5, 4, 3, 8, torch.bfloat16, "cpu")
    layout = KVLayout((LayerGroupLayout(2, 3, 8),), 4, "bfloat16")
    assert arena.layer(1).shape == (5, 2, 3, 4, 8) and arena.layer(1).dtype is torch.bfloat16
    assert not arena.layer(0).any() and arena.num_layers == 2
    assert arena.num_bytes == 5 * layout.bytes_per_page
    arena.layer(0)[4, 1, 2, 3, 7] = 1
    assert arena.layer(0)[4, 1, 2, 3, 7] == 1 and not arena.layer(1).any()
    with refused("invalid_layout", "num_pages"):
        TorchArena(1, 0, 4, 3, 8, torch.float32)
