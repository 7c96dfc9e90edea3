"""Requests that do not end by themselves: who leaves, cancels, waits too long, or meets a dead engine."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from conftest import DEADLINE_S, Server, wait_until
from sockets import RawClient

from dagengine.fragments import FragmentStates
from dagengine_core_graph.query import cross, dump_query, g, plus

LONG = {"prompt": "the", "max_tokens": 400, "min_tokens": 400, "temperature": 0}


def finished(server: Server, reason: str) -> int:
    count: int = server.engine.call(lambda core: core.stats.finished[reason]).result(DEADLINE_S)
    return count


def slow(server: Server, seconds: float) -> Callable[[], None]:
    """Make every step of the engine take so much longer. Returns what undoes it."""

    def begin(core: Any) -> None:
        step = core.step

        def slowed() -> Any:
            time.sleep(seconds)
            return step()

        core.step = slowed

    def end(core: Any) -> None:
        del core.step

    server.engine.call(begin).result(DEADLINE_S)
    return lambda: server.engine.call(end).result(DEADLINE_S)


@pytest.fixture
def slowly(server: Server) -> Any:
    undo = slow(server, 0.005)
    yield
    undo()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("moment", ["headers", "body", "sent", "running", "answering"])
def test_a_client_that_leaves_cancels(server: Server, slowly: None, stream: bool, moment: str) -> None:
    body = {**LONG, "stream": stream, "dag": {"keep": {}}}
    before = finished(server, "cancelled"), finished(server, "length")
    client = RawClient(server.port)
    client.send("/v1/completions", body, part={"headers": 0.0, "body": 0.5}.get(moment, 1.0))
    if moment in ("running", "answering"):
        wait_until(lambda: server.engine.call(lambda core: core.num_running > 0).result(DEADLINE_S))
    if moment == "answering" and stream:
        client.read_until(b"data: ", 3)
    client.leave()
    server.settle()
    assert finished(server, "length") == before[1]
    assert finished(server, "cancelled") - before[0] in (
        (1,) if moment in ("running", "answering") else (0, 1)
    )
    assert server.http.get("/v1/states").json()["data"] == []
    assert server.complete()["choices"]


def test_a_client_that_leaves_a_graph_cancels_it(server: Server, slowly: None) -> None:
    nodes = [{"id": "a", "input": "the", "keep": {}}]
    nodes += [
        {
            "id": f"n{i}",
            "context": [{"node": "a"}],
            "input": "x",
            "keep": {},
            "generate": {"max_tokens": 100, "ignore_eos": True},
        }
        for i in range(4)
    ]
    client = RawClient(server.port)
    client.send("/v1/graphs", {"format": "dagengine.graph/v1", "stream": True, "nodes": nodes})
    client.read_until(b'"event":"delta"')
    before = finished(server, "cancelled")
    client.leave()
    wait_until(lambda: not server.engine.call(lambda core: core.has_work).result(DEADLINE_S))
    assert finished(server, "cancelled") - before == 4
    kept = server.http.get("/v1/states").json()["data"]
    assert len(kept) == 1, "the node that the client was told of stays"


def test_cancel_by_id(server: Server, slowly: None) -> None:
    with server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        request_id = answer.headers["x-request-id"]
        lines = answer.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["id"] == request_id
        cancel = f"/v1/requests/{request_id}/cancel"
        assert server.http.post(cancel).json() == {"id": request_id, "object": "request", "cancelled": True}
        rest = [line for line in lines if line]
    assert rest[-2] == "event: error"
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "cancelled"
    for _ in range(3):
        assert server.http.post(cancel).json()["cancelled"] is False
    assert server.http.post("/v1/requests/req-unknown/cancel").json()["cancelled"] is False


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
def test_a_query_that_ends_while_its_requests_are_made_leaves_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch, stream: bool, leaves: bool
) -> None:
    looks, go_on, find = threading.Event(), threading.Event(), FragmentStates.find

    def slowly(*args: Any) -> Any:
        looks.set()
        assert go_on.wait(DEADLINE_S)
        return find(*args)

    monkeypatch.setattr(FragmentStates, "find", slowly)
    query = dump_query(g(cross(plus("the", "a"), "which?"), max_tokens=200, options={"ignore_eos": True}))
    before = finished(server, "length")
    client = RawClient(server.port)
    client.send(f"/v1/query/execute?stream={str(stream).lower()}", query)
    assert looks.wait(DEADLINE_S)
    service = server.app.state.service
    if leaves:
        client.leave()
    else:
        (request_id,) = service._submissions
        assert server.http.post(f"/v1/requests/{request_id}/cancel").json()["cancelled"]
    go_on.set()
    wait_until(lambda: not service._submissions)
    if not leaves:
        client.leave()
    wait_until(lambda: not server.engine.call(lambda core: core.has_work).result(DEADLINE_S))
    server.release_all()  # fragments that ended before are kept
    server.settle()
    assert finished(server, "length") == before


def test_a_cancelled_whole_answer_is_an_error(server: Server, slowly: None) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(httpx.post, f"{server.url}/v1/completions", json=LONG, timeout=DEADLINE_S)
        service = server.app.state.service
        wait_until(lambda: service._submissions)
        request_id = next(iter(service._submissions))
        wait_until(lambda: server.engine.call(lambda core: core.num_running > 0).result(DEADLINE_S))
        assert server.http.post(f"/v1/requests/{request_id}/cancel").json()["cancelled"]
        answer = waiting.result(DEADLINE_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (499, "cancelled")


@pytest.mark.parametrize("stream", [False, True])
def test_requests_time_out(start: Callable[..., Server], stream: bool) -> None:
    server = start(request_timeout_s=0.3)
    slow(server, 0.02)
    answer = server.post("/v1/completions", {**LONG, "stream": stream})
    if stream:
        assert answer.status_code == 200 and '"code":"timeout"' in answer.text
        assert answer.text.endswith("\n\n") and "[DONE]" not in answer.text
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
    server.settle()


def test_a_silent_stream_is_kept_open(server: Server) -> None:
    undo = slow(server, 0.5)
    try:
        with server.http.stream(
            "POST", "/v1/completions", json={**LONG, "max_tokens": 2, "min_tokens": 2, "stream": True}
        ) as answer:
            lines = list(answer.iter_lines())
    finally:
        undo()
    assert ": ping" in lines and lines.index(": ping") < lines.index("data: [DONE]")


def test_a_full_queue_is_429(start: Callable[..., Server]) -> None:
    server = start({"max_num_seqs": 1, "max_waiting": 1}, retry_after_s=7)
    slow(server, 0.01)
    clients = [RawClient(server.port) for _ in range(2)]
    clients[0].send("/v1/completions", LONG)
    wait_until(lambda: server.engine.call(lambda core: core.num_running == 1).result(DEADLINE_S))
    clients[1].send("/v1/completions", LONG)
    wait_until(lambda: server.engine.call(lambda core: core.num_waiting == 1).result(DEADLINE_S))
    for stream in (False, True):
        answer = server.post("/v1/completions", {**LONG, "stream": stream})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert answer.headers["retry-after"] == "7"
    for client in clients:
        client.leave()
    server.settle()
    assert server.complete()["choices"]


def test_too_many_open_requests_are_429(start: Callable[..., Server]) -> None:
    server = start(max_open_requests=1)
    slow(server, 0.01)
    client = RawClient(server.port)
    client.send("/v1/completions", LONG)
    wait_until(lambda: server.app.state.service.open_requests == 1)
    answer = server.post("/v1/completions", LONG)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert server.http.get("/v1/models").status_code == 200
    client.leave()
    server.settle()


def test_mixed_requests_at_once_with_random_cancels(server: Server) -> None:
    """Whoever is not cancelled gets exactly what it gets alone."""
    chance = random.Random(5)
    state = server.prefill([1, 2, 3, 4, 5, 6])
    jobs = []
    for index in range(24):
        body: dict[str, Any] = {
            "prompt": [index + 1] * chance.randint(1, 30),
            "max_tokens": chance.randint(1, 24),
        }
        body |= {"seed": index, "temperature": chance.choice([0, 1.0]), "stream": chance.random() < 0.5}
        if chance.random() < 0.4:
            body["dag"] = {"context": [{"state": state}], "keep": {"ttl_s": 60}}
        jobs.append((body, chance.random() < 0.25, chance.random() * 0.1))
    alone = [_text(server, body) for body, _, _ in jobs]

    def run(job: tuple[dict[str, Any], bool, float]) -> str | None:
        body, leaves, delay = job
        if not leaves:
            return _text(server, body)
        client = RawClient(server.port)
        client.send("/v1/completions", body)
        time.sleep(delay)
        client.leave()
        return None

    with ThreadPoolExecutor(20) as pool:
        together = list(pool.map(run, jobs))
    for expected, found in zip(alone, together, strict=True):
        assert found is None or found == expected
    assert any(found is None for found in together) and any(found for found in together)


def _text(server: Server, body: dict[str, Any]) -> str:
    with httpx.Client(base_url=server.url, timeout=DEADLINE_S) as http:
        answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not body["stream"]:
        return str(answer.json()["choices"][0]["text"])
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_engine_is_told_to_everybody(start: Callable[..., Server]) -> None:
    server = start()
    slow(server, 0.01)
    client = RawClient(server.port)
    client.send("/v1/completions", {**LONG, "stream": True})
    client.read_until(b"data: ", 2)

    def die(core: Any) -> None:
        def step() -> None:
            raise SystemExit("broken")

        core.step = step

    server.engine.call(die).result(DEADLINE_S)
    assert b'"code":"engine_dead"' in client.read_until(b"event: error")
    wait_until(lambda: server.engine.dead is not None)
    for path in ("/health", "/health/ready"):
        answer = server.http.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
    for stream in (False, True):
        answer = server.post("/v1/completions", {**LONG, "stream": stream})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
        assert "broken" not in answer.text
    assert server.http.get("/v1/states").status_code in (200, 503)
    assert "dagengine_engine_last_step_timestamp" in server.http.get("/metrics").text


def test_a_hanging_engine_is_unhealthy(start: Callable[..., Server]) -> None:
    server = start(heartbeat_timeout_s=0.7, request_timeout_s=0.3)
    assert server.http.get("/health").status_code == 200
    go_on = threading.Event()
    server.engine.call(lambda core: go_on.wait(DEADLINE_S))
    wait_until(lambda: server.http.get("/health").status_code == 503)
    assert server.http.get("/health/ready").status_code == 503
    assert server.post("/v1/completions", LONG).status_code == 504
    assert server.post("/v1/query/execute", dump_query(g("which?", max_tokens=2))).status_code == 504
    go_on.set()
    wait_until(lambda: server.http.get("/health").status_code == 200)
    server.settle()


def test_a_step_that_fails_is_a_500_without_details(start: Callable[..., Server]) -> None:
    server = start()

    def fail_once(core: Any) -> None:
        def step() -> Any:
            del core.step
            raise ValueError("secret detail")

        core.step = step

    server.engine.call(fail_once).result(DEADLINE_S)
    answer = server.post("/v1/completions", LONG)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
    assert "secret" not in answer.text and "ValueError" not in answer.text
    assert server.complete()["choices"]
