"""Answers that are read in the step of their last tokens, which nobody may know yet."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from scripted_joins import ONE, Steps, finish, judged, reads, world
from scripted_requests import document, question

from dagengine import ContextRef, Keep, SamplingParams
from dagengine.prepare import Preparer
from dagengine.request import Request
from dagengine.sampler import NonFiniteLogits
from dagengine_kvstore import NodeRecord

pytestmark = pytest.mark.usefixtures("step_mode", "quiet")


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
