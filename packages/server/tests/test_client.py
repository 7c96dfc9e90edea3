"""The client against a real server: the names of `LLM`, and errors with the server's code and field."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import Server

from dagengine import DagError, Keep
from dagengine_server.client import Client

GREEDY = {"max_tokens": 5, "temperature": 0}


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url, timeout=30.0) as client:
        yield client


def test_a_judge_reads_two_answers_over_shared_documents(client: Client) -> None:
    docs = client.prefill(["the first one", "another one in the"])
    assert [len(doc) for doc in docs] == [doc.describe()["tokens"] for doc in docs]
    a, b = client.generate(["in the", "on the"], context=docs, **GREEDY)
    assert a.usage.cached_tokens == sum(map(len, docs)) == a.dag["tokens"]["visible"]
    assert len(a.token_ids) <= 5 and a.finish_reason in ("stop", "length")
    judge = client.generate("the", context=[a.artifact(), b.artifact("all"), docs[0]], **GREEDY)
    assert judge.dag["tokens"]["visible"] == len(a.token_ids) + len(b.state) + len(docs[0])
    again = client.generate("the", context=[a.artifact(), b.artifact("all"), docs[0].id], **GREEDY)
    assert again.text == judge.text


def test_a_states_length_counts_what_ended_the_answer(client: Client) -> None:
    whole = client.generate("the", **GREEDY)
    stopped = client.generate("the", stop_token_ids=[whole.token_ids[2]], **GREEDY)
    shown = stopped.state.spans["output"][1]
    assert len(stopped.state) == shown + 1 == stopped.state.describe()["tokens"]
    assert len(stopped.state.fork(shown)) == shown


def test_generate_says_what_the_plain_endpoint_says(server: Server, client: Client) -> None:
    plain = server.complete(prompt="the first", max_tokens=5, return_token_ids=True)["choices"][0]
    answer = client.generate("the first", **GREEDY)
    assert (answer.text, list(answer.token_ids)) == (plain["text"], plain["token_ids"])


def test_messages_go_to_the_chat_endpoint(client: Client) -> None:
    chat = [{"role": "user", "content": "the first"}]
    one = client.chat(chat, logprobs=2, **GREEDY)
    both = client.chat([chat, chat], **GREEDY)
    assert [answer.text for answer in both] == [one.text, one.text]
    assert len(one.logprobs["content"][0]["top_logprobs"]) == 2
    assert "turn" in one.state.spans


def test_n_answers_come_as_a_list(client: Client) -> None:
    answers = client.generate("the", n=3, seed=1, max_tokens=3)
    assert len(answers) == 3 and len({answer.state.id for answer in answers}) == 3


def test_token_ids_are_taken_as_they_are(client: Client) -> None:
    state = client.prefill([5, 6, 7])
    assert len(state) == 3
    assert [len(found) for found in client.prefill([[5, 6], [7]])] == [2, 1]


def test_a_fork_is_cut_and_released_by_itself(client: Client) -> None:
    with client.prefill([5, 6, 7, 8]) as state:
        fork = state.fork(2)
        assert len(fork) == 2 and fork.spans["prompt"] == (0, 2)
        fork.retain(5.0)
        fork.release()
        fork.release()
        assert [listed.id for listed in client.states()] == [state.id]
    with pytest.raises(DagError) as caught:
        client.generate("the", context=[state], max_tokens=1)
    assert (caught.value.code, caught.value.field) == ("state_released", "dag.context[0].state")


def test_what_is_kept_ends_unless_asked_otherwise(server: Server) -> None:
    with Client(server.url, ttl_s=50.0) as client:
        assert 0 < client.prefill("the").describe()["expires_s"] <= 50
        assert client.prefill("the", keep=Keep(name="plan")).describe()["expires_s"] is None
        assert client.generate("the", keep=False, **GREEDY).state is None


def test_a_graph_runs_at_once(client: Client) -> None:
    rules = client.prefill("the first")
    with client.graph() as graph:
        x = graph.node("the", context=[rules])
        y = graph.node("in", context=[x], **GREEDY)
        z = graph.node("on", context=[y.artifact(), x.digest()], position="native", **GREEDY)
    assert graph.results[x].finish_reason == "prefill"
    assert graph.results[y].dag["tokens"]["visible"] == len(rules) + len(graph.results[x].state)
    assert graph.results[z].dag["position"]["policy"] == "native"
    assert client.generate("a", context=[graph.results[y]], **GREEDY).usage.cached_tokens > 0


def test_a_node_that_fails_takes_its_dependents_along_and_no_others(client: Client) -> None:
    with client.graph(raise_errors=False) as graph:
        good = graph.node("the", **GREEDY)
        bad = graph.node("the", context=[good.artifact((0, 99))])
        child = graph.node("the", context=[bad])
    assert list(graph.results) == [good]
    assert {node: error.code for node, error in graph.errors.items()} == {
        bad: "span_out_of_range",
        child: "parent_failed",
    }
    with pytest.raises(DagError, match="span_out_of_range"), client.graph() as again:
        again.node("the", context=[again.node("the").artifact((0, 99))])


def test_explain_counts_what_is_there(client: Client) -> None:
    state = client.prefill("the first one")
    found = client.explain("in the", context=[state.inherit(), state.id], max_tokens=4)
    assert found.num_visible == found.reused == len(state)
    assert found.visible == ((state.id, 0, len(state)),)
    with pytest.raises(DagError) as caught:
        client.explain(context=["st_none"])
    assert caught.value.code == "state_not_found"


def test_errors_carry_the_servers_code_and_field(client: Client) -> None:
    with pytest.raises(DagError) as caught:
        client.generate("the", temperature=-1)
    assert (caught.value.code, caught.value.field) == ("invalid_request", "temperature")
    with pytest.raises(DagError) as caught:
        client.generate(["the", "in"], context=[3], max_tokens=1)  # type: ignore[list-item]
    assert (caught.value.code, caught.value.field) == ("invalid_request", "context[0]")
    with pytest.raises(DagError) as caught:
        client.generate("the", not_an_option=1)
    assert caught.value.field == "not_an_option"


def test_a_failed_list_keeps_nothing(client: Client) -> None:
    with pytest.raises(DagError):
        client.prefill(["the", []])
    assert client.states() == []


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"prompts": None}, "prompts"),
        ({"prompts": 5}, "prompts"),
        ({"prompts": {"a": 1}}, "prompts"),
        ({"prompts": b"the"}, "prompts"),
        ({"prompts": ["the", 5]}, "prompts"),
        ({"context": 5}, "context"),
        ({"context": [5]}, "context[0]"),
        ({"keep": "yes"}, "keep"),
        ({"position_options": [1]}, "position_options"),
        ({"stream": True}, "stream"),
        ({"temperature": float("nan")}, None),
        ({"temperature": float("inf")}, None),
        ({"prompts": "\ud800"}, None),
        ({"max_tokens": 10**5000}, None),
        ({"stop": {"a"}}, None),
        ({"stop": object()}, None),
    ],
    ids=lambda value: value if value is None or isinstance(value, str) else next(iter(value)),
)
def test_what_cannot_be_sent_is_refused_and_keeps_nothing(
    client: Client, options: dict[str, Any], field: str | None
) -> None:
    with pytest.raises(DagError) as refused:
        client.generate(**{"prompts": "the", "max_tokens": 2, **options})
    assert refused.value.code in ("invalid_request", "unsupported")
    assert refused.value.field == field
    assert client.states() == []


@pytest.mark.parametrize("document", [None, [], "x", 5])
def test_a_document_is_a_mapping(client: Client, document: Any) -> None:
    for call in (client.run_graph, client.compile):
        with pytest.raises(DagError) as refused:
            call(document)
        assert (refused.value.code, refused.value.field) == ("invalid_request", "document")


def test_a_closed_client_says_so(server: Server) -> None:
    client = Client(server.url)
    client.close()
    with pytest.raises(DagError) as refused:
        client.states()
    assert refused.value.code == "connection_failed"


def test_keys_and_salts_keep_states_apart(start: Callable[..., Server]) -> None:
    url = start(api_keys=("one", "two")).url
    with Client(url, "one") as one, Client(url, "two") as two, Client(url, "one", cache_salt="s") as salted:
        state = one.prefill("the")
        assert [s.id for s in one.states()] == [state.id]
        assert two.states() == salted.states() == []
        for other in (two, salted):
            with pytest.raises(DagError) as caught:
                other.generate("the", context=[state.id], max_tokens=1)
            assert caught.value.code == "state_not_found"
    with Client(url, "three") as nobody, pytest.raises(DagError) as caught:
        nobody.states()
    assert caught.value.code == "invalid_api_key"


def test_a_server_that_is_not_there_is_said_so() -> None:
    with Client("http://127.0.0.1:9", timeout=2.0) as client, pytest.raises(DagError) as caught:
        client.states()
    assert caught.value.code == "connection_failed"
    assert "127.0.0.1:9" in caught.value.message
