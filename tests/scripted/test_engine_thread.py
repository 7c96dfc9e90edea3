"""The thread that owns a core: who is told what, and when, until it closes or dies."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest
from scripted_model import ScriptedBackend, scripted_core
from scripted_requests import EVERY_MODE, document, question, refused

from dagengine import DagError, EngineDead, SamplingParams
from dagengine.async_engine import EngineThread
from dagengine.core import EngineCore
from dagengine.request import Event, FinishedEvent, Request
from dagengine.runner import Chunk
from dagengine.submitted import Submitted

pytestmark = pytest.mark.usefixtures("step_mode")


class Listener:
    def __init__(self) -> None:
        self.ends: dict[str, FinishedEvent] = {}
        self.changed = threading.Condition()

    def __call__(self, event: Event) -> None:
        if isinstance(event, FinishedEvent):
            with self.changed:
                assert event.request_id not in self.ends
                self.ends[event.request_id] = event
                self.changed.notify_all()

    def wait(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.ends) >= count, timeout=20)


@EVERY_MODE
def test_failed_steps_in_a_row_kill_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    core = scripted_core(max_failed_steps=3, max_num_seqs=1)
    monkeypatch.setattr(ScriptedBackend, "run", lambda *args, **kwargs: 1 / 0)
    listener, engine = Listener(), EngineThread(core)
    try:
        for index in range(5):
            engine.submit([question(f"q{index}")], listener)
        listener.wait(5)
        engine._thread.join(20)
        assert engine.dead is not None and not engine._thread.is_alive()
        assert {end.error.code for end in listener.ends.values() if end.error} == {"internal", "engine_dead"}
        with pytest.raises(EngineDead):
            engine.submit([question("late")], listener).result(20)
        with pytest.raises(EngineDead):
            engine.call(lambda core: None).result(20)
    finally:
        engine.close()


def test_what_is_submitted_while_the_engine_dies_is_refused() -> None:
    core = scripted_core(max_failed_steps=1)
    listener, engine = Listener(), EngineThread(core)
    late: list[Future[Any]] = []

    def dying() -> list[Event]:
        late.append(engine.submit([question("late")], listener))
        raise RuntimeError("planted")

    core.step = dying  # type: ignore[method-assign]
    engine.submit([question("q")], listener)
    listener.wait(1)
    engine._thread.join(20)
    with pytest.raises(EngineDead):
        late[0].result(20)
    assert set(listener.ends) == {"q"} and not engine._listeners


def test_a_group_that_is_refused_cancels_nobody() -> None:
    listener, engine = Listener(), EngineThread(scripted_core())
    long = SamplingParams(max_tokens=100, temperature=0.0)
    try:
        engine.submit([question("q", sampling=long)], listener).result(20)
        assert refused(Submitted(engine, lambda core: [question("q")]).start).field == "id"
        listener.wait(1)
        assert listener.ends["q"].error is None
    finally:
        engine.close()


@EVERY_MODE
def test_one_failed_step_does_not_kill_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    core = scripted_core(max_failed_steps=2)
    listener, engine = Listener(), EngineThread(core)
    whole = ScriptedBackend.run
    try:
        for index in range(4):
            monkeypatch.setattr(ScriptedBackend, "run", lambda *args, **kwargs: 1 / 0)
            engine.submit([question(f"bad{index}")], listener)
            listener.wait(2 * index + 1)
            monkeypatch.setattr(ScriptedBackend, "run", whole)
            engine.submit([question(f"good{index}")], listener)
            listener.wait(2 * index + 2)
        assert engine.dead is None
        errors = {name: end.error and end.error.code for name, end in listener.ends.items()}
        assert set(errors.values()) == {None, "internal"} and errors["good3"] is None
        engine.call(lambda core: core.store.check()).result(20)
    finally:
        engine.close()


@EVERY_MODE
def test_closing_tells_every_request() -> None:
    core = scripted_core()
    listener, engine = Listener(), EngineThread(core)
    long = SamplingParams(max_tokens=100, temperature=0.0)
    accepted = [engine.submit([question(f"q{index}", sampling=long)], listener) for index in range(20)]
    for future in accepted:
        future.result(20)
    engine.close()
    core.store.check()
    stats = core.store.stats()
    assert (stats.open_fences, stats.pages_waiting, stats.pages_live) == (0, 0, 0)
    assert len(listener.ends) == 20
    assert {end.error.code for end in listener.ends.values() if end.error} == {"cancelled"}


def test_a_listener_that_has_many_events_is_called_back_once_all_of_them_were_told() -> None:
    engine = EngineThread(scripted_core())
    told: list[list[str]] = []
    arrived: list[str] = []
    ended = threading.Event()

    def listen(event: Event) -> None:
        if not arrived:
            engine.once_told(tell)
        arrived.append(event.request_id)

    def tell() -> None:
        told.append(list(arrived))
        arrived.clear()
        if len({name for names in told for name in names}) == 4:
            ended.set()

    try:
        prefills = [Request(f"q{index}", (1, 2, 3), None) for index in range(4)]
        engine.call(lambda core: [engine.submit([one], listen) for one in prefills]).result(20)
        assert ended.wait(20)
        assert len(told) < 4 and all(told), "what ends in one step is told together"
    finally:
        engine.close()


def test_states_that_are_gone_do_not_keep_others_from_being_released() -> None:
    listener, engine = Listener(), EngineThread(scripted_core())
    try:
        engine.submit([document("a", 5), document("b", 6)], listener).result(20)
        listener.wait(2)
        names = [listener.ends[name].choices[0].dag.state for name in ("a", "b")]
        assert None not in names
        engine.release([names[0], "no state", names[0], names[1]])  # type: ignore[list-item]
        assert engine.call(lambda core: core.store.stats().handles).result(20) == 0
        assert engine.dead is None
    finally:
        engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_acceptance_is_told_before_the_first_event_and_once_a_step_was_launched(overlap: bool) -> None:
    core = scripted_core(mode="overlap" if overlap else "at once")
    seen: list[str] = []
    launch = core._launch

    def launched(chunks: list[Chunk]) -> None:
        launch(chunks)
        seen.append("launched")

    core._launch = launched  # type: ignore[method-assign]
    listener, engine = Listener(), EngineThread(core)

    def listen(event: Event) -> None:
        seen.append("event")
        listener(event)

    def submit(core: EngineCore) -> None:
        accepted = engine.submit([question("q")], listen)
        accepted.add_done_callback(lambda _: seen.append("accepted"))

    try:
        engine.call(submit).result(20)
        listener.wait(1)
        assert listener.ends["q"].error is None
        assert seen[:2] == (["launched", "accepted"] if overlap else ["accepted", "launched"])
        assert seen.count("accepted") == 1 and "event" in seen
    finally:
        engine.close()


def test_acceptance_is_told_though_nothing_can_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    core = scripted_core(mode="overlap")
    monkeypatch.setattr(core._scheduler, "schedule", lambda **_: [])
    engine = EngineThread(core)
    try:
        assert [r.id for r in engine.submit([question("q")], lambda event: None).result(20)] == ["q"]
    finally:
        engine.close()


def test_acceptance_is_told_by_an_engine_that_closes_or_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    for end in ("closes", "dies"):
        core = scripted_core(mode="overlap", max_failed_steps=1)
        listener, engine = Listener(), EngineThread(core)

        def submit(core: EngineCore, engine: EngineThread = engine, end: str = end) -> list[Future[Any]]:
            futures = [engine.submit([question("q")], listener)]  # noqa: B023
            if end == "closes":
                engine.close()
            else:
                monkeypatch.setattr(core, "pump", lambda: 1 / 0)
            return futures

        (accepted,) = engine.call(submit).result(20)
        try:
            accepted.result(20)
        except DagError as error:
            assert error.code in ("draining", "engine_dead")
        else:
            listener.wait(1)
            assert listener.ends["q"].error is not None
        engine.close()


def test_what_was_submitted_before_the_engine_died_and_is_looked_at_after_it_is_refused() -> None:
    engine = EngineThread(scripted_core())
    queued = threading.Event()

    def die(core: EngineCore) -> None:
        assert queued.wait(20)
        raise SystemExit("planted")

    engine.post(die)
    accepted = engine.submit([question("q")], lambda event: None)
    queued.set()
    with pytest.raises(EngineDead):
        accepted.result(20)
    assert not engine._listeners
    engine.close()


def test_an_id_that_a_cancelled_request_had_is_free_at_once_and_each_is_told_of_its_own_end() -> None:
    listener, again, engine = Listener(), Listener(), EngineThread(scripted_core())
    long = SamplingParams(max_tokens=200, temperature=0.0)

    def both(core: EngineCore) -> Future[Any]:
        core.abort("q")
        return engine.submit([question("q")], again)

    try:
        engine.submit([question("q", sampling=long)], listener).result(20)
        engine.call(both).result(20).result(20)
        listener.wait(1)
        again.wait(1)
        assert listener.ends["q"].error is not None and again.ends["q"].error is None
    finally:
        engine.close()


def test_requests_are_made_between_steps_and_what_raises_there_refuses_them() -> None:
    core = scripted_core()
    listener, engine = Listener(), EngineThread(core)
    long = SamplingParams(max_tokens=50, temperature=0.0)

    def refuse(core: EngineCore) -> list[Request]:
        raise DagError("capacity", "no")

    def from_what_is_there(core: EngineCore) -> list[Request]:
        return [question(f"after-{core.num_running}")]

    try:
        engine.submit([question("q", sampling=long)], listener).result(20)
        assert refused(lambda: engine.submit_made(refuse, listener).result(20)).code == "capacity"
        assert refused(lambda: engine.ask_made(refuse, listener)).code == "capacity"
        made = engine.submit_made(from_what_is_there, listener).result(20)
        listener.wait(2)
        assert set(listener.ends) == {"q", made[0].id}
        assert engine.submit_made(lambda core: [], listener).result(20) == []
        assert engine.dead is None and not engine._listeners
    finally:
        engine.close()
