"""The collector while a server runs, and behind it."""

from __future__ import annotations

import gc

import pytest

from dagengine_server.garbage import THRESHOLDS, seldom_collected


@pytest.fixture(autouse=True)
def nothing_frozen() -> None:
    gc.unfreeze()


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_there_is_not_walked_until_the_block_ends(fails: bool) -> None:
    before, frozen, was_there = gc.get_threshold(), gc.get_freeze_count(), [[]]
    assert any(one is was_there for one in gc.get_objects())
    try:
        with seldom_collected():
            assert gc.get_threshold() == THRESHOLDS
            assert gc.get_freeze_count() > frozen and not any(one is was_there for one in gc.get_objects())
            if fails:
                raise ValueError("planted")
    except ValueError:
        assert fails
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0


def test_what_a_process_has_frozen_stays_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with seldom_collected():
            pass
        assert gc.get_freeze_count() >= frozen > 0
    finally:
        gc.unfreeze()


def test_cycles_are_still_found() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.own = self

    with seldom_collected():
        begin = gc.get_stats()[0]["collections"]
        for _ in range(2 * THRESHOLDS[0]):
            Cycle()
        assert gc.get_stats()[0]["collections"] > begin
