"""What a launch leaves behind where it fails: no page that the device may still write."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dagengine.pipeline import Pipeline
from dagengine_kvstore import KVStore


@pytest.mark.parametrize("lost", ["", "marker", "wait"])
def test_pages_of_a_failed_launch_are_kept_until_the_device_is_done_with_it(lost: str) -> None:
    """A load may fill them then, behind no step; where the device is lost, too, nothing is waited for."""
    store = KVStore(8, 4)
    done: list[int] = []

    def launch(*_: object) -> None:
        raise RuntimeError("planted")

    def wait() -> None:
        done.append(store.stats().open_fences)
        if lost == "wait":
            raise RuntimeError("lost")

    def marker() -> object:
        if lost == "marker":
            raise RuntimeError("lost")
        return wait

    runner = SimpleNamespace(launch=launch, marker=marker)
    pipeline = Pipeline(store, runner, None, lambda name: None, keep_logits=False)  # type: ignore[arg-type]
    chunk = SimpleNamespace(work=SimpleNamespace(backend="any"), count=1)
    flight = pipeline.launch([chunk])  # type: ignore[list-item]
    assert flight.failed and not done
    assert pipeline.collect() == (flight, [])
    assert done == ([] if lost == "marker" else [1])
    assert store.stats().open_fences == 0
