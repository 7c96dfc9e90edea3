"""An interrupt, wherever it comes, leaves nothing running, no state that nobody knows, and others' requests alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from scripted_text import text_core

import dagengine.bulk
from dagengine import LLM, BulkResult, DagError, Result, SamplingParams
from dagengine.query_results import QueryResult
from dagengine.request import Request
from dagengine.submitted import Submitted
from dagengine_core_graph.query import cross, g, plus

FILES = ("bulk.py", "query_run.py", "submitted.py", "async_engine.py")


class Interrupt:
    """Raises a KeyboardInterrupt once, where this thread has passed so many of the places at which one may come: a
    call, or the end of one, in `FILES`.

    Attributes:
        came: whether it did.
    """

    def __init__(self, after: int) -> None:
        self._left, self.came = after, False

    def __enter__(self) -> Interrupt:
        sys.setprofile(self._pass)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _pass(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" or not frame.f_code.co_filename.endswith(FILES):
            return
        if not self._left:
            self.came = True
            raise KeyboardInterrupt
        self._left -= 1


class Interrupted:
    """A queue whose reader is interrupted as soon as it waits, and only then."""

    def put(self, item: None) -> None:
        """Nobody waits."""

    def get(self) -> None:
        sys.setprofile(None)
        raise KeyboardInterrupt


def bulk(llm: LLM) -> BulkResult:
    queries = [g(cross(plus(f"piece {number}"), "question"), max_tokens=2) for number in range(3)]
    return llm.query_bulk(queries, window=2, keep=True)


def query(llm: LLM) -> QueryResult:
    return llm.query(g(cross(plus("piece"), "question"), max_tokens=2))


def generate(llm: LLM) -> Result:
    result: Result = llm.generate([7, 8, 9], max_tokens=2)
    return result


@pytest.mark.parametrize("call", [bulk, query, generate])
def test_an_interrupt_anywhere_until_the_call_waits_leaves_nothing_running(
    call: Callable[[LLM], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagengine.submitted.SimpleQueue", Interrupted)
    core = text_core()
    monkeypatch.setattr(core._scheduler, "schedule", lambda **_: [])  # what is left runs for ever
    with LLM(core=core) as llm:
        for place in range(2000):
            interrupt = Interrupt(place)
            with pytest.raises(KeyboardInterrupt), interrupt:
                call(llm)
            assert not llm.engine.ask(lambda core: core.has_work), f"place {place}"
            if not interrupt.came:
                return
    raise AssertionError("it never waited")


@pytest.mark.parametrize("call", [bulk, query, generate])
def test_an_interrupt_anywhere_leaves_no_state_of_an_answer(
    call: Callable[[LLM], BulkResult | QueryResult | Result],
) -> None:
    with LLM(core=text_core()) as llm:
        for place in range(2000):
            interrupt = Interrupt(place)
            try:
                with interrupt:
                    result = call(llm)
            except KeyboardInterrupt:
                pass
            else:
                if not interrupt.came:
                    result.close()
                    return
            while llm.engine.ask(lambda core: core.has_work):
                time.sleep(0.001)
            kept = llm.engine.ask(lambda core: (core.store.stats().handles, len(llm.fragments)))
            assert kept[0] == kept[1], f"place {place}"
    raise AssertionError("it never ended")


@pytest.mark.parametrize("place", range(4))
def test_an_interrupt_while_results_are_made_leaves_no_state_of_an_answer(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[QueryResult] = []
    real = dagengine.bulk.result_of

    def stop(*given: Any) -> QueryResult:
        if len(made) == place:
            raise KeyboardInterrupt
        made.append(real(*given))
        return made[-1]

    monkeypatch.setattr("dagengine.bulk.result_of", stop)
    queries = [g(cross(plus(f"piece {number}"), "question")) for number in range(4)]
    with LLM(core=text_core()) as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.query_bulk(queries, keep=True)
        fragments = llm.engine.ask(lambda core: len(llm.fragments))
        assert llm.engine.ask(lambda core: core.store.stats().handles) == fragments == 4


def test_an_interrupt_of_a_refused_submission_cancels_nobody_elses_request() -> None:
    request = Request("same", (1, 2, 3), SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True))
    with LLM(core=text_core()) as llm:
        first = Submitted(llm.engine, lambda core: [request])
        first.start()
        second = Submitted(llm.engine, lambda core: [request])
        with pytest.raises(DagError):
            second.start()
        second.cancel()
        assert first.wait()[0].error is None
