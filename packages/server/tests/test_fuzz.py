"""Whatever a body holds: an answer or a refusal that names a field, never a failure, nothing left behind."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from conftest import Server

from dagengine_server.protocol import (
    UNSUPPORTED,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ForkBody,
    RetainBody,
    StateBody,
    TokenizeBody,
)

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**53, -(2**63), 2**63, 10**40, 10**400,
    0.0, 0.5, -0.5, 1e-320, 1e308, "", "a", "the", "st_0", "\x00", "\u202e", "😀", "a" * 300,
    [], [0], [1, 2], [-1], ["a"], [""], [[]], [[1]], [None], [1.5],
    {}, {"a": 1}, {"type": "text"}, {"1": 5}, {"policy": "native"}, {"policy": "explicit"}, {"policy": None},
    {"context": [{}]}, {"keep": {}}, {"keep": {"ttl_s": 1e-9}}, {"state": None},
    [{"role": "user", "content": "a"}], [{"role": "assistant", "content": ""}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
)  # fmt: skip
SHORT = {"max_tokens": 2, "temperature": 0}


@pytest.fixture
def bodies(server: Server) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Paths, the model of their body, and a body that works."""
    state = server.prefill([1, 2, 3])
    return {
        "/v1/completions": (CompletionBody, {"prompt": "a", **SHORT}),
        "/v1/chat/completions": (ChatBody, {"messages": [{"role": "user", "content": "a"}], **SHORT}),
        "/v1/states": (StateBody, {"input": "a"}),
        f"/v1/states/{state}/fork": (ForkBody, {"at": 1}),
        f"/v1/states/{state}/retain": (RetainBody, {}),
        "/tokenize": (TokenizeBody, {"prompt": "a"}),
        "/detokenize": (DetokenizeBody, {"tokens": [1]}),
    }


@pytest.mark.parametrize("seed", range(4))
def test_fields_of_bodies(server: Server, bodies: dict[str, tuple[Any, dict[str, Any]]], seed: int) -> None:
    chance = random.Random(seed)
    outcomes = set()
    for _ in range(60):
        path, (model, good) = chance.choice(list(bodies.items()))
        body = dict(good)
        for _ in range(chance.randint(1, 2)):
            name = chance.choice([*model.model_fields, *(UNSUPPORTED if chance.random() < 0.1 else ())])
            body[name] = chance.choice(VALUES)
        outcomes.add(post(server, path, body))
    assert {200, 400} <= outcomes


@pytest.mark.parametrize("seed", range(2))
def test_fields_of_graphs(server: Server, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(40):
        nodes: list[dict[str, Any]] = [
            {"id": "a", "input": "the"},
            {"id": "b", "input": "in", "context": [{"node": "a"}], "generate": dict(SHORT), "keep": {}},
        ]
        body: dict[str, Any] = {"format": "dagengine.graph/v1", "nodes": nodes}
        where = chance.choice(
            [body, *nodes, nodes[1]["context"][0], nodes[1]["generate"], nodes[1]["keep"], nodes[0]]
        )
        names = {
            id(body): ["model", "stream", "position", "backend", "cache_salt", "nodes", "format"],
            id(nodes[1]["context"][0]): ["node", "state", "mode", "span", "at", "start"],
            id(nodes[1]["generate"]): ["n", "seed", "stop", "top_k", "logprobs", "max_tokens", "logit_bias"],
            id(nodes[1]["keep"]): ["ttl_s", "pin", "name"],
        }
        default = ["id", "input", "context", "generate", "keep", "position", "backend", "add_special_tokens"]
        where[chance.choice(names.get(id(where), default))] = chance.choice(VALUES)
        post(server, "/v1/graphs", body)
        post(server, "/v1/graphs/compile", body)


def post(server: Server, path: str, body: dict[str, Any]) -> int:
    """Send, hold what must hold of any answer, and return the status."""
    data = json.dumps(body).encode()
    answer = server.http.post(path, content=data, headers={"Content-Type": "application/json"})
    shown = f"{path} {data[:500]!r}: {answer.status_code} {answer.text[:500]}"
    assert answer.status_code in (200, 400, 404, 409, 410, 422), shown
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"] and error["code"] not in ("internal", None), shown
        assert error["param"] or not isinstance(body, dict), shown
    elif answer.headers["content-type"] == "application/json":
        json.loads(answer.text, parse_constant=lambda name: pytest.fail(f"{name} in {shown}"))
    else:
        assert answer.text.endswith("data: [DONE]\n\n") or "event: error" in answer.text, shown
    return answer.status_code
