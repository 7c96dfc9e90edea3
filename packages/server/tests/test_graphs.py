"""Whole graphs in one request: answers per node, events, partial failure, and plans without a run."""

from __future__ import annotations

import json
from typing import Any

from conftest import Server

DOCUMENTS = [{"id": "doc1", "input": [1, 2, 3, 4, 5]}, {"id": "doc2", "input": [6, 7, 8]}]


def drafts(**generate: Any) -> list[dict[str, Any]]:
    options = {"max_tokens": 4, "min_tokens": 4, "temperature": 0, **generate}
    return [
        {"id": "a", "context": [{"node": "doc1"}, {"node": "doc2"}], "input": "the", "generate": options},
        {"id": "b", "context": [{"node": "doc2"}, {"node": "doc1"}], "input": "the", "generate": options},
        {
            "id": "judge",
            "context": [{"node": "a", "mode": "artifact"}, {"node": "b", "mode": "artifact"}],
            "input": "in",
            "generate": {"max_tokens": 2, "temperature": 0},
            "keep": {"ttl_s": 60},
        },
    ]


def document(nodes: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"format": "dagengine.graph/v1", "nodes": nodes, **more}


def events(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    with server.http.stream("POST", "/v1/graphs", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_answers_per_node(server: Server) -> None:
    answer = server.post("/v1/graphs", document(DOCUMENTS + drafts())).json()
    nodes = {node["node"]: node for node in answer["nodes"]}
    assert list(nodes) == ["doc1", "doc2", "a", "b", "judge"]
    assert nodes["doc1"]["finish_reason"] == "prefill" and nodes["doc1"]["text"] == ""
    assert nodes["a"]["dag"]["tokens"]["visible"] == 8
    assert nodes["judge"]["dag"]["tokens"]["visible"] == 4 + 4
    assert nodes["judge"]["dag"]["state"] and nodes["a"]["dag"]["state"] is None
    assert answer["usage"]["completion_tokens"] == sum(
        n["usage"]["completion_tokens"] for n in answer["nodes"]
    )
    state = nodes["judge"]["dag"]["state"]
    assert server.http.get(f"/v1/states/{state}").json()["context_tokens"] == 8


def test_nodes_may_read_states_and_hold_messages(server: Server) -> None:
    rules = server.prefill([9, 9, 9])
    nodes = [
        {
            "id": "x",
            "context": [{"state": rules}],
            "input": [{"role": "user", "content": "a"}],
            "generate": {"max_tokens": 2, "temperature": 0},
        }
    ]
    node = server.post("/v1/graphs", document(nodes)).json()["nodes"][0]
    assert node["dag"]["tokens"]["visible"] == 3 and "turn" in node["dag"]["spans"]


def test_events_join_to_the_whole_answers(server: Server) -> None:
    body = document(DOCUMENTS + drafts())
    whole = {node["node"]: node for node in server.post("/v1/graphs", body).json()["nodes"]}
    found = events(server, body)
    assert found[-1]["event"] == "done"
    finals = {event["node"]: event for event in found if event["event"] == "final"}
    assert set(finals) == set(whole)
    for name, final in finals.items():
        deltas = [event for event in found if event["event"] == "delta" and event["node"] == name]
        assert "".join(event["text"] for event in deltas) == final["text"] == whole[name]["text"]
        assert [t for event in deltas for t in event["token_ids"]] == final["token_ids"]
    order = [event["node"] for event in found if event["event"] == "final"]
    assert order.index("a") < order.index("judge") and order.index("doc1") < order.index("a")


def test_several_answers_of_a_node(server: Server) -> None:
    nodes = [{"id": "x", "input": "the", "generate": {"n": 2, "seed": 1, "max_tokens": 3}}]
    node = server.post("/v1/graphs", document(nodes)).json()["nodes"][0]
    assert [choice["index"] for choice in node["choices"]] == [0, 1] and "text" not in node


def test_a_failure_ends_its_dependents_only(server: Server) -> None:
    nodes = [
        *DOCUMENTS,
        {"id": "bad", "context": [{"node": "doc1"}], "input": "a", "position": {"policy": "nope"}},
        {"id": "child", "context": [{"node": "bad"}], "input": "a"},
        {"id": "good", "context": [{"node": "doc1"}], "input": "a", "generate": {"max_tokens": 1}},
    ]
    for found in (
        server.post("/v1/graphs", document(nodes)).json()["nodes"],
        [event for event in events(server, document(nodes)) if event["event"] == "final"],
    ):
        by_name = {node["node"]: node for node in found}
        assert by_name["bad"]["error"]["code"] == "policy_unsupported"
        assert by_name["bad"]["error"]["param"] == "nodes[2].position"
        assert by_name["child"]["error"]["code"] == "parent_failed"
        assert "'bad'" in by_name["child"]["error"]["message"]
        assert by_name["good"]["finish_reason"] in ("length", "stop")


def test_compile_runs_nothing(server: Server) -> None:
    steps = server.engine.call(lambda core: core.stats.steps).result()
    plan = server.post("/v1/graphs/compile", document(DOCUMENTS + drafts())).json()
    assert server.engine.call(lambda core: core.stats.steps).result() == steps
    nodes = {node["node"]: node for node in plan["nodes"]}
    assert nodes["a"]["visible"] == [["doc1", 0, 5], ["doc2", 0, 3]]
    assert nodes["b"]["layout"]["segments"] == [["doc2", 0, 3, 0, 0], ["doc1", 0, 5, 3, 3]]
    assert nodes["judge"]["tokens"]["visible"] == 8 and nodes["judge"]["layout"]["own_start"] == 8
    assert nodes["doc1"]["pages"] == 2


def test_compile_explains_refusals(server: Server) -> None:
    nodes = [
        *DOCUMENTS,
        {"id": "bad", "context": [{"node": "doc1", "mode": "artifact", "span": [0, 9]}], "input": "a"},
        {"id": "child", "context": [{"node": "bad"}], "input": "a"},
    ]
    plan = server.post("/v1/graphs/compile", document(nodes)).json()["nodes"]
    assert plan[2]["error"]["code"] == "span_out_of_range"
    assert plan[2]["error"]["param"].startswith("nodes[2].context")
    assert plan[3]["error"]["code"] == "parent_failed"


def test_compile_refuses_what_a_run_refuses(server: Server) -> None:
    """Node by node the same code and field, whether a run is refused as a whole or one of its nodes is."""
    several = {"id": "a", "input": "the", "generate": {"n": 2, "max_tokens": 2}}
    for bad in (
        {"context": [{"node": "a"}]},
        {"context": [{"node": "doc1"}, {"node": "a", "mode": "artifact"}]},
        {"context": [{"node": "doc1", "mode": "artifact", "span": [0, 9]}]},
        {"context": [{"node": "doc1", "at": 9}]},
        {"context": [{"node": "doc1"}, {"node": "doc2", "mode": "digest"}]},
        {"context": [{"node": "doc1", "start": 3}]},
        {"context": [{"state": "st_unknown"}]},
        {"position": {"policy": "explicit"}, "context": [{"node": "doc1"}]},
        {"position": {"policy": "zigzag"}},
        {"position": {"policy": "explicit", "own_start": 600}},
        {"generate": {"max_tokens": 600}},
        {"generate": {"stop_token_ids": [99999]}},
        {"backend": "none such"},
        {"input": [1, 99999]},
        {"input": [1] * 600},
    ):
        nodes = [*DOCUMENTS, several, {"id": "bad", "input": "in", **bad}]
        planned = server.post("/v1/graphs/compile", document(nodes)).json()
        run = server.post("/v1/graphs", document(nodes)).json()
        told = run.get("error") or run["nodes"][3]["error"]
        found = planned.get("error") or planned["nodes"][3]["error"]
        assert (found["code"], found["param"]) == (told["code"], told["param"]), (bad, found, told)


def test_a_graph_under_a_salt_reads_only_its_states(server: Server) -> None:
    state = server.post("/v1/states", {"input": [1, 2], "cache_salt": "x"}).json()["id"]
    nodes = [{"id": "a", "context": [{"state": state}], "input": "a"}]
    assert server.post("/v1/graphs", document(nodes)).status_code == 404
    assert server.post("/v1/graphs", document(nodes, cache_salt="x")).status_code == 200
