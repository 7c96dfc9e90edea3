"""States and what requests read of them: keep, inherit, artifact, digest, fork, explicit, release."""

from __future__ import annotations

import time
from typing import Any

import pytest
from conftest import MODEL, Server, wait_until


def inherit(state: str, **more: Any) -> dict[str, Any]:
    return {"context": [{"state": state, **more}]}


def test_a_state_is_described(server: Server) -> None:
    made = server.post(
        "/v1/states", {"input": "the thing", "dag": {"keep": {"name": "doc", "ttl_s": 60}}}
    ).json()
    tokens = server.post("/tokenize", {"prompt": "the thing"}).json()["count"]
    assert (made["object"], made["name"], made["tokens"], made["tier"]) == ("state", "doc", tokens, "device")
    assert made["usage"]["prompt_tokens"] == tokens and 0 < made["expires_s"] <= 60
    assert made["dag"]["state"] == made["id"] and made["dag"]["tokens"]["computed"] == tokens
    found = server.http.get(f"/v1/states/{made['id']}").json()
    assert found["layout"] == {"own_start": 0, "segments": []}
    assert found["signature"]["dtype"] == "float32"
    assert [state["id"] for state in server.http.get("/v1/states").json()["data"]] == [made["id"]]


def test_a_chain_of_inherits_is_the_plain_prompt(server: Server) -> None:
    first, second = [5, 6, 7, 8, 9], [10, 11, 12]
    plain = server.complete(prompt=first + second, max_tokens=6, return_token_ids=True)
    state = server.prefill(first)
    chained = server.complete(prompt=second, max_tokens=6, return_token_ids=True, dag=inherit(state))
    assert chained["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
    assert chained["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] == 8
    dag = chained["dag"]
    assert dag["tokens"]["visible"] == 5 and dag["tokens"]["input"] == 3 and dag["tokens"]["reloaded"] == 0
    assert dag["tokens"]["reused"] >= 5 and dag["position"] == {"policy": "linear", "own_start": 5}
    assert chained["usage"]["prompt_tokens_details"]["cached_tokens"] == dag["tokens"]["reused"]
    assert set(dag) == {"state", "spans", "tokens", "position", "record", "timing_ms"}
    assert set(dag["timing_ms"]) == {"waited", "compile", "layout", "kv_prepare", "first_token"}
    assert dag["record"]["backend"] == "fused" and dag["state"] is None


def test_kept_answers_are_read_by_later_ones(server: Server) -> None:
    kept = {"keep": {"ttl_s": 600}}
    a = server.complete(prompt="the a", dag=kept, min_tokens=4)
    b = server.complete(prompt="on the", dag=kept, min_tokens=4)
    assert a["dag"]["state"] and a["dag"]["spans"]["output"][1] - a["dag"]["spans"]["output"][0] == 4
    context = [
        {"state": a["dag"]["state"], "mode": "artifact"},
        {"state": b["dag"]["state"], "mode": "artifact", "span": [0, 2]},
    ]
    judged = server.complete(prompt="in", dag={"context": context})
    assert judged["dag"]["tokens"]["visible"] == 4 + 2
    whole = server.complete(prompt="in", dag=inherit(a["dag"]["state"]))
    assert whole["dag"]["tokens"]["visible"] == a["dag"]["spans"]["output"][1]


def test_a_digest_is_not_passed_on(server: Server) -> None:
    document = server.prefill([1, 2, 3, 4])
    summary = server.prefill([5, 6], context=[{"state": document, "mode": "digest"}])
    child = server.prefill([7], context=[{"state": summary}])
    assert server.http.get(f"/v1/states/{summary}").json()["context_tokens"] == 4
    layout = server.http.get(f"/v1/states/{child}").json()["layout"]
    assert layout["own_start"] == 2
    assert [row[:3] for row in layout["segments"]] == [[summary, 0, 2]]


def test_a_fork_shows_the_first_tokens(server: Server) -> None:
    state = server.prefill(list(range(10)))
    forked = server.post(f"/v1/states/{state}/fork", {"at": 4, "keep": {"name": "cut"}}).json()
    assert (forked["tokens"], forked["name"], forked["spans"]["prompt"]) == (4, "cut", [0, 4])
    assert server.complete(dag=inherit(forked["id"]))["dag"]["tokens"]["visible"] == 4
    assert server.complete(dag=inherit(state, at=3))["dag"]["tokens"]["visible"] == 3
    beyond = server.post(f"/v1/states/{state}/fork", {"at": 11})
    assert (beyond.status_code, beyond.json()["error"]["param"]) == (422, "at")


def test_explicit_positions(server: Server) -> None:
    state = server.prefill([1, 2, 3])
    dag = {**inherit(state, start=100), "position": {"policy": "explicit", "own_start": 200}}
    answer = server.complete(dag=dag)
    assert answer["dag"]["position"] == {"policy": "explicit", "own_start": 200}
    refused = server.post("/v1/completions", {"prompt": "a", "dag": inherit(state, start=100)})
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "policy_unsupported")


def test_backends_agree(server: Server) -> None:
    state = server.prefill("the thing in the on a")
    answers = {
        backend: server.complete(dag={**inherit(state), "backend": backend}, max_tokens=6)
        for backend in ("reference", "packed", "segmented", "naive", "fused")
    }
    assert {name: answer["dag"]["record"]["backend"] for name, answer in answers.items()} == {
        name: name for name in answers
    }
    assert len({answer["choices"][0]["text"] for answer in answers.values()}) == 1


def test_release_leaves_readers_alone(server: Server) -> None:
    parent = server.prefill([1, 2, 3, 4])
    child = server.prefill([5], context=[{"state": parent}])
    assert server.http.delete(f"/v1/states/{parent}").json() == {
        "id": parent,
        "object": "state",
        "deleted": True,
    }
    assert server.http.delete(f"/v1/states/{parent}").status_code == 410
    assert server.http.get(f"/v1/states/{parent}").status_code == 410
    assert server.complete(dag=inherit(child))["dag"]["tokens"]["visible"] == 5


def test_time_to_live_and_retain(server: Server) -> None:
    short = server.prefill([1, 2], keep={"ttl_s": 0.05})
    held = server.prefill([3, 4], keep={"ttl_s": 30})
    retained = server.http.post(f"/v1/states/{held}/retain").json()
    assert retained["expires_s"] is None
    pinned = server.post(f"/v1/states/{held}/retain", {"ttl_s": 30, "pin": True}).json()
    assert pinned["pinned"] and pinned["expires_s"] > 0
    assert not server.post(f"/v1/states/{held}/retain", {"pin": False}).json()["pinned"]
    wait_until(lambda: server.http.get(f"/v1/states/{short}").status_code == 410)


def test_states_are_listed_in_pages(server: Server) -> None:
    states = [server.prefill([index + 1]) for index in range(5)]
    first = server.http.get("/v1/states", params={"limit": 2}).json()
    assert [state["id"] for state in first["data"]] == states[:2] and first["has_more"]
    rest = server.http.get("/v1/states", params={"limit": 10, "after": states[1]}).json()
    assert [state["id"] for state in rest["data"]] == states[2:] and not rest["has_more"]
    assert server.http.get("/v1/states", params={"after": "st_no"}).status_code == 404


def test_chat_after_a_context_has_no_second_system_turn(server: Server) -> None:
    def chat(**dag: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "temperature": 0, "dag": dag}
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    first = chat(keep={})
    assert first["dag"]["spans"]["turn"][0] < first["dag"]["spans"]["prompt"][1]
    second = chat(context=[{"state": first["dag"]["state"]}])
    system = server.post(
        "/tokenize", {"prompt": "<|im_start|>system\nBe kind.<|im_end|>\n", "add_special_tokens": False}
    )
    assert first["dag"]["tokens"]["input"] - second["dag"]["tokens"]["input"] == system.json()["count"]
    turn = server.complete(
        dag={"context": [{"state": first["dag"]["state"], "mode": "artifact", "span": "turn"}]}
    )
    begin, end = first["dag"]["spans"]["turn"]
    assert turn["dag"]["tokens"]["visible"] == end - begin


def test_several_answers_each_have_their_dag(server: Server) -> None:
    answer = server.complete(n=3, temperature=1.0, seed=1, dag={"keep": {}})
    assert "dag" not in answer
    states = [choice["dag"]["state"] for choice in answer["choices"]]
    assert len(set(states)) == 3 and all(states)
    listed = {state["id"] for state in server.http.get("/v1/states").json()["data"]}
    assert listed == set(states)


def test_cache_salts_are_apart(server: Server) -> None:
    mine = server.post("/v1/states", {"input": [1, 2, 3, 4, 5], "cache_salt": "one"}).json()
    foreign = [
        server.post("/v1/completions", {"prompt": "a", "dag": inherit(mine["id"])}),
        server.post("/v1/completions", {"prompt": "a", "cache_salt": "two", "dag": inherit(mine["id"])}),
        server.http.get(f"/v1/states/{mine['id']}"),
        server.http.delete(f"/v1/states/{mine['id']}", params={"cache_salt": "two"}),
        server.post(f"/v1/states/{mine['id']}/fork", {"at": 1}),
        server.post(f"/v1/states/{mine['id']}/retain", {}),
    ]
    assert [(answer.status_code, answer.json()["error"]["code"]) for answer in foreign] == [
        (404, "state_not_found")
    ] * len(foreign)
    assert server.http.get("/v1/states").json()["data"] == []
    own = {"cache_salt": "one"}
    assert server.complete(**own, dag=inherit(mine["id"]))["dag"]["tokens"]["visible"] == 5
    assert server.http.get(f"/v1/states/{mine['id']}", params=own).status_code == 200
    again = server.post("/v1/states", {"input": [1, 2, 3, 4, 5], "cache_salt": "two"}).json()
    assert again["dag"]["tokens"]["reused"] == 0
    again = server.post("/v1/states", {"input": [1, 2, 3, 4, 5], "cache_salt": "one"}).json()
    assert again["dag"]["tokens"]["reused"] > 0


def test_equal_work_is_reused(server: Server) -> None:
    prompt = list(range(40))
    first = server.complete(prompt=prompt)
    second = server.complete(prompt=prompt)
    assert first["choices"] == second["choices"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == second["dag"]["tokens"]["reused"] >= 36
    assert second["dag"]["tokens"]["computed"] == 40 - cached


@pytest.mark.parametrize("model", [None, MODEL])
def test_the_model_may_be_left_out(server: Server, model: str | None) -> None:
    assert server.complete(model=model)["model"] == MODEL
    assert time.time() - server.complete()["created"] < 60
