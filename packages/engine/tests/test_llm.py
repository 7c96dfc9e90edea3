"""What a Python user holds: `LLM` and `AsyncLLM`, states and results, graphs, refusals."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
from pathlib import Path

import pytest

from dagengine import LLM, AsyncLLM, ContextRef, DagError, EngineDead, Keep, Result, SamplingParams
from dagengine.core import EngineCore
from dagengine.request import TokenEvent

README = Path(__file__).parents[1] / "README.md"
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def handles(llm: LLM) -> int:
    return llm.engine.call(lambda core: core.store.stats().handles).result()


def check(llm: LLM) -> None:
    llm.engine.call(lambda core: core.store.check()).result()


def test_the_readme_example_runs(model_folder: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        source = block.replace("LLM(MODEL)", "LLM(MODEL, load_format='dummy', seed=1, kv_pages=64)")
        exec(compile(source, str(README), "exec"), {"MODEL": model_folder})


def test_one_prompt_gives_one_result_and_a_list_gives_a_list(llm: LLM) -> None:
    one = llm.generate("a prompt", GREEDY)
    several = llm.generate(["a prompt", "another"], GREEDY)
    assert isinstance(one, Result)
    assert [type(r) for r in several] == [Result, Result]
    assert several[0].token_ids == one.token_ids
    assert llm.generate([1, 2, 3], GREEDY).usage.prompt_tokens == 3
    chat = [{"role": "user", "content": "hi"}]
    assert llm.chat(chat, GREEDY).state.spans["turn"][0] < len(llm.chat(chat, GREEDY).state)


def test_n_answers_share_the_prompt_and_are_drawn_apart(llm: LLM) -> None:
    answers = llm.generate(
        "a long enough prompt", max_tokens=8, n=3, seed=5, temperature=2.0, ignore_eos=True
    )
    again = llm.generate("a long enough prompt", max_tokens=8, n=3, seed=5, temperature=2.0, ignore_eos=True)
    assert [a.token_ids for a in answers] == [a.token_ids for a in again]
    assert len({a.token_ids for a in answers}) > 1
    assert answers[1].usage.cached_tokens > 0
    assert len({a.state.id for a in answers}) == 3


def test_a_chain_of_states_reads_like_the_plain_prompt(llm: LLM) -> None:
    plain = llm.generate([*range(1, 40)], GREEDY)
    first = llm.prefill([*range(1, 15)])
    second = llm.prefill([*range(15, 30)], context=[first])
    assert llm.generate([*range(30, 40)], GREEDY, context=[second]).token_ids == plain.token_ids


def test_a_result_holds_its_state_until_it_is_closed_or_collected(llm: LLM) -> None:
    results = [llm.generate(f"prompt {i}", GREEDY) for i in range(3)]
    assert handles(llm) == 3
    results[0].close()
    results[0].close()
    assert handles(llm) == 2
    with results[1].state as state:
        assert llm.generate("more", GREEDY, context=[state], keep=False).state is None
    assert handles(llm) == 1
    del results
    gc.collect()
    assert handles(llm) == 0
    check(llm)


def test_a_released_state_is_named_in_the_refusal_and_its_readers_go_on(llm: LLM) -> None:
    parent = llm.prefill("some context")
    child = llm.prefill("more of it", context=[parent])
    parent.release()
    with pytest.raises(DagError) as refused:
        llm.generate("x", GREEDY, context=[parent])
    assert (refused.value.code, refused.value.field) == ("state_released", "context[0].state")
    assert llm.generate("x", GREEDY, context=[child]).dag.visible == len(parent) + len(child)


def test_references_of_every_kind(llm: LLM) -> None:
    answer = llm.generate("a question", GREEDY)
    fork = answer.fork(3)
    for context, visible in (
        ([answer], len(answer.state)),
        ([answer.inherit()], len(answer.state)),
        ([answer.artifact()], 6),
        ([answer.artifact((1, 3))], 2),
        ([answer.digest()], len(answer.state)),
        ([fork], 3),
        ([fork.artifact("all")], 3),
        ([answer.state.id], len(answer.state)),
        ([ContextRef(state=answer.state.id, at=2)], 2),
    ):
        assert llm.explain(context=context).num_visible == visible
    explicit = llm.explain(context=[answer.inherit(start=20)], position="explicit")
    assert explicit.own_start == 20 + len(answer.state)


def test_a_graph_runs_at_once_and_its_nodes_read_each_other(llm: LLM) -> None:
    with llm.graph() as graph:
        a = graph.node("one document")
        b = graph.node("another", context=[a.digest()], max_tokens=4, temperature=0.0)
        c = graph.node("judge", context=[a, b.artifact("all")], sampling=GREEDY, keep=False)
    assert graph.results[a].finish_reason == "prefill"
    assert graph.results[c].dag.visible == len(graph.results[a].state) + len(graph.results[b].state)
    assert graph.results[c].state is None
    check(llm)


def test_a_failed_node_fails_its_readers_and_nobody_else(llm: LLM) -> None:
    with llm.graph(raise_errors=False) as graph:
        a = graph.node("fine")
        b = graph.node("bad", context=[a.artifact((0, 999))], max_tokens=2)
        c = graph.node("reads it", context=[b], max_tokens=2)
        d = graph.node("independent", context=[a], max_tokens=2)
    assert {ref: error.code for ref, error in graph.errors.items()} == {
        b: "span_out_of_range",
        c: "parent_failed",
    }
    assert graph.results.keys() == {a, d}
    with pytest.raises(DagError), llm.graph() as graph:
        a = graph.node("fine")
        graph.node("bad", context=[a.artifact((0, 999))], max_tokens=2)


@pytest.mark.parametrize(
    ("arguments", "code", "field"),
    [
        ({"prompts": "", "max_tokens": 2}, "invalid_request", "input"),
        ({"prompts": [0, 10**6], "max_tokens": 2}, "invalid_request", "input[1]"),
        ({"prompts": "x" * 600, "max_tokens": 2}, "position_overflow", "input"),
        ({"prompts": "x", "max_tokens": 600}, "position_overflow", "max_tokens"),
        ({"prompts": "x", "context": ["st_unknown"]}, "state_not_found", "context[0].state"),
        ({"prompts": "x", "context": [3]}, "invalid_request", "context[0]"),
        ({"prompts": "x", "position": "none such"}, "policy_unsupported", "position"),
        ({"prompts": "x", "backend": "none such"}, "unsupported", "backend"),
        ({"prompts": "x", "temperature": float("nan")}, "invalid_request", "temperature"),
        ({"prompts": "x", "tempreature": 1}, "invalid_request", "tempreature"),
        ({"prompts": [{"role": "nobody", "content": "x"}]}, "invalid_request", "input[0].role"),
    ],
)
def test_refusals_name_the_field_and_the_next_request_is_served(
    llm: LLM, arguments: dict[str, object], code: str, field: str
) -> None:
    with pytest.raises(DagError) as refused:
        llm.generate(**arguments)
    assert (refused.value.code, refused.value.field) == (code, field)
    assert len(llm.generate("next", GREEDY).token_ids) == 6
    check(llm)


def test_an_unknown_option_of_the_engine_is_refused(model_folder: Path) -> None:
    with pytest.raises(DagError) as refused:
        LLM(model_folder, page_sise=4)
    assert refused.value.field == "page_sise"
    for folder in (model_folder.parent / "nowhere", "/nowhere", "./nowhere"):
        with pytest.raises(DagError, match="is no folder with a config") as refused:
            LLM(folder)
        assert refused.value.code == "model_not_found"


def test_threads_may_call_at_once(llm: LLM) -> None:
    expected = [llm.generate(f"prompt {i}", GREEDY, keep=False).token_ids for i in range(8)]
    found: list[object] = [None] * 8

    def call(index: int) -> None:
        found[index] = llm.generate(f"prompt {index}", GREEDY, keep=False).token_ids

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_a_closed_engine_says_so(model_folder: Path) -> None:
    llm = LLM(model_folder, load_format="dummy", kv_pages=16)
    state = llm.prefill("x")
    llm.close()
    llm.close()
    with pytest.raises(EngineDead):
        llm.generate("y", GREEDY)
    state.release()


def test_async_calls_stream_and_cancel(model_folder: Path) -> None:
    async def run() -> None:
        options = {"load_format": "dummy", "seed": 1, "page_size": 4, "kv_pages": 256}
        async with AsyncLLM(model_folder, **options) as llm:
            docs = await asyncio.gather(*(llm.prefill(f"document {i}") for i in range(3)))
            whole = await llm.generate("question", GREEDY, context=docs)
            pieces, results = [], []
            async for item in llm.stream("question", GREEDY, context=docs):
                (pieces if isinstance(item, TokenEvent) else results).append(item)
            assert "".join(p.text for p in pieces) == results[0].text == whole.text
            assert sum((p.token_ids for p in pieces), ()) == whole.token_ids
            assert (await llm.explain(context=docs)).num_visible == sum(len(d) for d in docs)

            endless = asyncio.create_task(llm.generate("x", max_tokens=400, ignore_eos=True))
            await asyncio.sleep(0.05)
            endless.cancel()
            with pytest.raises(asyncio.CancelledError):
                await endless
            stream = llm.stream("x", max_tokens=400, ignore_eos=True)
            await anext(stream)
            await stream.aclose()
            assert await asyncio.wrap_future(llm.engine.call(running)) == 0

    asyncio.run(run())


def running(core: EngineCore) -> int:
    core.store.check()
    return core.num_running + core.num_waiting


def test_a_kept_state_has_a_name_and_a_time_to_live(llm: LLM) -> None:
    state = llm.prefill("x", keep=Keep(ttl_s=500.0, name="notes"))
    info = llm.engine.call(lambda core: core.store.describe(state.id)).result()
    assert info.name == "notes"
    assert info.expires_s is not None and 0 < info.expires_s <= 500
