"""`/v1/query`: what spnl's client sends is run as one graph, in the shapes that it reads; what is wrong is named."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from conftest import MODEL, Server, wait_until
from sockets import RawClient

from dagengine import DagError
from dagengine.request import Event
from dagengine_core_graph.query import assistant, cross, load_query, monad, plus, system
from dagengine_core_graph.query import g as g_of
from dagengine_server.client import Client
from dagengine_server.routes.common import off_loop
from dagengine_server.submission import Submission

PLAIN = {"Content-Type": "text/plain"}


def g(input: Any, model: str = MODEL, max_tokens: int = 6, temperature: float = 0.0) -> dict[str, Any]:
    return {"g": {"model": model, "max_tokens": max_tokens, "temperature": temperature, "input": input}}


RAG = {"cross": [{"system": "S"}, {"plus": [{"user": "A piece"}, {"user": "B piece"}]}, {"user": "Q"}]}
NESTED = {"cross": [{"system": "judge"}, {"plus": [g({"user": "a"}), g({"user": "b"})]}, {"user": "which?"}]}
CAPTURED: dict[str, dict[str, Any]] = {
    "repeat": {"repeat": {"n": 1, **g(RAG, f"spnl/{MODEL}", temperature=0.5)}},
    "repeat of several": {"repeat": {"n": 3, **g(RAG, temperature=0.5)}},
    "bare g": g(RAG),
    "nested g": g(NESTED),
    "plus of g": {"plus": [g({"user": "a"}), g({"user": "b"})]},
    "map": {
        "map": {"metadata": {"model": MODEL, "max_tokens": 6, "temperature": 0.5}, "inputs": ["a", "b"]}
    },
    "seq, monad, zip, print": {
        "seq": [{"print": "warming"}, {"monad": g({"user": "w"})}, {"zip": {"first": {"user": "z"}, "second": g(RAG)}}]
    },
}  # fmt: skip
ANSWERS = {"repeat of several": 3, "plus of g": 2, "map": 2}


def execute(server: Server, query: Any, stream: str = "false", **options: Any) -> Any:
    params = {"stream": stream, **options}
    return server.http.post("/v1/query/execute", params=params, content=json.dumps(query), headers=PLAIN)


def streamed(server: Server, query: Any, **options: Any) -> tuple[dict[int, str], dict[str, Any]]:
    """What spnl's client makes of a stream, and the last chunk."""
    answer = execute(server, query, "true", **options)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1] if event.startswith("data: ")]
    found: dict[int, str] = {}
    for chunk in chunks:
        assert chunk["object"] == "text_completion" and {"id", "created", "model"} < set(chunk)
        for choice in chunk["choices"]:
            assert {"index", "text", "finish_reason", "logprobs"} <= set(choice)
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found, chunks[-1]


@pytest.mark.parametrize("name", CAPTURED)
def test_a_query_of_the_client_is_run_in_its_shapes(server: Server, name: str) -> None:
    query, count = CAPTURED[name], ANSWERS.get(name, 1)
    answer = execute(server, query)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    kind = "text_completion" if name == "map" else "chat.completion"
    assert (found["object"], found["model"]) == (kind, MODEL)
    assert [choice["index"] for choice in found["choices"]] == list(range(count))
    for choice in found["choices"]:
        text = choice["text"] if name == "map" else choice["message"]["content"]
        assert isinstance(text, str) and choice["finish_reason"] in ("stop", "length")
    load_query({"format": "dagengine.query/v1", "query": found["result"]})
    parts, last = streamed(server, query)
    assert sorted(parts) == list(range(count))
    assert last["usage"]["completion_tokens"] > 0
    assert last["dag"]["record"]["rewrites"] == found["dag"]["record"]["rewrites"]
    for told in (last, found):
        spent = told["dag"]["timing_ms"]
        assert set(spent) == {"submit", "plan", "tokenize"}
        assert 0 < spent["plan"] + spent["tokenize"] <= spent["submit"]


@pytest.mark.parametrize("name", ["bare g", "nested g", "plus of g"])
def test_streamed_and_whole_answers_are_the_same(server: Server, name: str) -> None:
    whole = [choice["message"]["content"] for choice in execute(server, CAPTURED[name]).json()["choices"]]
    parts, _ = streamed(server, CAPTURED[name])
    assert [parts[index] for index in range(len(parts))] == whole


def test_our_form_says_more_and_gives_the_same(server: Server) -> None:
    ours = {"format": "dagengine.query/v1", "query": g(RAG)}
    ours["query"] = {"g": {**ours["query"]["g"], "options": {"ignore_eos": True, "seed": 5}}}
    found = server.http.post("/v1/query/execute", json=ours).json()
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["usage"]["completion_tokens"] == 6


def test_defaults_are_those_of_the_client(server: Server) -> None:
    bare = {"repeat": {"n": 0, "g": {"model": MODEL, "max_tokens": 0, "input": {"user": "a"}}}}
    found = execute(server, bare).json()
    assert len(found["choices"]) == 1
    assert found["dag"]["record"]["max_tokens"] == 2048


def test_a_second_query_reads_what_the_first_computed(server: Server) -> None:
    pieces = [{"user": "a piece of some length"}, {"user": "another piece of it"}]

    def run(*plus: dict[str, str]) -> dict[str, Any]:
        return execute(server, g({"cross": [{"system": "Two"}, {"plus": plus}, {"user": "Q"}]})).json()

    first, second, swapped = run(*pieces), run(*pieces), run(*reversed(pieces))
    assert first["choices"][0]["message"] == second["choices"][0]["message"]
    computed, again, turned = (
        found["dag"]["record"]["reuse"]["computed"] for found in (first, second, swapped)
    )
    assert again <= 4 and turned < computed / 2, "only the last page of the question is computed again"


def test_preparing_computes_everything_but_the_calls(server: Server) -> None:
    query = g({"cross": [{"system": "Z"}, {"plus": [{"user": "fresh"}, {"user": "news"}]}, {"user": "Q"}]})
    before = server.engine.call(lambda core: core.stats.generated_tokens).result()
    answer = server.http.post("/v1/query/prepare", content=json.dumps(query), headers=PLAIN)
    assert (answer.status_code, answer.json()) == (200, {"success": True})
    assert server.engine.call(lambda core: core.stats.generated_tokens).result() == before
    reuse = execute(server, query).json()["dag"]["record"]["reuse"]
    assert reuse["input"] - reuse["reused"] < 25, "only the question and the generation prompt are new"


def test_a_server_that_keeps_no_fragments_says_so(start: Callable[..., Server]) -> None:
    server = start(max_fragments=0)
    answer = server.http.post("/v1/query/prepare", content=json.dumps(g(RAG)), headers=PLAIN)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported")
    assert execute(server, g(RAG)).status_code == 200
    assert server.http.get("/v1/states").json()["data"] == []
    server.settle()


def test_nothing_is_shared_between_salts_and_keys(start: Callable[..., Server]) -> None:
    server = start(api_keys=("one", "two"))

    def run(key: str, salt: str | None = None) -> int:
        headers = {**PLAIN, "Authorization": f"Bearer {key}"}
        params = {} if salt is None else {"cache_salt": salt}
        body = json.dumps(g(RAG))
        answer = server.http.post("/v1/query/execute", content=body, headers=headers, params=params)
        return int(answer.json()["dag"]["record"]["reuse"]["reused"])

    assert run("one") == 0 and run("one") > 0
    assert run("two") == 0 and run("one", "s") == 0 and run("one", "s") > 0
    assert execute(server, g(RAG)).status_code == 401


def test_a_kept_answer_can_be_read(server: Server) -> None:
    found = execute(server, g({"user": "a"}), keep_ttl_s=60).json()
    state = found["choices"][0]["dag"]["state"]
    context = [{"state": state, "mode": "artifact", "span": "turn"}]
    assert server.complete(dag={"context": context})["usage"]["prompt_tokens_details"]["cached_tokens"] > 6


def test_what_is_no_query_is_refused(server: Server) -> None:
    for content, headers, status in (
        (b"{", PLAIN, 400),
        (b"\xff", PLAIN, 400),
        (b"{}", {"Content-Type": "text/html"}, 415),
    ):
        answer = server.http.post("/v1/query/execute", content=content, headers=headers)
        assert answer.status_code == status, answer.text
    deep: Any = {"user": "a"}
    for _ in range(100):
        deep = {"cross": [deep]}
    assert execute(server, g(deep)).json()["error"]["code"] == "capacity"
    wide = {"plus": [{"user": "a"}] * 5000}
    assert execute(server, g(wide)).json()["error"]["code"] == "capacity"
    assert execute(server, g(RAG), "maybe").status_code == 400
    assert execute(server, g(RAG, "other")).json()["error"]["code"] == "model_not_found"
    for name in ("position", "backend"):
        unknown = execute(server, g(RAG), **{name: "sideways"})
        assert unknown.status_code in (400, 422) and unknown.json()["error"]["param"] == name
    for name in ("position", "backend"):
        empty = execute(server, g(RAG), **{name: ""})
        assert (empty.status_code, empty.json()["error"]["param"]) == (400, name)
    for name, value in (
        ("reduce", "1"),
        ("reduce", "x"),
        ("keep_ttl_s", "0"),
        ("backend", "b" * 65),
        ("top", "1"),
    ):
        wrong = execute(server, g(RAG), **{name: value})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, name)
    long = execute(server, g(RAG, max_tokens=10**6)).json()["error"]
    assert (long["code"], long["param"]) == ("position_overflow", "g.max_tokens")


def nested(number: int) -> dict[str, Any]:
    """One text under many constructors."""
    query: dict[str, Any] = {"user": f"deep {number}"}
    for _ in range(50):
        query = {"seq": [query]}
    return query


@pytest.mark.parametrize(
    ("query", "hops"),
    [
        (g(RAG), 0),
        (g({"user": "a b " * 2000}), 1),
        (g({"plus": [{"user": f"text {number}"} for number in range(40)]}), 1),
        (g({"plus": [{"user": "a"}, *[{"user": ""}] * 300]}), 2),
        (g({"plus": [nested(number) for number in range(6)]}), 2),
        (
            {
                "repeat": {
                    "n": 255,
                    "g": {"model": MODEL, "max_tokens": 1, "input": {"cross": [{"user": ""}]}},
                }
            },
            1,
        ),
    ],
    ids=["short", "long text", "many texts", "many values", "many constructors", "many calls"],
)
def test_only_what_takes_long_leaves_the_event_loop(
    server: Server, monkeypatch: pytest.MonkeyPatch, query: Any, hops: int
) -> None:
    threads = []

    async def counted(function: Callable[[], Any]) -> Any:
        threads.append(function)
        return await off_loop(function)

    monkeypatch.setattr("dagengine_server.routes.queries.off_loop", counted)
    execute(server, query)
    assert len(threads) == hops


def test_the_clients_id_is_given_back_and_ours_cancels(server: Server) -> None:
    headers = {**PLAIN, "X-Request-Id": "mine"}
    answer = server.http.post("/v1/query/execute", content=json.dumps(g(RAG)), headers=headers)
    assert answer.headers["x-client-request-id"] == "mine"
    assert answer.json()["id"] == answer.headers["x-request-id"] != "mine"


def test_a_client_that_leaves_cancels_its_query(server: Server) -> None:
    query = {"format": "dagengine.query/v1", "query": {"g": {
        "max_tokens": 400, "input": NESTED, "options": {"ignore_eos": True}}}}  # fmt: skip
    with server.http.stream("POST", "/v1/query/execute?stream=true", json=query) as answer:
        next(answer.iter_lines())
    wait_until(lambda: not server.engine.call(lambda core: core.has_work).result())


def test_a_client_that_leaves_while_fragments_are_handed_over_leaks_none(
    start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    reached, go_on = threading.Event(), threading.Event()
    delivered = Submission.delivered

    def stopping(self: Submission, request_id: str | None = None) -> None:
        delivered(self, request_id)
        server.engine.post(lambda core: go_on.wait(30))
        reached.set()

    monkeypatch.setattr(Submission, "delivered", stopping)
    client = RawClient(server.port)
    client.send("/v1/query/execute", {"format": "dagengine.query/v1", "query": g(RAG)})
    assert reached.wait(30)
    client.leave()
    wait_until(lambda: not server.app.state.service.open_requests)
    go_on.set()
    wait_until(lambda: not server.engine.call(lambda core: core.has_work).result())
    handles = server.engine.call(lambda core: core.store.stats().handles).result()
    assert handles == len(server.app.state.service.fragments) > 0
    server.release_all()
    server.settle()


def test_a_stream_that_ends_early_ends_with_an_error(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(self: Submission, silence_s: float) -> AsyncGenerator[list[Event], None]:
        for batch in ():
            yield batch

    monkeypatch.setattr(Submission, "batches", nothing)
    answer = execute(server, g(RAG), "true")
    assert '"code":"internal"' in answer.text.replace(" ", "") and "[DONE]" not in answer.text


def test_the_client_class_asks_the_same(server: Server) -> None:
    query = g_of(cross(system("S"), plus("one piece", "another piece"), "Q"), max_tokens=6, temperature=0.0)
    with Client(server.url, cache_salt="client") as client:
        client.prepare(query)
        with client.query(query, keep_ttl_s=60, position="native") as found:
            assert found.text == found.answers[0].text and found.query == assistant(found.text)
            assert found.usage.completion_tokens > 0 and found.record["policy"] == "native"
            follow = client.generate("more", context=[found.answers[0].artifact("turn")], max_tokens=2)
            assert follow.usage.cached_tokens > 6
        assert client.query(found.query).answers == ()
        for wrong, field in ((7, "query"), (g_of(monad("a")), "query.g.input")):
            with pytest.raises(DagError) as error:
                client.query(wrong)  # type: ignore[arg-type]
            assert error.value.field == field
