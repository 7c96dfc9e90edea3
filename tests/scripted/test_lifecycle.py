"""What happens to requests, states and pages when something ends otherwise than it began. See `simulator`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from scripted_model import ScriptedBackend, ScriptedModel, scripted_core
from scripted_requests import EVERY_MODE, GREEDY, document, question, refused, tokens
from simulator import Settings, World
from torch import Tensor

from dagengine import ContextRef, Keep, SamplingParams
from dagengine.request import Choice, Event, FinishedEvent, Request
from dagengine.runner import Chunk
from dagengine.running import RunningRequest
from dagengine.sequence import SamplingRow, Sequence
from dagengine_kvstore import Lease
from dagengine_kvstore.reuse import ContentTable

pytestmark = pytest.mark.usefixtures("step_mode")


def world(pages: int = 32, *, page_size: int = 4, batch: int = 64, seqs: int = 8) -> World:
    return World(0, Settings(page_size, pages, batch, seqs))


def error_code(run: World, request_id: str) -> str | None:
    error = run.ends[request_id].error
    return error and error.code


# abort


def crowd() -> World:
    """Eleven pages: a digest without its source, evicted; a prompt in chunks; three answers; a graph."""
    run = world(pages=11, page_size=3, batch=5, seqs=4)
    run.submit(document("source", 8))
    run.run()
    run.submit(question("digest", ContextRef(state=run.handle("source").id, mode="digest"), keep=Keep()))
    run.run()
    run.core.release_state(run.handle("source").id)
    run.handles = [run.handle("digest")]
    run.overwrite()
    many = SamplingParams(max_tokens=5, temperature=1.0, n=3, seed=1)
    run.submit(question("reader", ContextRef(state=run.handle("digest").id), keep=Keep()))
    run.submit(document("long", 17, 300))
    run.submit(question("many", sampling=many, keep=Keep()))
    run.submit(
        question("parent", ContextRef(state=run.handle("digest").id, mode="artifact")),
        question("child", ContextRef(request="parent"), keep=Keep()),
        question("other", keep=Keep()),
    )
    return run


@pytest.mark.parametrize("victim", ["reader", "long", "many", "parent", "child", "other"])
def test_abort_at_every_step_of_every_request(victim: str) -> None:
    """Waiting, restoring, in chunks, between tokens, half answered, before the seal."""
    steps = aborted = 0
    while True:
        run = crowd()
        run.run(steps)
        ended = victim in run.ends
        assert run.abort(victim) is not ended
        if ended:
            break
        aborted += 1
        run.run()
        failed = {name for name, end in run.ends.items() if end.error is not None}
        assert failed == {victim} | ({"child"} if victim == "parent" else set())
        run.clean_up()
        run.forget_everything()
        steps += 1
    assert aborted > 2


@pytest.mark.parametrize("later_s", [0.0, 2.0, 1e6])
def test_an_abort_of_an_answer_whose_siblings_state_has_expired_is_told(later_s: float) -> None:
    run = world()
    sampling = SamplingParams(max_tokens=40, temperature=1.0, n=4, seed=3, stop_token_ids=tuple(range(200)))
    run.core.submit(Request("many", (7, 8, 9), sampling, keep=Keep(ttl_s=1.0)))
    running = run.core._requests.by_id["many"]
    events: list[Event] = []
    while not running.answers:
        events += run.core.step()
    assert len(running.answers) < 4
    run.now += later_s
    run.core.pump()
    run.core.take_events()
    run.now += later_s
    run.core.store.expire()
    assert run.core.abort("many")
    (end,) = run.core.take_events()
    assert isinstance(end, FinishedEvent) and end.error is not None and end.error.code == "cancelled"
    while run.core.has_work:
        run.core.step()
    run.core.store.expire()
    run.core.store.check()
    assert run.core.store.stats().handles == 0


def test_the_crowd_restores_and_preempts() -> None:
    run = crowd()
    run.run()
    assert run.core.stats.restored_tokens and run.core.num_preemptions


def test_the_sampler_forgets_whoever_it_met(monkeypatch: pytest.MonkeyPatch) -> None:
    run, met, forgotten = crowd(), set[int](), set[int]()
    sampler = run.core._sampler
    launch, forget = sampler.launch, sampler.forget

    def launched(logits: Tensor, rows: list[SamplingRow]) -> object:
        met.update(row.key for row in rows)
        return launch(logits, rows)

    def forgot(key: int) -> None:
        forgotten.add(key)
        forget(key)

    monkeypatch.setattr(sampler, "launch", launched)
    monkeypatch.setattr(sampler, "forget", forgot)
    run.run(12)
    run.abort("reader")
    run.run()
    assert len(met) > 5 and met <= forgotten


def test_a_step_in_which_what_is_there_already_ends_has_progressed() -> None:
    core = scripted_core()
    for name in ("first", "again"):
        core.submit(document(name, 8))
        steps = core.stats.steps
        while core.has_work:
            core.step()
        assert core.progressed and (core.stats.steps > steps) == (name == "first")


def test_a_step_that_only_collects_has_progressed() -> None:
    run = world()
    run.submit(question("q", keep=Keep()))
    steps = 0
    while run.core.has_work:
        run.step()
        steps += 1
        assert run.core.progressed
    assert steps == 5 + (run.core.overlap and 1)
    run.step()
    assert not run.core.progressed


def test_aborting_what_is_not_there_is_nothing() -> None:
    run = world()
    run.submit(question("done"))
    run.run()
    for name in ("done", "never", ""):
        for _ in range(1000):
            assert not run.abort(name)
    run.submit(question("q"))
    assert run.abort("q") and not run.abort("q")
    assert not run.core.has_work and error_code(run, "q") == "cancelled"


def test_an_id_can_be_used_again_but_not_twice_at_once() -> None:
    run = world()
    run.submit(question("same"))
    error = refused(lambda: run.submit(document("same", 5)))
    assert (error.code, error.field) == ("invalid_request", "id")
    run.run()
    first = run.ends["same"].choices[0].token_ids
    run.submit(question("same"))
    run.run()
    assert run.ends["same"].choices[0].token_ids == first
    error = refused(lambda: run.submit(question("twice"), question("twice"), group=True))
    assert error.code == "invalid_request"
    assert not run.core.has_work


def test_an_answer_of_several_may_expire_before_the_request_fails() -> None:
    run = world(seqs=1)
    many = SamplingParams(max_tokens=4, temperature=1.0, n=2, seed=5)
    run.submit(question("many", sampling=many, keep=Keep(ttl_s=1.0)))
    while not run.core.store.stats().handles:
        run.step()
    run.now += 2.0
    run.step()
    assert run.abort("many") and error_code(run, "many") == "cancelled"
    run.run()
    run.clean_up()


def test_aborting_the_root_of_a_chain_of_thousands() -> None:
    count = 3000
    core = scripted_core(pages=16)
    refs = [(), *((ContextRef(request=f"n{i}"),) for i in range(count - 1))]
    core.submit_group([Request(f"n{i}", (1,), None, refs[i]) for i in range(count)])
    assert core.abort("n0")
    ends = [event for event in core.take_events() if isinstance(event, FinishedEvent)]
    assert len(ends) == count and not core.has_work
    assert {event.error.code for event in ends[1:] if event.error} == {"parent_failed"}
    assert all(event.error and "'n0'" in event.error.message for event in ends[1:])
    core.store.check()


# failures


def page_bytes(run: World, request_id: str) -> tuple[object, ...]:
    node, at = run.core.store.resolve(run.handle(request_id).id)
    pages = [run.core._runner.arena.layer(layer)[node.pages].clone() for layer in range(2)]
    info = run.core.store.describe(run.handle(request_id).id)
    written = [page.nan_to_num(-1).tolist() for page in pages]
    return node.tokens, at, tuple(node.pages), dict(node.cover), info, written


@pytest.mark.parametrize("way", ["refused", "aborted", "exception"])
def test_a_failing_child_leaves_its_parent_identical(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    run = world()
    run.submit(document("parent", 10))
    run.run()
    before = page_bytes(run, "parent")
    ref = ContextRef(state=run.handle("parent").id)
    if way == "refused":
        too_many = SamplingParams(max_tokens=1000, temperature=0.0)
        assert (
            refused(lambda: run.submit(question("child", ref, sampling=too_many))).code == "position_overflow"
        )
    else:
        run.submit(question("child", ref, keep=Keep()))
        run.step()
        if way == "aborted":
            run.abort("child")
        else:
            run.expected_errors = frozenset({"internal"})
            monkeypatch.setattr(ScriptedBackend, "run", lambda *args, **kwargs: 1 / 0)
            run.run()
            monkeypatch.undo()
            assert error_code(run, "child") == "internal"
    assert page_bytes(run, "parent") == before
    run.submit(question("after", ref))
    run.run()
    run.clean_up()


@EVERY_MODE
def test_an_exception_ends_only_its_batch(monkeypatch: pytest.MonkeyPatch, step_mode: str) -> None:
    """Requests of another backend, and those that wait, go on; on a device what was enqueued behind it fails too."""
    run = world()
    run.expected_errors = frozenset({"internal"})
    run.submit(question("broken", keep=Keep()))
    run.submit(question("twin", backend="scripted-twin", keep=Keep()))
    run.submit(question("parent"), question("child", ContextRef(request="parent"), keep=Keep()))
    whole, raised = ScriptedBackend.run, []

    def once(self: ScriptedBackend, *args: object, **kwargs: object) -> object:
        if self.name == "scripted" and len(raised) < 1:
            raised.append(self.name)
            raise RuntimeError("planted")
        return whole(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(ScriptedBackend, "run", once)
    run.run(2)
    run.submit(question("later"))
    run.run()
    codes = {name: error_code(run, name) for name in run.ends}
    assert codes == {
        "broken": "internal",
        "twin": "internal" if step_mode == "late" else None,
        "parent": "internal",
        "child": "parent_failed",
        "later": None,
    }
    assert run.core.stats.failed_steps == 0
    run.clean_up()


@EVERY_MODE
def test_an_exception_while_restoring_ends_the_owner_only(monkeypatch: pytest.MonkeyPatch) -> None:
    run = world()
    run.expected_errors = frozenset({"internal"})
    run.submit(document("a", 9))
    run.run()
    run.overwrite()
    whole, raised = ScriptedBackend.run, []

    def once(self: ScriptedBackend, *args: object, **kwargs: object) -> object:
        if not raised:
            raised.append(1)
            raise RuntimeError("planted")
        return whole(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(ScriptedBackend, "run", once)
    reference = ContextRef(state=run.handle("a").id)
    run.submit(question("q", reference))
    run.submit(question("next", reference))
    run.run()
    assert raised and run.core.stats.restored_tokens == 9
    assert {name: error_code(run, name) for name in ("q", "next")} == {"q": "internal", "next": None}
    run.clean_up()


@EVERY_MODE
def test_logits_that_are_no_numbers_end_one_request() -> None:
    class Broken(ScriptedModel):
        def __init__(self) -> None:
            self.calls = 0

        def logits(self, hidden: Tensor) -> Tensor:
            self.calls += 1
            logits = super().logits(hidden)
            if self.calls == 2:
                logits[0, 17] = torch.nan
            return logits

    run = world()
    run.core._runner.model = Broken()
    run.expected_errors = frozenset({"internal"})
    run.submit(question("first", keep=Keep()))
    run.submit(question("second", keep=Keep()))
    run.run()
    assert error_code(run, "first") == "internal" and error_code(run, "second") is None
    assert run.core.stats.non_finite == 1
    run.clean_up()


def test_a_failed_parent_fails_its_dependents_only() -> None:
    run = world()
    run.submit(
        question("root"),
        question("free"),
        question("left", ContextRef(request="root")),
        question("right", ContextRef(request="root"), ContextRef(request="free")),
        question("below", ContextRef(request="left"), ContextRef(request="free")),
        question("beside", ContextRef(request="free"), keep=Keep()),
    )
    run.step()
    assert run.abort("root")
    run.run()
    codes = {name: error_code(run, name) for name in run.ends}
    failed = dict.fromkeys(("left", "right", "below"), "parent_failed")
    assert codes == {"root": "cancelled", "free": None, "beside": None, **failed}
    run.clean_up()


def test_a_dependent_that_is_refused_ends_with_the_reason() -> None:
    run = world()
    run.core.submit_group(
        [
            document("parent", 10),
            Request("past", (1,), None, (ContextRef(request="parent", mode="artifact", span=(5, 11)),)),
            Request(
                "mixed",
                (1,),
                None,
                (ContextRef(request="parent"), ContextRef(request="parent", mode="digest")),
            ),
            Request("cut", (1,), None, (ContextRef(request="parent", at=11),)),
            Request("below", (1,), None, (ContextRef(request="cut"),)),
            Request("fine", (1,), None, (ContextRef(request="parent", at=10),)),
        ]
    )
    ends: dict[str, str | None] = {}
    for _ in range(10):
        for event in run.core.step():
            if isinstance(event, FinishedEvent):
                ends[event.request_id] = event.error and event.error.code
        run.core.store.check()
    assert ends == {
        "parent": None,
        "past": "span_out_of_range",
        "mixed": "edge_mix_forbidden",
        "cut": "span_out_of_range",
        "below": "parent_failed",
        "fine": None,
    }


def test_a_lease_ends_before_the_seal_lets_go_of_what_was_digested(monkeypatch: pytest.MonkeyPatch) -> None:
    run = world()
    run.submit(document("source", 8))
    run.run()
    source = run.handle("source").id
    run.submit(question("digest", ContextRef(state=source, mode="digest"), keep=Keep()))
    run.run(2)
    run.core.release_state(source)
    monkeypatch.setattr(Lease, "keep", lambda *_: pytest.fail("a page was handed to a lease"))
    live = run.core.store.stats().pages_live
    run.run()
    assert error_code(run, "digest") is None and run.core.store.stats().pages_live < live
    run.core.store.check()


def test_a_waiting_request_keeps_what_it_will_read() -> None:
    run = world()
    run.submit(document("source", 9))
    run.run()
    forked = run.core.fork(run.handle("source").id, 5)
    run.core.release_state(run.handle("source").id)
    run.core.submit_group(
        [
            question("first"),
            Request(
                "second", (1,), None, (ContextRef(request="first"), ContextRef(state=forked)), keep=Keep()
            ),
        ]
    )
    run.core.release_state(forked)
    ends = [event for _ in range(20) for event in run.core.step() if isinstance(event, FinishedEvent)]
    assert [event.error for event in ends] == [None, None]
    assert ends[1].choices[0].dag.visible == 3 + 4 + 5
    run.core.store.check()


# memory and order


def test_a_request_that_can_never_fit_is_refused_and_the_next_is_served() -> None:
    run = world(pages=4)
    for name, request in {
        "input": document("big", 17),
        "max_tokens": question("big", sampling=SamplingParams(max_tokens=20, temperature=0.0)),
    }.items():
        error = refused(lambda request=request: run.submit(request))  # type: ignore[misc]
        assert (error.code, error.field) == ("capacity", name)
    run.submit(question("next", sampling=SamplingParams(max_tokens=13, temperature=0.0)))
    run.run()
    assert error_code(run, "next") is None
    run.clean_up()


def test_an_unset_limit_is_what_the_pool_holds() -> None:
    run = world(pages=4)
    run.core.submit(question("open", sampling=SamplingParams(temperature=0.0), keep=Keep()))
    ends = [event for _ in range(40) for event in run.core.step() if isinstance(event, FinishedEvent)]
    assert len(ends[0].choices[0].token_ids) == 13
    assert ends[0].choices[0].finish_reason == "length"


def test_at_least_so_many_tokens_is_a_promise_or_refused() -> None:
    run = world(pages=8, page_size=4)

    def limit(tokens: int) -> Request:
        return question("open", sampling=SamplingParams(min_tokens=tokens, temperature=0.0))

    room = 8 * 4 - 3
    error = refused(lambda: run.core.submit(limit(room + 1)))
    assert (error.code, error.field) == ("capacity", "min_tokens")
    error = refused(lambda: run.core.submit(limit(10**6)))
    assert (error.code, error.field) == ("position_overflow", "min_tokens")
    run.core.submit(limit(room))
    ends = [event for _ in range(60) for event in run.core.step() if isinstance(event, FinishedEvent)]
    assert ends[0].choices[0].num_sampled == room
    run.core.store.check()


def test_a_fork_is_refused_by_field() -> None:
    run = world()
    run.submit(document("source", 9))
    run.run()
    source = run.handle("source").id
    for state, at, code, field in (
        (source, 10, "span_out_of_range", "at"),
        (source, -1, "span_out_of_range", "at"),
        (source, "5", "invalid_request", "at"),
        (source, True, "invalid_request", "at"),
        ("st_unknown", 5, "state_not_found", "state"),
    ):
        error = refused(lambda state=state, at=at: run.core.fork(state, at))  # type: ignore[misc]
        assert (error.code, error.field) == (code, field)
    assert run.core.store.stats().handles == 1


def test_two_restoring_requests_in_a_pool_that_just_fits_one() -> None:
    """Each reads two evicted states of three pages and writes two pages; the pool has eight."""
    run = world(pages=8)
    for index, name in enumerate("abcd"):
        run.submit(document(name, 12, 100 * index))
        run.run()
    run.overwrite()
    refs = {name: ContextRef(state=run.handle(name).id, mode="artifact", span="all") for name in "abcd"}
    run.submit(question("one", refs["a"], refs["b"]))
    run.submit(question("two", refs["c"], refs["d"]))
    run.run(200)
    assert {name: error_code(run, name) for name in ("one", "two")} == {"one": None, "two": None}
    run.clean_up()


def test_a_full_queue_is_said_and_empties() -> None:
    core = scripted_core(pages=32, max_waiting=2, max_num_seqs=1)
    core.submit(question("a"))
    core.submit(question("b"))
    assert refused(lambda: core.submit(question("c"))).code == "queue_full"
    assert refused(lambda: core.submit_group([question("c"), question("d")])).code == "queue_full"
    core.step()
    core.submit(question("c"))
    ends = [event.request_id for _ in range(30) for event in core.step() if isinstance(event, FinishedEvent)]
    assert ends == ["a", "b", "c"] and not core.has_work


def test_priority_then_arrival() -> None:
    run = world(seqs=1)
    for name, priority in (("a", 0), ("b", 1), ("c", -1), ("d", 0), ("e", -1)):
        run.submit(question(name, priority=priority))
    run.run()
    assert list(run.ends) == ["c", "e", "a", "d", "b"]


def test_what_equals_earlier_work_is_not_computed_again() -> None:
    run = world()
    run.submit(document("first", 10))
    run.run()
    before = run.core.store.stats()
    run.submit(document("second", 10))
    run.submit(Request("third", (*tokens(9), 5), GREEDY))
    run.run()
    dags = {name: run.ends[name].choices[0].dag for name in ("second", "third")}
    assert (dags["second"].reused, dags["second"].computed) == (10, 0)
    assert (dags["third"].reused, dags["third"].computed) == (8, 2)
    assert run.core.store.stats().tokens_written - before.tokens_written == 2 + 3
    run.clean_up()


def test_answers_of_one_request_share_the_pages_of_its_input() -> None:
    run = world()
    many = SamplingParams(max_tokens=3, temperature=1.0, n=3, seed=5)
    run.submit(Request("many", tokens(10), many))
    run.run()
    assert [choice.dag.reused for choice in run.ends["many"].choices] == [0, 8, 8]
    run.clean_up()


@pytest.mark.parametrize("keep", [None, Keep()])
def test_no_row_is_run_behind_a_limit_that_is_known_ahead(keep: Keep | None) -> None:
    """Three of the input, one for each of four sampled tokens; the last needs KV only in a state."""
    run = world()
    run.submit(question("q", keep=keep))
    run.run()
    assert run.ends["q"].choices[0].num_sampled == 4
    assert run.core.stats.batched_tokens == 3 + 3 + (keep is not None)
    run.clean_up()


def test_readers_of_one_state_hold_one_copy_and_their_tails() -> None:
    readers = 32
    run = world(pages=40 + readers, page_size=8, batch=256, seqs=readers)
    run.submit(document("state", 240))
    run.run()
    assert run.core.store.stats().pages_live == 30
    ref = ContextRef(state=run.handle("state").id)
    for index in range(readers):
        run.submit(Request(f"r{index}", (index, index + 1), GREEDY, (ref,)))
    run.step()
    stats = run.core.store.stats()
    assert run.core.num_running == readers and stats.leases == readers
    assert stats.pages_live == 30 + readers
    run.run()
    run.clean_up()


@pytest.mark.parametrize("overlap", [False, True])
def test_an_idle_device_gets_what_may_begin_before_the_records_of_its_parents_are_made(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = scripted_core(mode="overlap" if overlap else "at once")
    done: list[str] = []
    launch, choices = core._launch, RunningRequest.choices

    def launched(chunks: list[Chunk]) -> None:
        launch(chunks)
        done.append("launch of " + " ".join(chunk.work.request.id for chunk in chunks))  # type: ignore[attr-defined]

    def recorded(running: RunningRequest, facts: Mapping[str, object]) -> tuple[Choice, ...]:
        done.append(f"record of {running.request.id}")
        return choices(running, facts)

    monkeypatch.setattr(core, "_launch", launched)
    monkeypatch.setattr(RunningRequest, "choices", recorded)
    reads = [ContextRef(request=name, mode="artifact") for name in ("a", "b")]
    core.submit_group([question("a"), question("b"), question("judge", *reads)])
    events: list[Event] = []
    while "record of a" not in done:
        events += core.step()
    between = ["launch of judge"] if overlap else []
    assert done[-2 - len(between) :] == [*between, "record of a", "record of b"]
    assert [e.request_id for e in events if isinstance(e, FinishedEvent)] == ["a", "b"]
    while core.has_work:
        events += core.step()
    ends = [event for event in events if isinstance(event, FinishedEvent)]
    assert [(end.request_id, end.error) for end in ends] == [(name, None) for name in ("a", "b", "judge")]
    core.store.check()


def test_what_a_step_leaves_to_be_found_is_worked_out_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    run = world(page_size=4)
    done: list[str] = []
    collect, extend = run.core._pipeline.collect, ContentTable.extend

    def collected() -> Any:
        done.append("wait")
        return collect()

    def extended(*arguments: Any) -> Any:
        done.append("content")
        return extend(*arguments)

    monkeypatch.setattr(run.core._pipeline, "collect", collected)
    monkeypatch.setattr(ContentTable, "extend", extended)
    reads = [ContextRef(request=name, mode="artifact") for name in ("a", "b")]
    run.submit(document("a", 10), document("b", 9, 300), question("judge", *reads, sampling=GREEDY))
    run.run()
    assert done[: done.index("wait")].count("content") >= 6, "also their last pages: they were sealed early"
    run.submit(document("a again", 8))
    run.run()
    assert run.ends["a again"].choices[0].dag.computed == 0
    run.core.store.check()


def test_a_request_whose_answer_cannot_be_recorded_ends_once_and_leaves_no_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choice = Sequence.choice

    def broken(sequence: Sequence, *arguments: Any) -> Choice:
        if sequence.request.id == "parent" and sequence.index == 1:
            raise RuntimeError("planted")
        return choice(sequence, *arguments)

    monkeypatch.setattr(Sequence, "choice", broken)
    run = world()
    many = SamplingParams(max_tokens=3, temperature=1.0, n=2, seed=1)
    run.submit(question("parent", sampling=many, keep=Keep()), question("other", keep=Keep()))
    run.run()
    assert error_code(run, "parent") == "internal" and error_code(run, "other") is None
    assert [state.name for state in run.core.store.states()] == [None]
    assert run.core.stats.finished == {"internal": 1, "length": 1}
    run.core.store.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_who_reads_an_answer_that_cannot_be_recorded_ends_with_it(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = RunningRequest.choices

    def broken(running: RunningRequest, facts: Mapping[str, object]) -> tuple[Choice, ...]:
        if running.request.id == "parent":
            raise RuntimeError("planted")
        return choices(running, facts)

    monkeypatch.setattr(RunningRequest, "choices", broken)
    core = scripted_core(mode="overlap" if overlap else "at once")
    child = question("child", ContextRef(request="parent"))
    core.submit_group([question("parent"), child, question("other")])
    events: list[Event] = []
    while core.has_work:
        events += core.step()
    ends = [event for event in events if isinstance(event, FinishedEvent)]
    found = {end.request_id: end.error and end.error.code for end in ends}
    assert found == {"parent": "internal", "child": "parent_failed", "other": None} and len(ends) == 3
    core.store.check()
    assert core.store.stats().pages_live == 0


@pytest.mark.parametrize("reads", [False, True])
@EVERY_MODE
def test_a_request_with_the_id_of_a_cancelled_dependent_depends_on_nobody(reads: bool) -> None:
    """The one that it was cancelled after, or read, ends well, and begins or fails it no second time."""
    run = world(pages=64, batch=16)
    dependent = (
        question("child", ContextRef(request="parent")) if reads else question("child", after=("parent",))
    )
    run.submit(document("parent", 60), dependent)
    run.step()
    assert run.abort("child")
    del run.ends["child"]
    run.submit(question("child", sampling=SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)))
    run.run()
    assert run.ends["parent"].error is None and run.ends["child"].error is None
    assert run.core.num_running == 0
