"""Requests that run in the step that completes what they read, such as a judge with its fragments."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from scripted_model import ScriptedBackend
from scripted_requests import EVERY_MODE, document, question
from simulator import Settings, World

from dagengine import ContextRef, Keep, SamplingParams
from dagengine.prepare import Preparer
from dagengine.request import Request
from dagengine.runner import Chunk
from dagengine.sampler import NonFiniteLogits
from dagengine.scheduler import Scheduler
from dagengine.sequence import Sequence
from dagengine.work import Work
from dagengine_kvstore import NodeRecord

pytestmark = pytest.mark.usefixtures("step_mode", "quiet")

ONE = SamplingParams(max_tokens=1, temperature=0.0)


def world(pages: int = 64, *, page_size: int = 4, batch: int = 64, seqs: int = 8) -> World:
    return World(0, Settings(page_size, pages, batch, seqs))


def reads(*names: str) -> tuple[ContextRef, ...]:
    return tuple(ContextRef(request=name) for name in names)


def judged(*, own: int = 3, **options: object) -> list[Request]:
    """Two fragments, and who reads both."""
    judge = Request("judge", tuple(range(7, 7 + own)), ONE, reads("a", "b"), **options)  # type: ignore[arg-type]
    return [document("a", 6), document("b", 5, 300), judge]


def name_of(work: Work) -> str:
    return work.request.id if isinstance(work, Sequence) else "restored"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, tuple[int, bool]]]:
    """Of every step that was chosen: tokens by request, and whether it joins."""
    seen: list[dict[str, tuple[int, bool]]] = []
    schedule = Scheduler.schedule

    def watched(self: Scheduler, **options: Any) -> list[Chunk] | None:
        chunks = schedule(self, **options)
        if chunks:
            seen.append({name_of(chunk.work): (chunk.count, chunk.joins) for chunk in chunks})
            joins = [chunk.joins for chunk in chunks]
            assert joins == sorted(joins), "who joins stands behind the others"
        return chunks

    monkeypatch.setattr(Scheduler, "schedule", watched)
    return seen


def finish(run: World) -> None:
    run.run()
    run.clean_up()
    run.forget_everything()


Steps = list[dict[str, tuple[int, bool]]]


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


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Of every step that somebody joined: whose last tokens nobody knew when it was chosen."""
    seen: list[set[str]] = []
    schedule = Scheduler.schedule

    def watched(self: Scheduler, **options: Any) -> list[Chunk] | None:
        chunks = schedule(self, **options)
        if chunks and chunks[-1].joins:
            seen.append({name_of(chunk.work) for chunk in chunks if chunk.pending is not None})
        return chunks

    monkeypatch.setattr(Scheduler, "schedule", watched)
    return seen


def test_what_was_said_is_joined_before_the_last_of_it_is_known(
    steps: Steps, unknown: list[set[str]], step_mode: str
) -> None:
    """Where steps overlap, in the step behind the one that samples it."""
    run = world()
    run.submit(question("said", keep=Keep()), question("next", *reads("said"), sampling=ONE))
    run.run()
    assert steps[-1] == {"said": (1, False), "next": (3, True)}
    assert [step["said"][0] for step in steps] == [3, 1, 1, 1, 1]
    assert unknown == [set() if step_mode == "at once" else {"said"}]
    assert list(run.ends) == ["said", "next"]
    finish(run)


def test_who_reads_what_is_not_known_is_joined_by_nobody(
    steps: Steps, unknown: list[set[str]], step_mode: str
) -> None:
    """What its pages are found by is not known either; so a chain goes on a step later."""
    run = world()
    run.submit(question("said"), document("next", 4, context=reads("said")), question("last", *reads("next")))
    run.run()
    joined = next(step for step in steps if "next" in step)
    assert joined["next"] == (4, True) and ("last" in joined) is (step_mode == "at once")
    assert unknown == [set() if step_mode == "at once" else {"said"}]
    assert not any(end.error for end in run.ends.values())
    finish(run)


def test_sealing_what_who_joins_reads_is_not_what_it_waits_for(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed: list[float] = []
    seal = Preparer.seal

    def slowly(self: Preparer, *args: Any, **options: Any) -> NodeRecord:
        sealed.append(time.perf_counter())
        time.sleep(5e-3)
        return seal(self, *args, **options)

    monkeypatch.setattr(Preparer, "seal", slowly)
    run = world()
    begin = time.perf_counter()
    run.submit(*judged())
    run.run()
    assert steps[0]["judge"] == (3, True) and len(sealed) == 2
    assert begin + run.ends["judge"].choices[0].dag.timing.waited / 1e3 <= sealed[0]
    finish(run)


@pytest.mark.parametrize("own", [3, 4])
def test_an_answer_of_one_token_is_found_again_to_its_end(own: int, steps: Steps) -> None:
    """It is sealed while the step of its input runs, and what it holds is worked out then."""
    run = world()
    said = Request("said", tuple(range(7, 7 + own)), ONE, keep=Keep())
    run.submit(said, question("next", *reads("said"), sampling=ONE))
    run.run()
    assert steps == [{"said": (own, False)}, {"said": (1, False), "next": (3, True)}]
    held = (*said.input_ids, *run.ends["said"].choices[0].token_ids)
    run.submit(Request("again", held, None, keep=Keep()))
    run.run()
    assert run.ends["again"].choices[0].dag.reused == own + 1
    finish(run)


def test_who_joins_waited_until_all_that_it_reads_was_known(steps: Steps) -> None:
    """Also where it was begun before that: a judge's time begins with its candidates' last tokens."""
    run = world()
    run.submit(question("said", sampling=ONE), question("next", *reads("said"), sampling=ONE))
    run.run()
    assert steps[-1]["next"] == (3, True)
    said, timing = (run.ends[name].choices[0].dag.timing for name in ("said", "next"))
    assert said.first_token < timing.waited < timing.first_token
    finish(run)


PENALTY = SamplingParams(max_tokens=2, temperature=0.0, repetition_penalty=1.3)
ARTIFACT = ContextRef(request="said", mode="artifact")


@pytest.mark.parametrize(
    ("reader", "ends_short", "waits"),
    [
        (question("next", *reads("said"), sampling=PENALTY), False, True),
        (question("next", ARTIFACT), True, True),
        (question("next", replace(ARTIFACT, span="output")), True, True),
        (question("next", ARTIFACT), False, False),
        (question("next", replace(ARTIFACT, span="all")), True, False),
        (question("next", replace(ARTIFACT, span=(2, 7))), True, False),
        (question("next", *reads("said")), True, False),
        (document("next", 4, context=reads("said")), True, False),
    ],
    ids=["penalty", "output", "output by name", "endless output", "all", "numbers", "inherited", "prefilled"],
)
def test_who_must_know_what_was_said_joins_once_it_is_known(
    reader: Request, ends_short: bool, waits: bool, steps: Steps, unknown: list[set[str]], step_mode: str
) -> None:
    """Where the answer ends as its last token decides, and for what looks at tokens before it begins."""
    run = world()
    stop = (run.core._vocab_size - 1,) if ends_short else ()
    sampling = SamplingParams(max_tokens=5, temperature=1.0, seed=3, stop_token_ids=stop, ignore_eos=True)
    run.submit(question("said", sampling=sampling, keep=Keep()), reader)
    run.run()
    assert len(unknown) == 1 and steps[-1 if reader.sampling is None else 5]["next"][1]
    assert unknown == [set() if waits or step_mode == "at once" else {"said"}]
    finish(run)


@pytest.mark.parametrize("mode", ["inherit", "artifact"])
def test_spans_are_those_of_the_end_where_the_last_token_is_one_that_stops(mode: Any, steps: Steps) -> None:
    """It was read before anybody knew that it is no part of the output."""
    free = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    run = world()
    run.submit(question("free", sampling=free))
    run.run()
    *others, last = run.ends["free"].choices[0].token_ids
    assert last not in others
    stopped = replace(free, stop_token_ids=(last,))
    span = "all" if mode == "artifact" else None
    reading = ContextRef(request="said", mode=mode, span=span)
    run.submit(question("said", sampling=stopped, keep=Keep()), question("next", reading))
    run.run()
    said = run.ends["said"].choices[0]
    assert said.finish_reason == "stop" and said.token_ids == tuple(others)
    assert said.dag.spans["output"] == (3, 6) and said.dag.spans["all"] == (0, 7)
    state = run.handle("said").id
    assert dict(run.core.store.describe(state).spans)["output"] == (3, 6)
    run.submit(question("later", ContextRef(state=state, mode="artifact"), sampling=ONE))
    run.run()
    assert run.ends["later"].choices[0].dag.visible == 3
    finish(run)


def test_an_answer_of_one_token_is_found_again_whole(steps: Steps) -> None:
    """Its input is in flight when it is read, and its only token is not known then; both lie in one page."""
    run = world()
    run.submit(question("said", sampling=ONE, keep=Keep()), question("judge", *reads("said"), sampling=ONE))
    run.run()
    assert steps[-1]["judge"] == (3, True)
    again = (7, 8, 9, *run.ends["said"].choices[0].token_ids, 5)
    run.submit(Request("again", again, ONE))
    run.run()
    assert run.ends["again"].choices[0].dag.reused == 4
    finish(run)


@pytest.mark.parametrize("bad", ["said", "other"])
def test_an_answer_whose_last_token_is_none_takes_those_that_read_it_along(
    bad: str, monkeypatch: pytest.MonkeyPatch, step_mode: str
) -> None:
    """The scores that it is chosen from are not finite, which shows when its reader runs already."""
    run = world()
    run.expected_errors = frozenset({"internal"})
    two = SamplingParams(max_tokens=4, temperature=1.0, seed=2)
    take = type(run.core)._take_results

    def planted(core: Any, launch: Any) -> None:
        for row, sequence in enumerate(launch.sequences):
            if sequence.request.id == bad and sequence.num_sampled == 3:
                launch.results[row] = NonFiniteLogits(row)
        take(core, launch)

    monkeypatch.setattr(type(run.core), "_take_results", planted)
    group = [question(name, sampling=two) for name in ("said", "other")]
    run.submit(
        *group, question("judge", *reads("said", "other"), keep=Keep()), question("x", *reads("judge"))
    )
    run.run()
    codes = {name: end.error and end.error.code for name, end in run.ends.items()}
    good = "other" if bad == "said" else "said"
    assert codes == {bad: "internal", good: None, "judge": "parent_failed", "x": "parent_failed"}
    finish(run)


@pytest.mark.parametrize("lengths", [(4, 4, 4), (2, 5, 3), (4, 5), (5, 4, 6)])
def test_a_judge_runs_with_the_last_tokens_of_its_candidates(lengths: tuple[int, ...], steps: Steps) -> None:
    run = world()
    names = [f"candidate {length} {place}" for place, length in enumerate(lengths)]
    said = [
        question(name, sampling=SamplingParams(max_tokens=length, temperature=1.0, seed=length))
        for name, length in zip(names, lengths, strict=True)
    ]
    run.submit(*said, question("judge", *reads(*names), sampling=ONE))
    run.run()
    assert steps[-1]["judge"] == (3, True)
    longest = names[lengths.index(max(lengths))]
    assert steps[-1][longest] == (1, False)
    for name, length in zip(names, lengths, strict=True):
        assert sum(step[name][0] for step in steps if name in step) == 3 + length
    finish(run)


def test_what_ended_is_told_before_the_device_is_waited_for(step_mode: str) -> None:
    """Its state is there, and the next step is launched; two are in flight until the next call waits for one."""
    run = world()
    short, long = (SamplingParams(max_tokens=most, temperature=0.0) for most in (3, 12))
    run.submit(question("said", sampling=short, keep=Keep()), question("other", sampling=long))
    while "said" not in run.ends:
        run.step()
    assert run.core._pipeline.num_in_flight == (0 if step_mode == "at once" else 2)
    run.step()
    assert run.core._pipeline.num_in_flight == (0 if step_mode == "at once" else 1)
    finish(run)


def test_what_nobody_waits_to_read_is_computed_at_once(steps: Steps, step_mode: str) -> None:
    run = world()
    run.submit(question("said", keep=Keep()), question("other", sampling=SamplingParams(max_tokens=9)))
    run.run()
    assert [("said" in step, "other" in step) for step in steps[:5]] == [(True, True)] * 5
    finish(run)


def test_what_ends_before_its_limit_is_read_behind_it(steps: Steps) -> None:
    """Where steps overlap nobody knows that the token in flight is the last one."""
    said = question(
        "said", sampling=SamplingParams(max_tokens=30, temperature=0.0, stop_token_ids=tuple(range(1 << 9)))
    )
    run = world()
    run.submit(said, question("next", *reads("said"), sampling=ONE))
    run.run()
    assert run.ends["said"].choices[0].finish_reason == "stop"
    assert run.ends["next"].error is None
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
