"""Steps that overlap give what steps one after the other give. Float64, so that rounding decides no token."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dagengine import ContextRef, DagError, Keep, SamplingParams
from dagengine.build import build_core
from dagengine.config import EngineConfig
from dagengine.core import EngineCore
from dagengine.request import Choice, FinishedEvent, Request, TokenEvent

MAX_STEPS = 3000
STOPS = ("a", "e", "\n\n", "ST", "the")


def make(folder: Path, overlap: bool, **options: Any) -> EngineCore:
    settings: dict[str, Any] = {"load_format": "dummy", "seed": 1, "dtype": "float64", "page_size": 4}
    return build_core(folder, EngineConfig(**{**settings, **options}, overlap=overlap))


@dataclass
class Outcome:
    """What became of a workload: per request the answers, the end, and the tokens of its states."""

    text: dict[tuple[str, int], str] = field(default_factory=dict)
    ids: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    choices: dict[str, tuple[Choice, ...]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    states: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


def workload(seed: int) -> tuple[list[list[Request]], dict[str, int]]:
    """Submissions, and after how many tokens some requests are cancelled."""
    rng = random.Random(seed)
    submissions: list[list[Request]] = []
    names: list[str] = []
    cancel: dict[str, int] = {}
    for index in range(16):
        group: list[Request] = []
        for place in range(rng.choice((1, 1, 3))):
            name = f"r{index}.{place}"
            refs = [ContextRef(request=other.id) for other in group[-1:] if rng.random() < 0.6]
            many = not group and rng.random() < 0.2
            group.append(
                Request(
                    id=name,
                    input_ids=tuple(rng.randrange(256) for _ in range(rng.choice((1, 3, 9, 30)))),
                    sampling=None if rng.random() < 0.15 and not many else params(rng, many),
                    context=tuple(refs),
                    keep=Keep() if rng.random() < 0.6 else None,
                    priority=rng.choice((0, 0, 1)),
                )
            )
            names.append(name)
            if many:
                break
        submissions.append(group)
    for name in rng.sample(names, 3):
        cancel[name] = rng.randint(0, 6)
    return submissions, cancel


def params(rng: random.Random, many: bool) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.randint(1, 14),
        min_tokens=rng.choice((0, 0, 1)),
        temperature=1.0 if many else rng.choice((0.0, 0.7, 1.5)),
        top_p=rng.choice((1.0, 0.8)),
        seed=rng.randrange(100),
        stop=tuple(rng.sample(STOPS, rng.choice((0, 0, 2)))),
        stop_token_ids=tuple(rng.sample(range(256), rng.choice((0, 40)))),
        repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
        presence_penalty=rng.choice((0.0, 0.5)),
        logprobs=rng.choice((None, 0, 3)),
        n=3 if many else 1,
    )


def run(core: EngineCore, submissions: list[list[Request]], cancel: dict[str, int]) -> Outcome:
    outcome, todo = Outcome(), list(submissions)
    for step in range(MAX_STEPS):
        if step % 3 == 0 and todo:
            core.submit_group(todo.pop(0))
        for event in core.step():
            take(core, event, outcome)
            due = cancel.get(event.request_id)
            sampled = sum(map(len, (i for k, i in outcome.ids.items() if k[0] == event.request_id)))
            if due is not None and sampled >= due:
                core.abort(event.request_id, DagError("cancelled", "planned"))
        core.store.check()
        if not todo and not core.has_work:
            break
    assert not core.has_work and not todo
    for event in core.take_events():
        take(core, event, outcome)
    outcome.counts.update(preemptions=core.num_preemptions, restored=core.stats.restored_tokens)
    for state in core.store.states():
        core.release_state(state.id)
    core.store.check()
    stats = core.store.stats()
    for left in ("pages_live", "pages_waiting", "open_fences", "writers", "restores", "leases", "handles"):
        assert getattr(stats, left) == 0, stats
    return outcome


def take(core: EngineCore, event: TokenEvent | FinishedEvent, outcome: Outcome) -> None:
    if isinstance(event, TokenEvent):
        key = event.request_id, event.index
        outcome.text[key] = outcome.text.get(key, "") + event.text
        outcome.ids.setdefault(key, []).extend(event.token_ids)
        return
    if event.error is not None:
        outcome.errors[event.request_id] = event.error.code
        return
    outcome.choices[event.request_id] = event.choices
    for choice in event.choices:
        outcome.counts[choice.finish_reason] += 1
        outcome.counts["stop strings"] += isinstance(choice.stop_reason, str)
        outcome.counts["eos or stop ids"] += choice.finish_reason == "stop"
        if choice.dag.state is not None:
            node, at = core.store.resolve(choice.dag.state)
            outcome.states[event.request_id, choice.index] = tuple(node.tokens[:at])


def told(choice: Choice) -> tuple[object, ...]:
    spans = dict(choice.dag.spans)
    reason = (choice.finish_reason, choice.stop_reason, choice.num_sampled)
    return choice.index, choice.text, choice.token_ids, reason, spans, choice.dag.record["seed"]


def logprobs(choice: Choice) -> Iterator[tuple[int, float]]:
    for token in choice.logprobs or ():
        yield token.token_id, token.logprob
        yield from token.top


SETTINGS = {
    "roomy": {"kv_pages": 300},
    "tight": {"kv_pages": 24, "max_num_seqs": 6},
    "chunks": {"kv_pages": 60, "max_num_batched_tokens": 6, "max_num_seqs": 4},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_overlapping_steps_change_nothing_that_is_told(model_folder: Path, name: str) -> None:
    counts: Counter[str] = Counter()
    for seed in range(4):
        submissions, cancel = workload(seed)
        apart, overlapped = (
            run(make(model_folder, overlap, **SETTINGS[name]), submissions, cancel)
            for overlap in (False, True)
        )
        assert {r.id for group in submissions for r in group} == apart.errors.keys() | apart.choices.keys()
        for request in (r for group in submissions for r in group):
            if request.id not in apart.choices or request.id not in overlapped.choices:
                assert any(request.id in found.errors for found in (apart, overlapped))
                continue
            for one, other in zip(apart.choices[request.id], overlapped.choices[request.id], strict=True):
                assert told(one) == told(other)
                assert [p for p, _ in logprobs(one)] == [p for p, _ in logprobs(other)]
                expected = [value for _, value in logprobs(one)]
                assert [value for _, value in logprobs(other)] == pytest.approx(expected, abs=1e-4)
                key = request.id, one.index
                assert apart.states.get(key) == overlapped.states.get(key)
                assert (apart.text.get(key, ""), apart.ids.get(key, [])) == (one.text, [*one.token_ids])
                assert (overlapped.text.get(key), overlapped.ids.get(key)) == (
                    apart.text.get(key),
                    apart.ids.get(key),
                )
        assert apart.errors.keys() - cancel.keys() == overlapped.errors.keys() - cancel.keys()
        for key in apart.ids.keys() & overlapped.ids.keys():
            shortest = min(len(apart.ids[key]), len(overlapped.ids[key]))
            assert apart.ids[key][:shortest] == overlapped.ids[key][:shortest]
        counts += apart.counts + overlapped.counts
    happened = ["length", "prefill", "stop strings", "eos or stop ids"]
    happened += {"roomy": [], "tight": ["preemptions"], "chunks": []}[name]
    assert all(counts[what] for what in happened), counts
