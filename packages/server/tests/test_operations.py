"""What operators rely on: keys, CORS, metrics, health, the event loop, the description of the interface."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import MODEL, Server
from prometheus_client.parser import text_string_to_metric_families

OPENAPI = Path(__file__).parent / "openapi.json"


def test_keys_guard_everything_but_health(start: Callable[..., Server]) -> None:
    server = start(api_keys=("key-one", "key-two"))
    paths = [route.path for route in server.app.routes if hasattr(route, "path")]
    paths += list(server.app.openapi()["paths"])
    assert "/v1/chat/completions" in paths and "/docs" in paths
    for path in paths:
        for headers in ({}, {"Authorization": "Bearer key-on"}, {"Authorization": "Basic key-one"}):
            answer = server.http.get(path, headers=headers)
            assert answer.status_code == (200 if path.startswith("/health") else 401), path
            if answer.status_code == 401:
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
    assert server.http.get("/v1/models", headers={"Authorization": "bearer key-two"}).status_code == 200


def test_keys_are_tenants(start: Callable[..., Server]) -> None:
    server = start(api_keys=("key-one", "key-two"))
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("key-one", "key-two"))
    state = server.post("/v1/states", {"input": [1, 2, 3, 4, 5]}, headers=one).json()["id"]
    body = {"prompt": "a", "max_tokens": 1, "dag": {"context": [{"state": state}]}}
    assert server.post("/v1/completions", body, headers=one).status_code == 200
    foreign = server.post("/v1/completions", body, headers=two)
    assert (foreign.status_code, foreign.json()["error"]["code"]) == (404, "state_not_found")
    assert server.http.delete(f"/v1/states/{state}", headers=two).status_code == 404
    assert server.http.get("/v1/states", headers=two).json()["data"] == []
    again = server.post("/v1/states", {"input": [1, 2, 3, 4, 5]}, headers=two).json()
    assert again["dag"]["tokens"]["reused"] == 0
    server.release_all()
    server.settle()


def test_cors_is_off_unless_asked_for(start: Callable[..., Server]) -> None:
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    closed = start()
    assert (
        "access-control-allow-origin" not in closed.http.options("/v1/completions", headers=preflight).headers
    )
    opened = start(allowed_origins=("https://a.example",), api_keys=("k",))
    answer = opened.http.options("/v1/completions", headers=preflight)
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    refused = opened.http.get("/v1/models", headers={"Origin": "https://a.example"})
    assert refused.status_code == 401 and "access-control-allow-origin" in refused.headers


def test_request_ids(server: Server) -> None:
    answer = server.http.get("/version", headers={"X-Client-Request-Id": "mine", "X-Request-Id": "forged"})
    assert answer.headers["x-client-request-id"] == "mine"
    assert answer.headers["x-request-id"].startswith("req-")
    long = server.http.get("/version", headers={"X-Client-Request-Id": "a" * 129})
    assert "x-client-request-id" not in long.headers


def read_metrics(server: Server) -> dict[str, float]:
    """Samples by `name|label=value|…`, labels in order."""
    text = server.http.get("/metrics").text
    return {
        sample.name + "".join(f"|{key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_agree_with_what_happened(start: Callable[..., Server]) -> None:
    server = start()
    state = server.prefill([1, 2, 3, 4, 5, 6, 7, 8])
    before = read_metrics(server)
    answer = server.complete(
        dag={"context": [{"state": state}, {"state": state}]}, max_tokens=3, min_tokens=3
    )
    server.post("/v1/completions", {"prompt": "a", "dag": {"position": {"policy": "nope"}}})
    after = read_metrics(server)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert all(name.startswith("dagengine_") for name in after)
    assert grown("dagengine_generation_tokens_total") == answer["usage"]["completion_tokens"] == 3
    assert grown("dagengine_prompt_tokens_total") == answer["usage"]["prompt_tokens"]
    assert grown("dagengine_prefix_cache_hits_total") == answer["dag"]["tokens"]["reused"]
    assert grown("dagengine_time_to_first_token_seconds_count") == 1
    assert grown("dagengine_merge_ttft_seconds_count") == 1
    assert grown("dagengine_request_success_total|finished_reason=length") == 1
    assert grown("dagengine_request_errors_total|code=policy_unsupported") == 1
    assert grown("dagengine_adapter_rejections_total|reason=policy_unsupported") == 1
    assert grown("dagengine_http_requests_total|method=POST|route=/v1/completions|status=422") == 1
    assert after["dagengine_dag_states|tier=device"] == 1
    pages = [
        after[f"dagengine_kv_pages|status={s}|tier=device"] for s in ("free", "cached", "live", "waiting")
    ]
    assert sum(pages) == 160 and pages[2] == 2
    assert after["dagengine_kv_cache_usage_perc"] == pytest.approx(2 / 160)
    assert abs(after["dagengine_engine_last_step_timestamp"] - time.time()) < 30
    assert state not in server.http.get("/metrics").text


NOWHERE = {"context": [{"state": "st_none"}]}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (
            "/v1/graphs",
            {
                "format": "dagengine.graph/v1",
                "nodes": [{"id": "a", "input": [1]}, {"id": "b", "input": [2], **NOWHERE}],
            },
        ),
        ("/v1/completions", {"prompt": ["a", "b"], "dag": NOWHERE}),
    ],
)
def test_every_request_of_a_refused_submission_counts_as_refused(
    route: str, body: dict[str, Any], start: Callable[..., Server]
) -> None:
    server = start()
    assert server.post(route, body).json()["error"]["code"] == "state_not_found"
    counted = read_metrics(server).items()
    errors = {name: value for name, value in counted if name.startswith("dagengine_request_errors_total")}
    assert errors == {"dagengine_request_errors_total|code=state_not_found": 2}


def test_long_inputs_do_not_block_the_event_loop(server: Server) -> None:
    """While a megabyte of text is tokenized, the loop goes round; tokenizing on it would take seconds."""
    text = "the thing in the on a " * 50_000

    async def longest_gap() -> tuple[float, float, int]:
        longest, last, done = 0.0, time.perf_counter(), asyncio.Event()

        async def beat() -> None:
            nonlocal longest, last
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
                while not done.is_set():
                    assert (await http.get("/health")).status_code == 200
                    longest, last = max(longest, time.perf_counter() - last), time.perf_counter()

        beating = asyncio.create_task(beat())
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            began = time.perf_counter()
            answer = await http.post("/v1/completions", json={"prompt": text, "max_tokens": 1})
            took = time.perf_counter() - began
        done.set()
        await beating
        return longest, took, answer.status_code

    longest, took, status = asyncio.run(longest_gap())
    assert status == 422
    assert longest < max(0.5, took / 2), f"the loop stood still for {longest:.2f} of {took:.2f} seconds"


def test_health_and_version(server: Server) -> None:
    assert server.http.get("/health").json() == server.http.get("/health/ready").json() == {"status": "ok"}
    assert set(server.http.get("/version").json()) == {"version", "engine"}
    assert server.http.get("/docs").status_code == 200


def test_the_model_says_which_attention_runs_and_why(server: Server) -> None:
    (model,) = server.http.get("/v1/models").json()["data"]
    dag = model["dag"]
    assert dag["default_backend"] in dag["backends"]
    record = server.complete(max_tokens=1)["dag"]["record"]
    assert (record["backend"], record["implementation"]) == (
        dag["default_backend"],
        dag["default_implementation"],
    )
    assert dag["default_backend_reason"] == "the fastest on cpu"


def test_nothing_new_is_taken_while_draining(start: Callable[..., Server]) -> None:
    server = start()
    server.app.state.service.draining = True
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/health/ready").status_code == 503
    answer = server.post("/v1/completions", {"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
    assert "retry-after" in answer.headers
    assert server.http.post("/v1/requests/req-1/cancel").status_code == 200
    assert server.http.get("/metrics").status_code == 200


def test_the_interface_is_the_committed_one(server: Server) -> None:
    """Set UPDATE_OPENAPI=1 to accept a change."""
    found = server.http.get("/openapi.json").json()
    if os.environ.get("UPDATE_OPENAPI"):
        OPENAPI.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    assert found == json.loads(OPENAPI.read_text())
    assert found["paths"]["/v1/completions"]["post"]["requestBody"]["required"]
    assert MODEL not in json.dumps(found)
