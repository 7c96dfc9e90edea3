"""The calls that spnl's Python wheel (0.22.1) makes of a server that knows only OpenAI's endpoints, as it made them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from conftest import MODEL, Server

CHAT = {"model": MODEL, "reasoning_effort": "low", "max_completion_tokens": 8, "stream": True}
WARM = {"temperature": 0.5}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "S"}
CHATS: dict[str, dict[str, Any]] = {
    "g over a user message": {"messages": [user("hi")], "n": 1, **WARM},
    "g over cross and plus": {"messages": [SYSTEM, user("A"), user("B"), user("Q")], "n": 1, **WARM},
    "a judge over nested answers": {"messages": [SYSTEM, said("x"), said("x"), user("Q")], "n": 1, **WARM},
    "a judge that begins with answers": {
        "messages": [said("x"), said("y"), said("z"), user("Q")],
        "n": 1,
        **WARM,
    },
    "repeat": {"messages": [user("hi")], "n": 3, **WARM},
    "g at temperature 0": {"messages": [user("hi")], "n": 1, "temperature": 0.0},
}


def texts(server: Server, path: str, body: dict[str, Any]) -> dict[int, str]:
    """What the wheel makes of a stream: by choice the texts of its chunks, one after another."""
    found: dict[int, str] = {}
    headers = {"Authorization": "Bearer k", "Accept": "text/event-stream"}
    with server.http.stream("POST", path, json=body, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        for choice in json.loads(line)["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            found[choice["index"]] = found.get(choice["index"], "") + piece
    return found


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_of_the_wheel_is_answered(server: Server, name: str) -> None:
    found = texts(server, "/v1/chat/completions", {**CHAT, **CHATS[name]})
    assert sorted(found) == list(range(CHATS[name]["n"]))
    whole = server.post("/v1/chat/completions", {**CHAT, **CHATS[name], "stream": False, "seed": 1}).json()
    assert [choice["index"] for choice in whole["choices"]] == sorted(found)


def test_a_map_of_the_wheel_is_answered(server: Server) -> None:
    body = {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 8, "temperature": 0.5, "stream": True}
    assert sorted(texts(server, "/v1/completions", body)) == [0, 1]


def test_an_effort_is_refused_where_the_template_would_heed_it(server: Server) -> None:
    tokenizer = server.app.state.service.model.tokenizer
    before = tokenizer.template_source
    tokenizer.template_source = before + "{{ reasoning_effort }}"
    try:
        answer: httpx.Response = server.post("/v1/chat/completions", {**CHAT, **CHATS["repeat"]})
    finally:
        tokenizer.template_source = before
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported", "reasoning_effort")
