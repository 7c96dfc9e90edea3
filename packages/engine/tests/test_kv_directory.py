"""Pages that outlive an engine: the next one brings them from the directory, and says the same."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from dagengine import LLM, DagError
from dagengine.errors import DagError as Refusal
from dagengine_kvstore import KVStoreError, Tier
from dagengine_kvstore.persistent import PersistentTransfer
from dagengine_kvstore.torch_transfer import TorchTransfer

HOST_GIB = 512 * 2 * 2 * 2 * 8 * 4 * 4 / 2**30
PROMPT = list(range(1, 103))


def start(model_folder: Path, kept: Path, **options: Any) -> LLM:
    settings = {"seed": 1, "page_size": 4, "kv_pages": 64, "cpu_kv_gib": HOST_GIB, **options}
    return LLM(model_folder, load_format="dummy", kv_directory=str(kept), **settings)


def offload(llm: LLM, state: Any) -> None:
    def is_on_host(core: Any) -> bool:
        core.pump()
        return core.store.tier(core.store.resolve(state.id)[0]) is Tier.HOST

    state.offload()
    while not llm.engine.ask(is_on_host):
        pass


def test_what_was_offloaded_is_found_by_the_next_engine(model_folder: Path, tmp_path: Path) -> None:
    with start(model_folder, tmp_path) as llm:
        state = llm.prefill(PROMPT)
        expected = llm.generate([5, 6], context=[state], max_tokens=6, temperature=0)
        offload(llm, state)
    with start(model_folder, tmp_path) as llm:
        state = llm.prefill(PROMPT)
        found = llm.generate([5, 6], context=[state], max_tokens=6, temperature=0)
        stats = llm.engine.ask(lambda core: (core.store.check(), core.store.stats())[1])
        assert found.token_ids == expected.token_ids
        assert stats.tokens_recalled == 100 and stats.open_fences == 0
        again = llm.generate(PROMPT, max_tokens=2, temperature=0)
        assert again.usage.cached_tokens == 100
    with start(model_folder, tmp_path) as llm:
        answer = llm.generate(PROMPT, max_tokens=2, temperature=0)
        assert answer.token_ids == again.token_ids
        assert (answer.dag.reloaded, answer.dag.reused, answer.dag.computed) == (100, 100, 2)


def test_what_left_both_tiers_is_found_for_an_input_and_computed_again_for_a_state(
    model_folder: Path, tmp_path: Path
) -> None:
    def leave_both_tiers(core: Any) -> None:
        store = core.store
        node, _ = store.resolve(state.id)
        store.evict(node)
        store.evict_host(node)
        writer = store.begin([], [], 0, signature={})
        writer.reserve(store.num_unused * store.page_size)
        writer.abort()
        assert store.tier(node) is Tier.NOWHERE

    def written(core: Any) -> int:
        core.pump()
        return core.host_tier.transfer.stats.pages_written

    with start(model_folder, tmp_path) as llm:
        state = llm.prefill(PROMPT)
        offload(llm, state)
        give_up = time.monotonic() + 60
        while llm.engine.ask(written) < 25:
            assert time.monotonic() < give_up, "the directory has not written everything"
        llm.engine.ask(leave_both_tiers)
        read = llm.generate([5, 6], context=[state], max_tokens=2, temperature=0, keep=False)
        assert (read.dag.computed, read.dag.reloaded) == (104, 0)
        llm.engine.ask(leave_both_tiers)
        found = llm.generate(PROMPT, max_tokens=2, temperature=0, keep=False)
        assert (found.dag.computed, found.dag.reloaded) == (2, 100)


def test_another_model_finds_nothing(model_folder: Path, tmp_path: Path) -> None:
    with start(model_folder, tmp_path) as llm:
        offload(llm, llm.prefill(PROMPT))
    with start(model_folder, tmp_path, seed=2) as llm:
        assert llm.generate(PROMPT, max_tokens=2, temperature=0).dag.reloaded == 0


def test_a_request_that_is_cancelled_while_its_pages_come_leaves_nothing(
    model_folder: Path, tmp_path: Path
) -> None:
    with start(model_folder, tmp_path) as llm:
        offload(llm, llm.prefill(PROMPT))
    with start(model_folder, tmp_path) as llm:
        request = llm.request(PROMPT, None)

        def begin_and_cancel(core: Any) -> bool:
            core.submit(request)
            core.step()
            coming = core.host_tier.recalls.num_open
            core.abort(request.id)
            core.store.check()
            return bool(coming)

        assert llm.engine.ask(begin_and_cancel)
        assert llm.generate(PROMPT, max_tokens=2, temperature=0).finish_reason == "length"

        def settled(core: Any) -> bool:
            core.pump()
            stats = core.store.stats()
            return stats.open_fences == 0 and stats.pages_free + stats.pages_cached == stats.pages_total

        while not llm.engine.ask(settled):
            pass


def test_running_work_takes_the_pages_that_a_waiting_input_was_to_fill(
    model_folder: Path, tmp_path: Path
) -> None:
    with start(model_folder, tmp_path) as llm:
        offload(llm, llm.prefill(PROMPT))
    with start(model_folder, tmp_path, kv_pages=40) as llm:
        requests = [
            llm.request(list(range(50, 80)), llm_params(100)),
            llm.request(PROMPT, llm_params(2)),
        ]
        ended = llm.run(requests)
        assert [event.error for event in ended] == [None, None]
        llm.engine.ask(lambda core: core.store.check())


def llm_params(count: int) -> Any:
    from dagengine import SamplingParams

    return SamplingParams(max_tokens=count, min_tokens=count, temperature=0.0)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"cpu_kv_gib": 0.0}, "kv_directory"),
        ({"kv_directory_gib": -1.0}, "kv_directory_gib"),
        ({"cpu_kv_gib": HOST_GIB / 200}, "cpu_kv_gib"),
        ({"cpu_kv_gib": 1e-12}, "cpu_kv_gib"),
        ({"kv_directory_gib": 1e-12}, "kv_directory_gib"),
    ],
)
def test_refusals_name_the_setting(
    model_folder: Path, tmp_path: Path, options: dict[str, float], field: str
) -> None:
    with pytest.raises(Refusal) as error:
        start(model_folder, tmp_path, **options)
    assert (error.value.code, error.value.field) == ("invalid_request", field)


def test_a_directory_that_is_a_file_is_refused(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DagError) as error:
        start(model_folder, tmp_path / "file")
    assert error.value.field == "kv_directory"
    with pytest.raises(DagError) as error:
        start(model_folder, tmp_path / "a\0b")
    assert (error.value.code, error.value.field) == ("invalid_request", "kv_directory")


def test_a_tier_is_closed_where_the_engine_cannot_be_made(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KVStoreError("invalid_size", "planted", field="pin_budget")

    closed: list[str] = []
    for kind in (PersistentTransfer, TorchTransfer):
        monkeypatch.setattr(kind, "close", lambda self: closed.append(type(self).__name__))
    for broken in ("build.KVStore", "host_tier.Recalls", "build.EngineCore"):
        with monkeypatch.context() as planted:
            planted.setattr(f"dagengine.{broken}", fail)
            with pytest.raises(DagError if broken == "build.KVStore" else KVStoreError) as error:
                start(model_folder, tmp_path / broken)
        assert (error.value.code, error.value.field) == ("invalid_size", "pin_budget")
        assert closed == ["PersistentTransfer", "TorchTransfer"], broken
        closed.clear()
    with monkeypatch.context() as planted:
        planted.setattr("dagengine.host_tier.PersistentTransfer", fail)
        with pytest.raises(DagError):
            start(model_folder, tmp_path / "directory")
    assert closed == ["TorchTransfer"]


def test_a_fault_of_the_programs_own_is_not_blamed_on_an_option(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise TypeError("planted")

    monkeypatch.setattr("dagengine.host_tier.TorchTransfer", fail)
    with pytest.raises(TypeError, match="planted"):
        start(model_folder, tmp_path)
