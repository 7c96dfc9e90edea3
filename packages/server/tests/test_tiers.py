"""Offload and prefetch over HTTP and by the client; tiers where states are described, and in the metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import Server, wait_until
from prometheus_client.parser import text_string_to_metric_families

from dagengine import DagError
from dagengine_server.client import Client

GIB = {"cpu_kv_gib": 1 / 1024}
TOKENS = list(range(1, 18))
PAGES = 5


@pytest.fixture
def tiers(start: Callable[..., Server]) -> Server:
    return start(engine=GIB)


def describe(server: Server, state: str) -> dict[str, Any]:
    found: dict[str, Any] = server.http.get(f"/v1/states/{state}").json()
    return found


def offload(server: Server, state: str) -> None:
    answer = server.http.post(f"/v1/states/{state}/offload")
    assert (answer.status_code, answer.json()["id"]) == (202, state)
    wait_until(lambda: describe(server, state)["tier"] == "host")


def overwrite(server: Server) -> None:
    """Use every page of the pool for something else, once."""
    for seed in (2, 3):
        filler = server.prefill([1 + (seed * index * index + index) % 250 for index in range(400)])
        server.http.delete(f"/v1/states/{filler}")


def metrics(server: Server) -> dict[str, float]:
    text = server.http.get("/metrics").text
    return {
        sample.name + "".join(f"|{key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_an_offloaded_state_is_read_as_if_it_had_not_been(tiers: Server) -> None:
    state = tiers.prefill(TOKENS)
    before = describe(tiers, state)
    assert (before["tier"], before["pages"], before["host_pages"]) == ("device", PAGES, 0)
    ask = {"prompt": [3], "max_tokens": 6, "return_token_ids": True, "dag": {"context": [{"state": state}]}}
    expected = tiers.complete(**ask)
    offload(tiers, state)
    after = describe(tiers, state)
    assert (after["pages"], after["host_pages"]) == (0, PAGES)
    (listed,) = tiers.http.get("/v1/states").json()["data"]
    assert (listed["tier"], listed["host_pages"]) == ("host", PAGES)
    for name in ("id", "tokens", "spans", "signature", "layout", "own_start", "holders"):
        assert after[name] == before[name]
    overwrite(tiers)
    found = tiers.complete(**ask)
    assert found["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
    counts = found["dag"]["tokens"]
    assert counts["reloaded"] == len(TOKENS) and counts["computed"] == 1
    assert counts["reused"] == len(TOKENS) == found["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert describe(tiers, state)["tier"] == "device"


def test_a_state_is_brought_back_before_it_is_read(tiers: Server) -> None:
    parent = tiers.prefill(TOKENS)
    child = tiers.prefill([5, 6], context=[{"state": parent}])
    for state in (parent, child):
        offload(tiers, state)
    answer = tiers.http.post(f"/v1/states/{child}/prefetch")
    assert answer.status_code == 202
    for state in (parent, child):
        wait_until(lambda state=state: describe(tiers, state)["tier"] == "device")


def test_the_clients_states_move_too(tiers: Server) -> None:
    with Client(tiers.url, timeout=30.0, cache_salt="mine") as client:
        state = client.prefill(TOKENS)
        state.offload()
        wait_until(lambda: state.describe()["tier"] == "host")
        state.prefetch()
        wait_until(lambda: state.describe()["tier"] == "device")
    other = tiers.http.post(f"/v1/states/{state.id}/offload")
    assert (other.status_code, other.json()["error"]["code"]) == (404, "state_not_found")


def test_metrics_tell_both_tiers(tiers: Server) -> None:
    state = tiers.prefill(TOKENS)
    before = metrics(tiers)
    offload(tiers, state)
    middle = metrics(tiers)
    tiers.complete(dag={"context": [{"state": state}]})
    after = metrics(tiers)
    host = [f"dagengine_kv_pages|status={name}|tier=host" for name in ("free", "live", "moving")]
    device = [
        f"dagengine_kv_pages|status={name}|tier=device"
        for name in ("free", "cached", "live", "waiting", "moving")
    ]
    for found in (before, middle, after):
        assert sum(found[name] for name in device) == 160
        assert sum(found[name] for name in host) == sum(before[name] for name in host) > PAGES
    assert (before["dagengine_dag_states|tier=device"], middle["dagengine_dag_states|tier=host"]) == (1, 1)
    assert middle[host[1]] == PAGES
    page_bytes = tiers.engine.call(lambda core: core.host_tier.page_bytes).result(30)
    assert middle["dagengine_kv_transfer_bytes_total|dir=store"] == PAGES * page_bytes
    assert middle["dagengine_kv_transfers_total|dir=store|status=started"] == 1
    assert middle["dagengine_state_offloads_total"] == 1
    assert after["dagengine_kv_tickets|status=in_flight"] == 0
    assert after["dagengine_prefix_cache_hits_total"] == len(TOKENS)


@pytest.mark.parametrize("move", ["offload", "prefetch"])
def test_refusals(server: Server, tiers: Server, move: str) -> None:
    def refusal(of: Server, state: str, **body: Any) -> tuple[int, str, str]:
        answer = of.post(f"/v1/states/{state}/{move}", body)
        error = answer.json()["error"]
        return answer.status_code, error["code"], error["param"]

    assert refusal(server, server.prefill(TOKENS)) == (400, "unsupported", "state")
    assert refusal(tiers, "st_no") == (404, "state_not_found", "state")
    state = tiers.prefill(TOKENS)
    assert refusal(tiers, state, to="disk")[:2] == (400, "invalid_request")
    assert refusal(tiers, state, cache_salt="another") == (404, "state_not_found", "state")
    tiers.http.delete(f"/v1/states/{state}")
    assert refusal(tiers, state) == (410, "state_released", "state")


def test_a_host_that_has_no_room_says_so(start: Callable[..., Server]) -> None:
    tiers = start(engine={"cpu_kv_gib": 20 / 2**20})
    state = tiers.prefill([1 + index % 250 for index in range(400)])
    answer = tiers.http.post(f"/v1/states/{state}/offload")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "capacity")
    with Client(tiers.url, timeout=30.0) as client, pytest.raises(DagError, match="capacity"):
        client.states()[0].offload()
