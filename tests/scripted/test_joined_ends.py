"""How requests end that run in the step that completes what they read: aborted, failed, refused, or last."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_joins import ONE, Steps, finish, judged, reads, world
from scripted_model import ScriptedBackend
from scripted_requests import EVERY_MODE, document, question

from dagengine import ContextRef, Keep, SamplingParams
from dagengine.request import Request

pytestmark = pytest.mark.usefixtures("step_mode", "quiet")


@pytest.mark.parametrize("victim", ["a", "b", "judge", "reader"])
@pytest.mark.parametrize("batch", [64, 12, 5])
def test_abort_at_every_step(victim: str, batch: int) -> None:
    number = 0
    while True:
        run = world(batch=batch)
        run.submit(*judged(keep=Keep()), question("reader", *reads("judge")))
        run.run(number)
        ended = victim in run.ends
        run.abort(victim)
        if ended:
            break
        run.run()
        failed = {name for name, end in run.ends.items() if end.error is not None}
        expected = {
            "a": {"a", "judge", "reader"},
            "b": {"b", "judge", "reader"},
            "judge": {"judge", "reader"},
        }
        assert failed == expected.get(victim, {victim})
        finish(run)
        number += 1
    assert number > 0


@pytest.mark.parametrize("victim", ["said", "other", "judge", "reader"])
def test_abort_at_every_step_of_a_judge_and_its_candidates(victim: str) -> None:
    """Among them that in which a last token is not known, and that behind it, when nothing is closed yet."""
    number = 0
    while True:
        run = world()
        said = [
            question(name, sampling=SamplingParams(max_tokens=length, temperature=1.0, seed=length))
            for name, length in (("said", 2), ("other", 3))
        ]
        judge = question("judge", *reads("said", "other"), sampling=ONE, keep=Keep())
        run.submit(*said, judge, question("reader", *reads("judge"), sampling=ONE))
        run.run(number)
        if victim in run.ends:
            break
        ends = set(run.ends)
        run.abort(victim)
        run.run()
        failed = {name for name, end in run.ends.items() if end.error is not None}
        behind = {"reader"} if victim == "reader" else {"judge", "reader"}
        assert failed == {victim, *behind} and not failed & ends
        finish(run)
        number += 1
    assert number


def fail_step(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step of that number fails in its second layer."""
    whole, calls = ScriptedBackend.run, 0

    def broken(self: ScriptedBackend, plan: Any, layer: int, *args: Any, **kwargs: Any) -> object:
        nonlocal calls
        calls += layer == 0
        if calls == failing and layer == 1:
            raise RuntimeError("planted")
        return whole(self, plan, layer, *args, **kwargs)

    monkeypatch.setattr(ScriptedBackend, "run", broken)


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_step_that_fails_ends_all_of_it(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that fragments and judge share, or one of those behind it; nothing of it is found afterwards."""
    run = world()
    run.expected_errors = frozenset({"internal"})
    fail_step(failing, monkeypatch)
    judge = question("judge", *reads("a", "b"), keep=Keep())
    run.submit(*judged()[:2], judge, question("reader", *reads("judge")))
    run.run()
    codes = {name: end.error and end.error.code for name, end in run.ends.items()}
    read = "internal" if failing == 1 else None
    assert codes == {"a": read, "b": read, "judge": codes["judge"], "reader": "parent_failed"}
    assert codes["judge"] in ("internal", "parent_failed")
    again = judged()
    run.submit(*(Request(f"{r.id} again", r.input_ids, r.sampling, keep=r.keep) for r in again))
    run.run()
    found = [run.ends[f"{name} again"].choices[0].dag.reused for name in ("a", "b")]
    assert found == ([0, 0] if failing == 1 else [6, 5])
    finish(run)


def staggered() -> list[Request]:
    """Two candidates, one a step longer than the other, their judge, and who reads that."""
    short, long = (SamplingParams(max_tokens=length, temperature=1.0, seed=length) for length in (3, 4))
    judge = question("judge", *reads("short", "long"), keep=Keep())
    said = [question("short", sampling=short), question("long", sampling=long)]
    return [*said, judge, question("reader", *reads("judge"))]


@pytest.mark.parametrize("failing", range(1, 9))
def test_who_joins_reads_what_a_step_in_flight_completes_or_ends_with_it(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = world()
    run.expected_errors = frozenset({"internal"})
    fail_step(failing, monkeypatch)
    run.submit(*staggered())
    run.run()
    codes = {name: end.error and end.error.code for name, end in run.ends.items()}
    assert set(codes) == {"short", "long", "judge", "reader"}
    assert "internal" in codes.values()
    if codes["short"] or codes["long"]:
        assert codes["judge"] in ("parent_failed", "internal") and codes["reader"] == "parent_failed"
    finish(run)


@pytest.mark.parametrize("victim", ["short", "long", "judge", "reader"])
def test_abort_at_every_step_of_candidates_that_end_apart(victim: str) -> None:
    number = 0
    while True:
        run = world()
        run.submit(*staggered())
        for _ in range(number):
            run.step()
        if victim in run.ends:
            break
        run.abort(victim)
        run.run()
        finish(run)
        number += 1
    assert number > 0


def test_a_judge_that_is_refused_is_told_so_behind_its_fragments() -> None:
    run = world(pages=6)
    run.submit(*judged(own=40))
    run.run()
    assert list(run.ends) == ["a", "b", "judge"]
    error = run.ends["judge"].error
    assert error is not None and error.code == "capacity"
    finish(run)


@EVERY_MODE
@pytest.mark.parametrize("fails", [False, True])
def test_who_has_nothing_to_compute_ends_behind_what_it_reads(fails: bool) -> None:
    """Its own tokens were computed before, under the same context; what it reads is computed now, or fails."""
    nothing = (ContextRef(request="a", mode="artifact", span=(0, 0)),)
    run = world()
    run.submit(document("old", 4, 300))
    run.run()
    run.submit(document("a", 6), document("reader", 4, 300, context=nothing))
    run.core._backend("scripted").fail_at = 1 if fails else None
    run.run()
    assert list(run.ends) == ["old", "a", "reader"]
    assert [end.error and end.error.code for end in run.ends.values()] == (
        [None, "internal", "parent_failed"] if fails else [None, None, None]
    )
    finish(run)


@EVERY_MODE
@pytest.mark.parametrize("failing", range(4, 8))
def test_what_ended_behind_what_it_reads_does_not_fail_with_a_step_that_is_settled(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its only token stops it, so that the step in flight has a row of it that nobody wants."""
    run = world()
    run.expected_errors = frozenset({"internal"})
    run.submit(document("state", 4, 700))
    run.run()
    fail_step(failing, monkeypatch)
    stopped = SamplingParams(max_tokens=9, temperature=1.0, seed=1, stop_token_ids=tuple(range(4096)))
    said = question("said", sampling=SamplingParams(max_tokens=2, temperature=1.0, seed=1))
    long = question("long", sampling=SamplingParams(max_tokens=9))
    run.submit(said, question("judge", *reads("said"), sampling=stopped), long)
    while run.core.has_work:
        run.step()
        if any(sequence.request.id == "judge" for sequence in run.core._to_close):
            run.core.release_state(run.core.reposition(run.handle("state").id, 50))
            for event in run.core.take_events():
                run._take(event)
            assert list(run.ends)[1:3] == ["said", "judge"] and run.ends["judge"].error is None
    finish(run)


@EVERY_MODE
def test_what_is_settled_in_between_is_closed_before_anybody_takes_its_pages(steps: Steps) -> None:
    """A state is repositioned, which collects the steps in flight, while fragments and judge are among them."""
    run = world(pages=10)
    run.submit(document("state", 4, 700))
    run.run()
    run.submit(*judged(keep=Keep()))
    run.step()
    state = run.core.reposition(run.handle("state").id, 50)
    run.submit(Request("urgent", tuple(range(20)), ONE, priority=-5))
    run.run()
    run.core.release_state(state)
    assert {name: end.error for name, end in run.ends.items() if end.error} == {}
    finish(run)
