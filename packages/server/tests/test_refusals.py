"""Every refusal has its status, code and field, harms nobody, and leaves nothing behind.

After each bad request a good one is answered, and the pages are counted.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import MODEL, Server

GOOD = {"prompt": "the", "max_tokens": 2, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


@pytest.fixture(autouse=True)
def a_good_request_works_afterwards(server: Server) -> Iterator[None]:
    yield
    assert server.complete()["choices"][0]["finish_reason"] in ("stop", "length")


def refused(server: Server, path: str, body: Any, status: int, code: str, param: str | None) -> str:
    answer = server.post(path, body)
    assert answer.headers["x-request-id"].startswith("req-")
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param), error
    assert "Error" not in error["message"] and "Traceback" not in error["message"]
    return str(error["message"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.5),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", "4"),
        ("max_tokens", 4.0),
        ("max_tokens", 10**30),
        ("min_tokens", 3),
        ("n", 0),
        ("n", 5_000_000),
        ("n", 17),
        ("seed", 2**64),
        ("seed", "x"),
        ("stop", [""]),
        ("stop", [1]),
        ("stop", {"a": 1}),
        ("stop", ["x"] * 17),
        ("stop", "x" * 2000),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [10**9]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"999999": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1": 1000}),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("logprobs", 10**9),
        ("logprobs", -1),
        ("ignore_eos", 1),
        ("priority", 2**70),
        ("user", 7),
        ("cache_salt", ""),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_values_out_of_bounds(server: Server, field: str, value: Any) -> None:
    body = {**GOOD, field: value}
    if field == "n":
        body["temperature"] = 1.0
    answer = server.post("/v1/completions", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_request"), error
    assert error["param"].split(".")[0].split("[")[0] == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "auto"),
        ("response_format", {"type": "json_object"}),
        ("functions", [{}]),
        ("echo", True),
        ("best_of", 2),
        ("suffix", "x"),
        ("modalities", ["audio"]),
        ("store", True),
        ("metadata", {"a": "b"}),
        ("use_beam_search", True),
        ("service_tier", "flex"),
    ],
)
def test_unsupported_fields_are_named(server: Server, field: str, value: Any) -> None:
    for path, body in (("/v1/completions", GOOD), ("/v1/chat/completions", CHAT)):
        refused(server, path, {**body, field: value}, 400, "unsupported", field)


def test_neutral_values_are_taken(server: Server) -> None:
    neutral = {
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "best_of": 1, "echo": False,
        "suffix": None, "logit_bias": None, "stop": None, "seed": None, "dag": None, "user": "someone",
        "parallel_tool_calls": True, "store": False, "reasoning_effort": "low",
    }  # fmt: skip
    assert server.post("/v1/chat/completions", {**CHAT, **neutral}).status_code == 200


def test_unknown_fields_get_a_suggestion(server: Server) -> None:
    for body, param in (
        ({**GOOD, "temprature": 1}, "temprature"),
        ({**GOOD, "dag": {"contxt": []}}, "dag.contxt"),
        ({**GOOD, "dag": {"context": [{"state": "st_1", "mod": "digest"}]}}, "dag.context[0].mod"),
    ):
        assert "did you mean" in refused(server, "/v1/completions", body, 400, "invalid_request", param)
    message = {"role": "user", "content": "a", "tool_calls": [1]}
    refused(
        server, "/v1/chat/completions", {"messages": [message]}, 400, "unsupported", "messages[0].tool_calls"
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "developer", "content": "a"}]}, "messages"),
        ({**CHAT, "top_logprobs": 2}, "top_logprobs"),
        ({**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({**CHAT, "max_completion_tokens": 3}, "max_completion_tokens"),
        ({"messages": CHAT["messages"], "max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
def test_bad_chats(server: Server, body: Any, param: str) -> None:
    refused(server, "/v1/chat/completions", body, 400, "invalid_request", param)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        ([], "prompt"),
        (5, "prompt"),
        ({}, "prompt"),
        ([[]], "prompt[0]"),
        ([1, -1], "prompt[1]"),
        ([1, 10**6], "prompt[1]"),
        ([1, 2**70], "prompt[1]"),
        ([True], "prompt[0]"),
        ([1, "a"], "prompt[0]"),
        (["a", 1], "prompt[1]"),
        (["a", [1]], "prompt[1]"),
        ([[1], [2, 99999]], "prompt[1][1]"),
        ([1.5], "prompt[0]"),
        (["a"] * 300, "prompt"),
    ],
)
def test_bad_prompts(server: Server, prompt: Any, param: str) -> None:
    refused(server, "/v1/completions", {"prompt": prompt, "max_tokens": 1}, 400, "invalid_request", param)


def test_an_empty_text(server: Server) -> None:
    body = {"prompt": "", "max_tokens": 1, "add_special_tokens": False}
    refused(server, "/v1/completions", body, 400, "invalid_request", "prompt")
    refused(server, "/v1/states", {"input": [], "dag": {}}, 400, "invalid_request", "input")


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_that_never_fit(server: Server, stream: bool) -> None:
    def body(prompt: Any, tokens: int | None) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": tokens, "stream": stream}

    refused(server, "/v1/completions", body([1] * 600, 1), 422, "position_overflow", "prompt")
    refused(server, "/v1/completions", body([[1], [1] * 600], 1), 422, "position_overflow", "prompt[1]")
    refused(server, "/v1/completions", body([1] * 100, 500), 422, "position_overflow", "max_tokens")


def test_a_request_beyond_the_pool_is_refused_and_blocks_nobody(start: Callable[..., Server]) -> None:
    small = start({"kv_pages": 8})
    refused(small, "/v1/completions", {"prompt": [1] * 40, "max_tokens": 1}, 400, "capacity", "prompt")
    refused(small, "/v1/completions", {"prompt": [1] * 8, "max_tokens": 100}, 400, "capacity", "max_tokens")
    assert small.complete()["choices"]


def test_references(server: Server) -> None:
    state = server.prefill([1, 2, 3])

    def with_context(*items: Any, **dag: Any) -> dict[str, Any]:
        return {**GOOD, "dag": {"context": list(items), **dag}}

    def check(body: Any, status: int, code: str, param: str) -> None:
        refused(server, "/v1/completions", body, status, code, param)
        refused(server, "/v1/completions", {**body, "stream": True}, status, code, param)

    here = "dag.context[0]"
    check(with_context({"state": "st_none"}), 404, "state_not_found", f"{here}.state")
    check(with_context({"state": state}, {"state": "st_x"}), 404, "state_not_found", "dag.context[1].state")
    check(with_context({"state": state, "mode": "copy"}), 400, "invalid_request", f"{here}.mode")
    check(with_context({"state": state, "span": "output"}), 400, "invalid_request", f"{here}.span")
    check(with_context({"state": 5}), 400, "invalid_request", f"{here}.state")
    check(with_context({}), 400, "invalid_request", f"{here}.state")
    check(with_context("st_1"), 400, "invalid_request", here)
    past = {"state": state, "mode": "artifact", "span": [1, 9]}
    check(with_context(past), 422, "span_out_of_range", f"{here}.span")
    check(with_context({**past, "span": [2, 1]}), 422, "span_out_of_range", f"{here}.span")
    check(with_context({**past, "span": ["a", 1]}), 400, "invalid_request", f"{here}.span")
    check(with_context({**past, "span": "all of it"}), 400, "invalid_request", f"{here}.span")
    check(with_context({"state": state, "at": 4}), 422, "span_out_of_range", f"{here}.at")
    check(with_context({"state": state, "at": -1}), 400, "invalid_request", f"{here}.at")
    mixed = with_context({"state": state}, {"state": state, "mode": "digest"})
    assert server.post("/v1/completions", mixed).json()["error"]["code"] == "edge_mix_forbidden"
    assert server.post("/v1/completions", mixed).status_code == 422
    server.http.delete(f"/v1/states/{state}")
    check(with_context({"state": state}), 410, "state_released", f"{here}.state")


def test_more_tokens_at_least_than_there_is_room_for(server: Server) -> None:
    refused(server, "/v1/chat/completions", {"messages": CHAT["messages"], "min_tokens": 10**6},
            422, "position_overflow", "min_tokens")  # fmt: skip


def test_positions_and_backends(server: Server) -> None:
    state = server.prefill([1, 2, 3])
    context = [{"state": state}]

    def check(dag: Any, status: int, code: str, prefix: str) -> None:
        answer = server.post("/v1/completions", {**GOOD, "dag": dag})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (status, code), error
        assert error["param"].startswith(prefix), error

    check({"position": {"policy": "zigzag"}}, 422, "policy_unsupported", "dag.position")
    check({"position": {"policy": 5}}, 400, "invalid_request", "dag.position.policy")
    check({"position": "linear"}, 400, "invalid_request", "dag.position")
    linear = {"policy": "linear", "own_start": 5}
    check({"position": linear}, 422, "policy_unsupported", "dag.position.own_start")
    explicit = {"policy": "explicit"}
    check({"context": context, "position": explicit}, 422, "policy_unsupported", "dag.")
    for own_start in (1, "a", -5, 1.5, True):
        dag = {"context": [{"state": state, "start": 10}], "position": {**explicit, "own_start": own_start}}
        check(dag, 422, "policy_unsupported", "dag.position.own_start")
    far = {"context": [{"state": state, "start": 10**12}], "position": explicit}
    check(far, 422, "policy_unsupported", "dag.context[0].start")
    near = {"context": [{"state": state, "start": 511}], "position": explicit}
    check(near, 422, "position_overflow", "prompt")
    check({"backend": "magic"}, 400, "unsupported", "dag.backend")
    for keep, field in (
        ({"ttl": 5}, ".ttl"), ({"ttl_s": -1}, ".ttl_s"), ({"ttl_s": 10**400}, ".ttl_s"), ({"pin": 1}, ".pin"),
        ({"name": ""}, ".name"), (True, ""), ([], ""),
    ):  # fmt: skip
        check({"keep": keep}, 400, "invalid_request", f"dag.keep{field}")


def test_states(server: Server) -> None:
    state = server.prefill([1, 2, 3])
    refused(server, "/v1/states", {}, 400, "invalid_request", "input")
    refused(server, "/v1/states", {"input": 5}, 400, "invalid_request", "input")
    refused(server, "/v1/states", {"input": [{"role": "x"}]}, 400, "invalid_request", "input[0].role")
    refused(server, "/v1/states", {"input": "a", "generate": {}}, 400, "invalid_request", "generate")
    refused(server, "/v1/states", {"input": [1], "add_special_tokens": True}, 400, "invalid_request",
            "add_special_tokens")  # fmt: skip
    refused(server, f"/v1/states/{state}/fork", {"at": "x"}, 400, "invalid_request", "at")
    refused(server, f"/v1/states/{state}/fork", {}, 400, "invalid_request", "at")
    refused(server, f"/v1/states/{state}/fork", {"at": 2**80}, 422, "span_out_of_range", "at")
    refused(server, f"/v1/states/{state}/retain", {"ttl_s": -1}, 400, "invalid_request", "ttl_s")
    refused(server, "/v1/states/st_no/fork", {"at": 1}, 404, "state_not_found", "state")
    refused(server, "/v1/states/st_no/retain", {}, 404, "state_not_found", "state")
    assert server.http.get("/v1/states", params={"limit": "x"}).json()["error"]["param"] == "limit"
    assert server.http.get("/v1/states", params={"limit": 0}).status_code == 400


def graph(*nodes: Any, **more: Any) -> dict[str, Any]:
    return {"format": "dagengine.graph/v1", "nodes": list(nodes), **more}


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ([], 400, "invalid_request", None),
        ({}, 400, "invalid_request", "format"),
        (graph(), 400, "invalid_request", "nodes"),
        (graph({"id": "a"}), 400, "invalid_request", "nodes[0].input"),
        (graph({"id": "a", "length": 5}), 400, "invalid_request", "nodes[0].input"),
        (graph({"id": "a", "input": "x", "inptu": 1}), 400, "invalid_request", "nodes[0].inptu"),
        (graph({"id": "a", "input": ""}, {"id": "a", "input": "x"}), 400, "invalid_request", "nodes[1].id"),
        (
            graph({"id": "a", "input": "x", "context": [{"node": "b"}]}),
            404, "state_not_found", "nodes[0].context[0].node",
        ),
        (
            graph({"id": "a", "input": "x"}, {"id": "b", "input": "x", "context": [{"state": "st_1"}]}),
            404, "state_not_found", "nodes[1].context[0].state",
        ),
        (
            graph({"id": "a", "input": "x"}, {"id": "b", "input": [10**7]}),
            400, "invalid_request", "nodes[1].input[0]",
        ),
        (
            graph({"id": "a", "input": "x", "generate": {"max_tokens": 0}}),
            400, "invalid_request", "nodes[0].generate.max_tokens",
        ),
        (
            graph({"id": "a", "input": "x", "generate": {"n": 99}}),
            400, "invalid_request", "nodes[0].generate.n",
        ),
        (
            graph({"id": "a", "input": "x", "generate": {"tools": []}}),
            400, "invalid_request", "nodes[0].generate.tools",
        ),
        (graph({"id": "a", "input": "x", "keep": {"x": 1}}), 400, "invalid_request", "nodes[0].keep.x"),
        (graph({"id": "a", "input": [{"role": "x"}]}), 400, "invalid_request", "nodes[0].input[0].role"),
        (
            graph({"id": "a", "input": "x", "position": {"policy": "explicit", "own_satrt": 5}}),
            422, "policy_unsupported", "nodes[0].position.own_satrt",
        ),
        (
            graph({"id": "a", "input": "x", "generate": {"max_tokens": 10**6}}),
            422, "position_overflow", "nodes[0].generate.max_tokens",
        ),
        (
            graph(
                {"id": "a", "input": "x", "generate": {"n": 2}},
                {"id": "b", "input": "x", "context": [{"node": "a"}]},
            ),
            400, "invalid_request", "nodes[1].context[0].node",
        ),
        (graph({"id": "a", "input": "x"}, model="other"), 404, "model_not_found", "model"),
        (graph({"id": "a", "input": "x"}, cache_salt=5), 400, "invalid_request", "cache_salt"),
        (
            graph(
                {"id": "a", "input": "x", "context": [{"node": "b"}]},
                {"id": "b", "input": "x", "context": [{"node": "a"}]},
            ),
            422, "cycle", "nodes[0].context",
        ),
    ],
)  # fmt: skip
def test_graphs(server: Server, body: Any, status: int, code: str, param: str | None) -> None:
    answer = server.post("/v1/graphs", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), error
    assert (error["param"] or None) == param
    if isinstance(body, dict):
        assert server.post("/v1/graphs", {**body, "stream": True}).status_code == status


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"nonsense",
        b"[1, 2]",
        b'"text"',
        b"null",
        b'{"prompt": NaN}',
        b'{"prompt": "a", "top_p": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b"\xff\xfe{}",
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b'{"a":' * 5000,
        b'{"prompt": "a"} trailing',
        b"\xef\xbb\xbf{}",
    ],
)
def test_bodies_that_are_no_object(server: Server, data: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/states", "/v1/graphs", "/tokenize"):
        answer = server.http.post(path, content=data, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "\ud800"}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "x\udc00y"]}, "prompt[1]"),
        ("/v1/completions", {"prompt": "a", "stop": ["\ud83d"]}, "stop[0]"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "\udfff"}]},
            "messages[0].content",
        ),
        ("/v1/states", {"input": "\ud800"}, "input"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/v1/graphs", graph({"id": "a", "input": "\ud800"}), "nodes[0].input"),
    ],
)
def test_lone_surrogates(server: Server, path: str, body: Any, param: str) -> None:
    data = json.dumps(body).encode()
    answer = server.http.post(path, content=data, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    good = json.dumps({"prompt": "\U0001f600", "max_tokens": 1}).encode()
    assert server.http.post("/v1/completions", content=good, headers={"Content-Type": "application/json"})


def test_bodies_must_say_that_they_are_json(server: Server) -> None:
    answer = server.http.post(
        "/v1/completions", content=json.dumps(GOOD), headers={"Content-Type": "text/plain"}
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


def test_large_bodies_are_refused_before_they_are_read(server: Server) -> None:
    body = json.dumps({"prompt": "a" * (3 * 2**20)}).encode()
    headers = {"Content-Type": "application/json"}
    declared = server.http.post("/v1/completions", content=body, headers=headers)
    assert (declared.status_code, declared.json()["error"]["code"]) == (413, "body_too_large")

    def chunks() -> Iterator[bytes]:
        for begin in range(0, len(body), 2**16):
            yield body[begin : begin + 2**16]

    chunked = server.http.post("/v1/completions", content=chunks(), headers=headers)
    assert (chunked.status_code, chunked.json()["error"]["code"]) == (413, "body_too_large")


def test_a_client_that_reads_after_it_wrote_is_told(server: Server) -> None:
    """It must find the answer, not a connection that was cut off while it sent."""
    body = b"a" * (5 * 2**20)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(f"{head}{len(body)}\r\n\r\n".encode())
        for begin in range(0, len(body), 2**18):
            connection.sendall(body[begin : begin + 2**18])
            time.sleep(0.002)
        assert connection.recv(64).startswith(b"HTTP/1.1 413")


def test_unknown_routes_methods_and_models(server: Server) -> None:
    assert server.http.get("/v1/nothing").json()["error"]["code"] == "not_found"
    assert server.http.get("/v1/completions").status_code == 405
    assert server.http.get("/v1/completions").json()["error"]["code"] == "method_not_allowed"
    for path in ("/v1/completions", "/v1/states", "/tokenize"):
        field = "input" if path == "/v1/states" else "prompt"
        refused(server, path, {field: "a", "model": "gpt-4"}, 404, "model_not_found", "model")


def test_tokens(server: Server) -> None:
    found = server.post("/tokenize", {"prompt": "the 😀", "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    plain = server.post("/tokenize", {"prompt": "the 😀", "add_special_tokens": False}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": plain}).json() == {"prompt": "the 😀"}
    assert server.post("/tokenize", {"messages": CHAT["messages"]}).json()["count"] > 10
    refused(server, "/tokenize", {}, 400, "invalid_request", "prompt")
    refused(server, "/tokenize", {"prompt": "a", "messages": []}, 400, "invalid_request", "prompt")
    refused(server, "/detokenize", {"tokens": [10**9]}, 400, "invalid_request", "tokens[0]")
    refused(server, "/detokenize", {"tokens": ["a"]}, 400, "invalid_request", "tokens[0]")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({**GOOD, "dag": 5}, "dag"),
        ({**GOOD, "dag": []}, "dag"),
        ({**GOOD, "dag": {"context": [5]}}, "dag.context[0]"),
        ({**GOOD, "dag": {"keep": "x"}}, "dag.keep"),
        ({**GOOD, "logit_bias": [1]}, "logit_bias"),
        ({**GOOD, "stream": True, "stream_options": 5}, "stream_options"),
    ],
)
def test_no_name_of_ours_is_in_a_message(server: Server, body: dict[str, Any], field: str) -> None:
    error = server.post("/v1/completions", body).json()["error"]
    assert error["param"] == field
    assert error["message"].startswith("a JSON object is needed, not "), error


@pytest.mark.parametrize(
    ("path", "body", "twice"),
    [
        ("/v1/completions", '{"prompt": [1], "max_tokens": 1, "logit_bias": {"7": 1, "7": 2}}', "7"),
        ("/v1/completions", '{"prompt": [1], "max_tokens": 1, "max_tokens": 1}', "max_tokens"),
        ("/v1/completions", '{"prompt": [1], "dag": {"keep": {}, "\\u006beep": null}}', "keep"),
        ("/v1/completions", '{"prompt": [1], "\\ud800": 1, "\\ud800": 1}', "?"),
        ("/v1/graphs", '{"nodes": [{"id": "a", "id": "b"}]}', "id"),
        ("/v1/query/execute", '{"g": {"model": "m", "model": "m", "input": {"user": "a"}}}', "model"),
    ],
)
def test_a_field_that_is_given_twice_is_refused(server: Server, path: str, body: str, twice: str) -> None:
    answer = server.http.post(path, content=body, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_request", twice)
    bias = {"prompt": [1], "max_tokens": 1, "logit_bias": {"7": 1, "07": 2}}
    assert server.post("/v1/completions", bias).json()["error"]["param"] == "logit_bias"


@pytest.mark.parametrize(
    ("method", "path", "given", "wrong"),
    [
        ("POST", "/v1/query/execute", "strem=true&stream=false&salt=x", ["strem", "salt"]),
        ("POST", "/v1/query/execute", "stream=true&stream=false", ["stream"]),
        ("POST", "/v1/query/prepare", "stream=false", ["stream"]),
        ("POST", "/v1/query/prepare", "reduce=4", ["reduce"]),
        ("GET", "/v1/states", "limt=3", ["limt"]),
        ("GET", "/v1/states", "limit=3&limit=4", ["limit"]),
        ("GET", "/v1/states/st_x", "salt=a", ["salt"]),
        ("DELETE", "/v1/states/st_x", "cache_salt=a&cache_salt=b", ["cache_salt"]),
        ("POST", "/v1/states", "cache_salt=a", ["cache_salt"]),
        ("POST", "/v1/states/st_x/fork", "at=3", ["at"]),
        ("POST", "/v1/graphs", "stream=true", ["stream"]),
        ("POST", "/v1/graphs/compile", "a=", ["a"]),
    ],
)
def test_url_parameters_that_would_be_ignored_are_named(
    server: Server, method: str, path: str, given: str, wrong: list[str]
) -> None:
    body = (
        {} if method != "POST" else {"json": {"g": {"model": MODEL, "max_tokens": 2, "input": {"user": "a"}}}}
    )
    answer = server.http.request(method, f"{path}?{given}", **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_request", wrong[0])
    assert wrong == [wrong[0]] or all(repr(name) in error["message"] for name in wrong)
