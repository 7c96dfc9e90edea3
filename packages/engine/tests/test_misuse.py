"""Values of types that nobody meant: refused by field, whatever else runs goes on, and nothing stays behind."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dagengine import LLM, ContextRef, DagError, Keep, SamplingParams, State
from dagengine.build import build_core
from dagengine.config import EngineConfig
from dagengine.core import EngineCore
from dagengine.errors import shown

GREEDY = SamplingParams(max_tokens=3, temperature=0.0)
NAN, HUGE, HUGER = float("nan"), 10**30, 10**5000


def audit(core: EngineCore) -> tuple[int, int, int]:
    core.store.check()
    stats = core.store.stats()
    return stats.handles, stats.writers, stats.leases


def bad_requests(state: State) -> list[tuple[str, dict[str, Any]]]:
    """Fields and what is wrong for them. The values are wrong whatever the engine holds."""
    cases: list[tuple[str, dict[str, Any]]] = []
    for value in (5, 1.5, True, [], b"x"):
        cases.append(("position", {"position": value}))
        cases.append(("backend", {"backend": value}))
        cases.append(("position_options", {"position_options": value}))
    for value in ("x", 5, [], {}):
        cases.append(("keep", {"keep": value}))
    for value in ("x", 1.0, NAN, True, [], ()):
        for name in ("at", "start"):
            cases.append((f"context[0].{name}", {"context": [ContextRef(state=state.id, **{name: value})]}))
            cases.append(
                (f"context[1].{name}", {"context": [state, ContextRef(state=state.id, **{name: value})]})
            )
    for value in ("bogus", 5, None, []):
        cases.append(("context[0].mode", {"context": [ContextRef(state=state.id, mode=value)]}))
    for value in ("bogus", 5, [0, 1], (0.0, 1.0), (True, False), (0, 1, 2), (NAN, 1), (0,), {}):
        cases.append(("context[0].span", {"context": [state.artifact(value)]}))
    for value in (5, 1.5, True, [], b"x"):
        cases.append(("context[0].state", {"context": [ContextRef(state=value)]}))
    cases.append(("context[0].state", {"context": [ContextRef()]}))
    cases.append(("context[0].state", {"context": [ContextRef(state=state.id, request="x")]}))
    for value in (5, state, {1, 2}):
        cases.append(("context", {"context": value}))
    for value in (5, None, {"a": 1}, b"x"):
        cases.append(("prompts", {"prompts": value}))
    for value in (HUGE, HUGER, -HUGER):
        cases.append(("input[0]", {"prompts": [value]}))
        cases.append(("logit_bias", {"logit_bias": {value: 1.0}}))
        cases.append(("max_tokens", {"max_tokens": value}))
    for value in (1.5, "1_0", " 1", "+1", "1.0", "\u0661", "9" * 5000):
        cases.append(("logit_bias", {"logit_bias": {value: 1.0}}))
    cases.append(("context[0].span", {"context": [state.artifact((0, HUGER))]}))
    cases.append(("context[0].at", {"context": [ContextRef(state=state.id, at=HUGER)]}))
    cases.append(("context[0].start", {"context": [state.inherit(start=HUGER)], "position": "explicit"}))
    cases.append(("context[0].start", {"context": [state.inherit(start=HUGER)]}))
    far = {
        "context": [state.inherit(start=0)],
        "position": "explicit",
        "position_options": {"own_start": HUGER},
    }
    cases.append(("position_options.own_start", far))
    cases.append(("repetition_penalty", {"repetition_penalty": 1e-320}))
    return cases


def test_a_wrong_type_is_refused_by_field_and_nothing_stays(llm: LLM) -> None:
    state = llm.prefill("the state")
    expected = llm.generate("next", GREEDY, keep=False).token_ids
    for field, options in bad_requests(state):
        with pytest.raises(DagError) as refused:
            llm.generate(**{"prompts": "x", "max_tokens": 2, "temperature": 0.0, **options})
        told = f"{shown(options)}: {refused.value}"
        assert refused.value.field == field and refused.value.code != "internal", told
        assert llm.engine.call(audit).result() == (1, 0, 0), told
    assert llm.generate("next", GREEDY, keep=False).token_ids == expected


@pytest.mark.parametrize("value", [0, -1, NAN, float("inf"), "x", True, [], 10**10, HUGER], ids=shown)
def test_a_time_to_live_is_refused_when_it_is_made(value: Any) -> None:
    with pytest.raises(DagError) as refused:
        Keep(ttl_s=value)
    assert refused.value.field == "ttl_s"


@pytest.mark.parametrize(
    ("options", "field"),
    [({"pin": 1}, "pin"), ({"pin": "yes"}, "pin"), ({"name": 5}, "name"), ({"name": ""}, "name")],
)
def test_how_to_keep_is_refused_when_it_is_made(options: dict[str, Any], field: str) -> None:
    with pytest.raises(DagError) as refused:
        Keep(**options)
    assert refused.value.field == field


@pytest.mark.parametrize("at", [None, 1.0, "1", True, NAN, -1, 99, HUGER], ids=shown)
def test_a_fork_at_no_token_leaves_no_handle(llm: LLM, at: Any) -> None:
    state = llm.prefill("the state")
    with pytest.raises(DagError) as refused:
        state.fork(at)
    assert refused.value.field == "at"
    assert llm.engine.call(audit).result() == (1, 0, 0)


def spoil_naming(core: EngineCore) -> None:
    def name(*args: Any, **options: Any) -> str:
        raise RuntimeError("planted")

    core.store.name = name  # type: ignore[method-assign]


def spoil_layouts(core: EngineCore) -> None:
    def prepare(*args: Any, **options: Any) -> Any:
        raise RuntimeError("planted")

    core.preparer.prepare = prepare  # type: ignore[method-assign]


@pytest.mark.parametrize("spoil", [spoil_naming, spoil_layouts])
def test_what_fails_outside_of_a_batch_ends_its_request_only(
    llm: LLM, spoil: Callable[[EngineCore], None]
) -> None:
    """The store or the layout fails for a request while another one runs."""
    found: list[Any] = []
    expected = llm.generate("x", max_tokens=200, temperature=0.0, ignore_eos=True, keep=False).token_ids

    def run() -> None:
        found.append(llm.generate("x", max_tokens=200, temperature=0.0, ignore_eos=True, keep=False))

    thread = threading.Thread(target=run)
    thread.start()
    while not llm.engine.call(lambda core: core.num_running).result():
        assert thread.is_alive()
    llm.engine.call(spoil).result()
    with pytest.raises(DagError), llm.graph() as graph:
        one = graph.node("y", max_tokens=2)
        graph.node("z", context=[one], max_tokens=2)
    thread.join()
    assert found[0].token_ids == expected
    assert llm.engine.dead is None
    assert llm.engine.call(audit).result() == (0, 0, 0)


def test_an_interrupt_cancels_what_runs_and_keeps_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the requests have ended by then, one of them kept; a third one runs."""

    class Interrupted:
        def put(self, item: None) -> None:
            """Nobody waits."""

        def get(self) -> None:
            while llm.engine.call(lambda core: core.num_running + core.num_waiting).result() > 1:
                pass
            raise KeyboardInterrupt

    requests = [llm.request("short", GREEDY, keep=keep) for keep in (Keep(), None)]
    requests.append(llm.request("x", SamplingParams(max_tokens=400, ignore_eos=True), keep=Keep()))
    with monkeypatch.context() as patch:
        patch.setattr("dagengine.submitted.SimpleQueue", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.run(requests)
    llm.engine.call(audit).result()
    assert llm.engine.call(audit).result() == (0, 0, 0)
    assert not llm.engine.call(lambda core: core.has_work).result()


@pytest.mark.parametrize(
    ("options", "code", "field"),
    [
        ({"seed": "x"}, "invalid_request", "seed"),
        ({"seed": 1.5}, "invalid_request", "seed"),
        ({"seed": True}, "invalid_request", "seed"),
        ({"seed": 2**63}, "invalid_request", "seed"),
        ({"seed": -HUGER}, "invalid_request", "seed"),
        ({"attention_backend": 5}, "invalid_request", "attention_backend"),
        ({"position": 5}, "invalid_request", "position_policy"),
        ({"position_policy": "natve"}, "policy_unsupported", "position_policy"),
        ({"chat_template": 5}, "invalid_request", "chat_template"),
        ({"attention_backend": "fusd"}, "backend_not_found", "attention_backend"),
        ({"dtype": 5}, "invalid_request", "dtype"),
        ({"page_size": -HUGER}, "invalid_request", "page_size"),
        ({"kv_memory_gib": True, "kv_pages": None}, "invalid_request", "kv_memory_gib"),
        ({"kv_pages": 2**31 - 1}, "capacity", "kv_pages"),
        ({"kv_pages": 2**31}, "invalid_request", "kv_pages"),
        ({"kv_pages": HUGER}, "invalid_request", "kv_pages"),
        ({"page_size": HUGE}, "invalid_request", "page_size"),
        ({"max_num_batched_tokens": HUGE}, "invalid_request", "max_num_batched_tokens"),
    ],
    ids=shown,
)
def test_an_engine_is_refused_by_option(
    model_folder: Path, options: dict[str, Any], code: str, field: str
) -> None:
    with pytest.raises(DagError) as refused:
        LLM(model_folder, **{"load_format": "dummy", "kv_pages": 4, **options})
    assert (refused.value.code, refused.value.field) == (code, field)


def test_messages_show_any_value() -> None:
    for value in (HUGER, "x" * 500, [1] * 500, None):
        assert 0 < len(shown(value)) <= 80


def test_an_interrupt_while_a_call_is_submitted_leaves_the_engine_usable(llm: LLM) -> None:
    """`Thread.is_alive` takes a running thread for ended once an interrupt met it there (bpo-45274)."""
    armed = True

    def interrupt(frame: Any, event: str, called: Any) -> None:
        nonlocal armed
        if armed and event == "c_call" and frame.f_code.co_name == "_wait_for_tstate_lock":
            armed = False
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        llm.engine.call(audit)
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    assert llm.generate([1, 2, 3], max_tokens=2, ignore_eos=True, keep=False).finish_reason == "length"


def test_beside_a_core_options_are_refused_and_its_position_counts(model_folder: Path) -> None:
    def core() -> EngineCore:
        config = EngineConfig(load_format="dummy", kv_pages=8, position_policy="native")
        return build_core(model_folder, config)

    with LLM(core=core()) as llm:
        assert llm.generate([1, 2], max_tokens=1, ignore_eos=True).dag.policy == "native"
    for model, options in ((model_folder, {}), (None, {"kv_pages": 4}), (None, {"chat_template": "x"})):
        with pytest.raises(DagError) as refused:
            LLM(model, core=core(), **options)
        assert refused.value.field == next(iter(options), "model")


def test_ids_that_are_all_banned_are_no_failure_of_the_model(llm: LLM) -> None:
    everything = tuple(range(llm.tokenizer.vocab_size))
    with pytest.raises(DagError) as refused:
        llm.generate([1, 2], max_tokens=4, min_tokens=1, stop_token_ids=everything)
    assert (refused.value.code, refused.value.field) == ("invalid_request", "min_tokens")


def test_an_interrupt_anywhere_between_the_threads_stops_neither(llm: LLM) -> None:
    """At each call and return in turn, among them those at which a lock has just been taken."""
    places = ("threading.py", "_base.py", "async_engine.py", "llm.py")
    for place in range(1000):
        passed = 0

        def interrupt(frame: Any, event: str, called: Any, place: int = place) -> None:
            nonlocal passed
            if frame.f_code.co_filename.endswith(places):
                passed += 1
                if passed == place + 1:
                    raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            llm.generate([1, 2, 3], max_tokens=1, keep=False)
        except (KeyboardInterrupt, RuntimeError):
            pass
        finally:
            sys.setprofile(None)
        assert llm.engine.call(lambda core: True).result(timeout=5)
        if passed <= place:
            return
    raise AssertionError("never ran to its end")
