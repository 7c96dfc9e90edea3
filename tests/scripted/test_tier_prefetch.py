"""What is brought before it is asked for: by those who wait, and from a directory that answers late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from scripted_model import MODES
from scripted_tiers import GREEDY, SIZE, answered, ask, keep, node, offload, tier, world
from simulator import World

from dagengine import ContextRef, SamplingParams
from dagengine.recalling import Recalling
from dagengine.request import Request
from dagengine_kvstore import Tier
from dagengine_kvstore.persistent import Recalled
from dagengine_kvstore.recall import Recalls

pytestmark = pytest.mark.usefixtures("quiet")


def test_who_waits_prefetches_and_what_it_reads_leaves_last() -> None:
    """One runs at a time. While it does, what the second reads comes back, and stays though the third is older."""
    run = world(24, eviction="next_use")
    run.core._scheduler._config = run.core.config.__class__(max_num_seqs=1, max_num_batched_tokens=64)
    keep(run, "read", 4)
    keep(run, "unread", 4)
    offload(run, "read")
    ask(run, "running", own=3, sampling=SamplingParams(max_tokens=8, min_tokens=8, temperature=0.0))
    run.step()
    ask(run, "waiting", "read")
    while tier(run, "read") is not Tier.DEVICE:
        assert "running" not in run.ends
        run.step()
    assert run.core.stats.prefetches == 1
    assert (
        run.core._upcoming(node(run, "read")) is not None and run.core._upcoming(node(run, "unread")) is None
    )
    run.run()
    answered(run, "waiting")
    assert run.ends["waiting"].choices[0].dag.reloaded == 4 * SIZE


class LateDirectory:
    """Seems to hold every page; says that none came, when it is told to answer."""

    def __init__(self) -> None:
        self.asked = 0
        self.answers: list[Recalled] = []

    def holds(self, key: bytes) -> bool:
        return True

    def recall(self, pages: Sequence[object]) -> int:
        self.asked += 1
        return self.asked

    def recalled(self) -> list[Recalled]:
        answers, self.answers = self.answers, []
        return answers

    def answer(self) -> None:
        self.answers += [Recalled(number + 1, ()) for number in range(self.asked)]
        self.asked = 0


def with_late_directory(run: World) -> tuple[LateDirectory, Recalls]:
    directory = LateDirectory()
    recalls = Recalls(run.core.store, directory)  # type: ignore[arg-type]
    run.core._scheduler.queues.recalling = Recalling(recalls)
    return directory, recalls


def running(run: World, count: int, most: int) -> list[str]:
    """So many sequences that run, none of whose pages is in a directory."""
    names = [f"running {index}" for index in range(count)]
    for index, name in enumerate(names):
        sampling = replace(GREEDY, max_tokens=most, min_tokens=most)
        run.submit(Request(name, tuple(range(100 * index, 100 * index + 4)), sampling))
    for _ in range(3):
        run.step()
    assert run.core.num_running == count
    return names


def test_pages_of_a_recall_that_gave_way_are_waited_for_and_nobody_is_preempted() -> None:
    run = world(17)
    names = running(run, 4, 12)
    directory, recalls = with_late_directory(run)
    run.submit(Request("recalled", tuple(range(700, 717)), GREEDY))
    for _ in range(12):
        run.step()
    assert recalls.num_open == 1 and run.core.store.stats().pages_waiting >= 4, "it gave way"
    assert run.core._scheduler.num_preemptions == 0
    directory.answer()
    run.run()
    answered(run, *names, "recalled")
    assert run.core._scheduler.num_preemptions <= 1


@pytest.mark.parametrize("step_mode", MODES[1:], indirect=True)
@pytest.mark.usefixtures("step_mode")
def test_who_reads_what_is_not_known_yet_is_looked_for_in_no_directory() -> None:
    """What its pages would be found by is not known either; it joins and computes them."""
    run = world(40)
    directory, _ = with_late_directory(run)
    said = Request("said", tuple(range(700, 703)), GREEDY)
    run.submit(said, Request("next", tuple(range(800, 817)), GREEDY, (ContextRef(request="said"),)))
    run.run()
    answered(run, "said", "next")
    assert run.counts["joins"] == 1 and directory.asked == 0


def test_a_directory_that_does_not_answer_stops_neither_who_waits_for_it_nor_those_behind() -> None:
    run = world(40)
    directory, recalls = with_late_directory(run)
    run.submit(Request("recalled", tuple(range(700, 717)), GREEDY))
    run.step()
    assert recalls.num_open == 1
    run.submit(Request("behind", tuple(range(800, 817)), GREEDY))
    for _ in range(8):
        run.step()
    assert set(run.ends) == {"behind"}
    run.now += run.core.store.transfer_timeout_s
    run.run()
    answered(run, "recalled", "behind")
    assert run.ends["recalled"].choices[0].dag.computed == 17
    stats = run.core.store.stats()
    assert (recalls.num_lost, stats.open_fences, stats.pages_moving) == (1, 0, 4)
    directory.answer()
    run.step()
    stats = run.core.store.stats()
    assert (recalls.num_lost, stats.pages_moving, stats.pages_live) == (0, 0, 0)
