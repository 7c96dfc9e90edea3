"""The bench of launches runs every part of a layer over the driver that does nothing."""

from __future__ import annotations

import pytest

from bench import launch_host


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_every_part_of_a_layer_is_timed(batch_invariant: bool) -> None:
    with launch_host.without_device():
        found = launch_host.measure(9, launch_host.BLOCK, batch_invariant)
    assert [*found] == ["qkv", "append", "attend", "out", "gate up", "down", "layer"]
    assert min(found.values()) > 0
