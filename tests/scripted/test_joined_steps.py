"""Requests that run in the step that completes what they read, such as a judge with its fragments."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scripted_joins import ONE, Steps, finish, judged, reads, world
from scripted_requests import document, question
from simulator import Settings, World

from dagengine import ContextRef, SamplingParams
from dagengine.request import Request

pytestmark = pytest.mark.usefixtures("step_mode", "quiet")


def test_a_judge_runs_with_its_fragments(steps: Steps) -> None:
    run = world()
    run.submit(*judged())
    run.run()
    assert steps == [{"a": (6, False), "b": (5, False), "judge": (3, True)}]
    assert list(run.ends) == ["a", "b", "judge"], "who is read ends first"
    assert run.ends["judge"].choices[0].dag.reused == 11
    finish(run)


def test_a_chain_runs_in_one_step_as_far_as_it_samples_nothing(steps: Steps) -> None:
    run = world()
    chain = [document("0", 5)]
    chain += [document(str(n), 2 + n, 10 * n, context=reads(str(n - 1))) for n in (1, 2, 3)]
    run.submit(*chain, question("first", *reads("3")), question("second", *reads("first")))
    run.run()
    assert list(steps[0]) == ["0", "1", "2", "3", "first"]
    assert [joins for _, joins in steps[0].values()] == [False, True, True, True, True]
    assert list(run.ends) == ["0", "1", "2", "3", "first", "second"]
    assert any("second" in step for step in steps[1:])
    finish(run)


def test_who_reads_what_joins_and_what_that_reads_joins_too(steps: Steps) -> None:
    run = world()
    middle = document("middle", 3, 200, context=reads("a"))
    run.submit(document("a", 6), document("b", 4, 300), middle, question("judge", *reads("a", "middle", "b")))
    run.run()
    assert list(steps[0]) == ["a", "b", "middle", "judge"]
    assert list(run.ends)[-1] == "judge"
    finish(run)


def test_those_before_others_join_first(steps: Steps) -> None:
    """Two readers, the later one of the higher priority, and tokens for one."""
    run = world(batch=9)
    low, high = (
        Request(name, (7, 8, 9), ONE, reads("a"), priority=p) for name, p in (("low", 1), ("high", 0))
    )
    run.submit(document("a", 6), low, high)
    run.run()
    assert steps[0] == {"a": (6, False), "high": (3, True)}
    finish(run)


def test_one_token_over_one_token_runs_in_one_step(steps: Steps) -> None:
    run = world()
    run.submit(document("a", 1), Request("judge", (7,), ONE, reads("a")))
    run.run()
    assert steps == [{"a": (1, False), "judge": (1, True)}]
    finish(run)


def test_several_answers_share_what_the_first_computes_and_come_later(steps: Steps) -> None:
    many = SamplingParams(max_tokens=2, temperature=1.0, n=3, seed=1)
    run = world()
    run.submit(*judged()[:2], question("judge", *reads("a", "b"), sampling=many))
    run.run()
    assert steps[0] == {"a": (6, False), "b": (5, False), "judge": (3, True)}
    assert len(run.ends["judge"].choices) == 3
    finish(run)


def test_a_fragment_in_chunks_is_joined_by_its_last_one(steps: Steps) -> None:
    run = world(batch=16)
    run.submit(document("a", 40), Request("judge", (7, 8, 9), ONE, reads("a")))
    run.run()
    assert [step.get("judge") for step in steps] == [None, None, (3, True)]
    finish(run)


def test_a_judge_takes_what_is_left_of_a_step(steps: Steps) -> None:
    run = world(batch=13)
    run.submit(*judged())
    run.run()
    assert [step.get("judge") for step in steps] == [(2, True), (1, False)]
    finish(run)


def test_who_waits_to_find_what_is_left_does_not_join(steps: Steps) -> None:
    run = world()
    run.submit(document("a", 6), Request("after", (*document("a", 6).input_ids, 7), ONE, after=("a",)))
    run.run()
    assert not any(joins for step in steps for _, joins in step.values())
    assert run.ends["after"].choices[0].dag.reused == 4
    finish(run)


def test_those_that_join_do_so_in_the_order_in_which_they_wait(steps: Steps) -> None:
    run = world()
    first = Request("second", (7, 8), ONE, reads("a"), priority=1)
    run.submit(document("a", 6), first, document("b", 5, 300), Request("first", (7,), ONE, reads("b")))
    run.run()
    assert steps == [{"a": (6, False), "b": (5, False), "first": (1, True), "second": (2, True)}]
    finish(run)


def test_what_is_read_is_sealed_in_the_order_in_which_it_is_read(steps: Steps) -> None:
    run = world(seqs=9)
    names = [f"part {number}" for number in range(8)]
    parts = [document(name, 2, 10 * number) for number, name in enumerate(names)]
    run.submit(*parts, Request("judge", (7,), ONE, reads(*names)))
    run.run()
    sealed = [event.node for event in run.core.store.events if event.kind == "seal"]
    assert len(steps) == 1 and len(sealed) == 8 and sealed == sorted(sealed)
    finish(run)


@pytest.mark.parametrize(
    "why", ["tokens", "pages", "sequences", "another waits", "another backend", "evicted"]
)
def test_who_cannot_join_runs_later(why: str, steps: Steps) -> None:
    pages = {"pages": 6, "another waits": 8}.get(why, 64)
    run = world(pages, batch=11 if why == "tokens" else 64, seqs=2 if why == "sequences" else 8)
    fragments, judge = judged()[:2], judged()[2]
    if why == "another backend":
        judge = judged(backend="scripted-twin")[2]
    if why == "evicted":
        run.submit(document("old", 5, 500))
        run.run()
        run.overwrite()
        context = (*reads("a", "b"), ContextRef(state=run.handle("old").id))
        judge = Request("judge", (7, 8, 9), ONE, context)
    if why == "pages":
        run.submit(Request("busy", tuple(range(5)), SamplingParams(max_tokens=3)))
    if why == "another waits":
        run.submit(Request("large", tuple(range(28)), ONE))
        fragments = [replace(fragment, priority=-1) for fragment in fragments]
    run.submit(*fragments, judge)
    run.run()
    assert run.ends["judge"].error is None
    assert not any(joins for step in steps for _, joins in step.values())
    finish(run)


def test_states_are_evicted_for_who_joins_as_for_who_runs_later(steps: Steps) -> None:
    run = world(pages=6)
    run.submit(document("old", 10, 500))
    run.run()
    run.submit(document("a", 8), Request("judge", tuple(range(8)), ONE, reads("a")))
    run.run()
    assert [step.get("judge") for step in steps if "judge" in step] == [(8, True)]
    assert run.core.store.stats().evictions > 0
    finish(run)


def test_a_full_step_leaves_tokens_to_who_joins(steps: Steps) -> None:
    """Judges of many fragments answer one after the other, each with its own, not behind all fragments."""
    run = world(pages=200, batch=64, seqs=64)
    group = []
    for n in range(6):
        fragments = [document(f"{n} {part}", 10, 300 * n + 30 * part) for part in range(2)]
        group += [*fragments, Request(f"judge {n}", (7,), ONE, reads(*(one.id for one in fragments)))]
    run.submit(*group)
    run.run()
    assert all(sum(count for count, _ in step.values()) <= 64 for step in steps)
    where = {name: at for at, step in enumerate(steps) for name in step}
    joined = [where[f"judge {n}"] == where[f"{n} 1"] for n in range(6)]
    assert joined == [True] * 6, "a sixteenth of 64 tokens holds the judges of a step"
    finish(run)


def test_what_is_left_by_those_who_could_join_takes_no_pages_of_what_was_chosen() -> None:
    """Who waits first needs pages for what it reads, and those that decode behind it have them."""
    run = World(0, Settings(16, 16, 16, 17))
    run.submit(document("old", 20, 500))
    run.run()
    run.overwrite()
    long = SamplingParams(max_tokens=9, temperature=1.0, seed=1)
    said = question("said", sampling=long, priority=1)
    run.submit(said, question("judge", *reads("said"), sampling=ONE, priority=1))
    for number in range(14):
        run.submit(question(f"other {number}", sampling=long, priority=1))
    while run.core.num_running < 15:
        run.step()
    run.submit(question("first", ContextRef(state=run.handle("old").id), sampling=ONE))
    run.run()
    assert all(end.error is None for end in run.ends.values())
    finish(run)


def test_what_is_left_to_those_who_join_is_no_token_of_one_that_decodes(steps: Steps) -> None:
    run = world(400, batch=16, seqs=16)
    long = SamplingParams(max_tokens=30, temperature=1.0, seed=1)
    run.submit(question("said", sampling=long), question("judge", *reads("said"), sampling=ONE))
    for number in range(15):
        run.submit(question(f"other {number}", sampling=long))
    run.run()
    assert sum(len(step) == 16 for step in steps) > 15, "all of them decode in one step"
    finish(run)
