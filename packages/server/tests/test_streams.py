"""Streamed and whole answers are the same, whatever stops them."""

from __future__ import annotations

import json
import random
from typing import Any

from conftest import Server


def streamed(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """The stream's parts put together as the whole answer would be."""
    with server.http.stream(
        "POST", "/v1/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}
    ) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert chunks[-1]["choices"] == [] and all(chunk["usage"] is None for chunk in chunks[:-1])
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert all(choice["text"] or choice["token_ids"] for choice in choices[:-1]), "an empty chunk"
    return {
        "text": "".join(choice["text"] for choice in choices),
        "token_ids": [token for choice in choices for token in choice.get("token_ids", [])],
        "finish_reason": choices[-1]["finish_reason"],
        "stop_reason": choices[-1]["stop_reason"],
        "usage": chunks[-1]["usage"],
        "spans": chunks[-2]["dag"]["spans"],
    }


def test_stream_is_the_whole_answer_under_random_stops(server: Server) -> None:
    chance = random.Random(3)
    stopped = 0
    for seed in range(12):
        body: dict[str, Any] = {"prompt": "the", "max_tokens": 24, "seed": seed, "temperature": 1.2}
        body |= {"return_token_ids": True, "logit_bias": {str(token): 4 for token in range(64, 72)}}
        text = server.complete(**body)["choices"][0]["text"]
        if chance.random() < 0.8 and len(text) > 4:
            stops = []
            for _ in range(chance.randint(1, 3)):
                begin = chance.randrange(len(text) - 2)
                stops.append(text[begin : begin + chance.randint(1, 4)])
            body["stop"] = stops if chance.random() < 0.7 else stops[0]
        whole = server.complete(**body)
        choice = whole["choices"][0]
        found = streamed(server, body)
        usage = found.pop("usage")
        assert found == {
            **{name: choice[name] for name in found if name != "spans"},
            "spans": whole["dag"]["spans"],
        }
        assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]
        assert usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]
        for stop in [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop", []):
            assert stop not in choice["text"]
        stopped += choice["finish_reason"] == "stop"
    assert stopped > 3


def test_characters_are_never_split(server: Server) -> None:
    emoji = "😀é你"
    ids = server.post("/tokenize", {"prompt": emoji, "add_special_tokens": False}).json()["tokens"]
    body = {"prompt": "a", "max_tokens": 30, "temperature": 2.0, "seed": 1, "return_token_ids": True}
    body["logit_bias"] = {str(token): 30 for token in ids}
    whole = server.complete(**body)["choices"][0]
    assert streamed(server, body)["text"] == whole["text"]
    decoded = server.post("/detokenize", {"tokens": whole["token_ids"]}).json()["prompt"]
    assert whole["text"] == decoded


def test_a_refused_stream_is_a_plain_error(server: Server) -> None:
    answer = server.post("/v1/completions", {"prompt": [1] * 600, "stream": True})
    assert answer.status_code == 422 and answer.headers["content-type"] == "application/json"


def test_answers_hold_no_infinities(server: Server) -> None:
    bias = {str(token): -100 for token in range(200)}
    for path, body in (
        ("/v1/completions", {"prompt": "a", "logprobs": 20}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20},
        ),
    ):
        answer = server.post(path, {**body, "max_tokens": 3, "logit_bias": bias})
        assert answer.status_code == 200
        assert "Infinity" not in answer.text and "NaN" not in answer.text
