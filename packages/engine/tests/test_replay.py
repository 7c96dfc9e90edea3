"""What a record says was done is done again with the same tokens, on an engine that promises that."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dagengine import LLM, DagError
from dagengine.replay import ReplayReport, find_records, replay
from dagengine_core_graph.query import cross, g, plus, repeat, retrieve, system


def engine(folder: Path, **options: Any) -> LLM:
    given = {"load_format": "dummy", "seed": 1, "page_size": 4, "kv_pages": 512, "dtype": "bfloat16"}
    return LLM(folder, device="cpu", **{**given, "batch_invariant": True, **options})


@pytest.fixture(scope="module")
def first(model_folder: Path) -> Iterator[LLM]:
    with engine(model_folder) as found:
        yield found


def again(folder: Path, records: Any, **options: Any) -> ReplayReport:
    """The report of another engine, which was told nothing but JSON; it is busy with other things meanwhile."""
    with engine(folder, **options) as llm:
        llm.prefill(["what is", "here already"])
        return replay(llm, find_records(json.loads(json.dumps(records))))


def record_of(result: Any) -> dict[str, Any]:
    return dict(result.dag.record)


def test_plain_answers_are_the_same_again(first: LLM, model_folder: Path) -> None:
    answers = first.generate(["one", "two"], max_tokens=12, temperature=1.0, logit_bias={65: 3.0})
    several = first.generate("three", max_tokens=12, n=3, temperature=0.9, seed=2**63 - 5)
    chat = first.chat([[{"role": "user", "content": "four"}]], max_tokens=5, temperature=0.0)
    report = again(model_folder, [record_of(answer) for answer in [*answers, *several, *chat]])
    assert report.exact and report.equal and len(report.answers) == 6 and not report.differences
    assert {len(answer.found) for answer in report.answers} <= {5, 12, *range(1, 12)}
    assert len({answer.found for answer in report.answers}) == 6


def test_what_reads_states_is_the_same_where_their_records_are_there(first: LLM, model_folder: Path) -> None:
    docs = first.generate(["doc one", "doc two"], max_tokens=9, temperature=1.0)
    judge = first.generate(
        "judge", context=[docs[0].artifact(), docs[1]], max_tokens=8, temperature=1.0, position="native"
    )
    records = [record_of(answer) for answer in (judge, *docs)]
    assert again(model_folder, records).equal
    with pytest.raises(DagError) as error:
        again(model_folder, records[:2])
    assert (error.value.code, error.value.field) == ("state_not_found", "records[0].inputs.context[1]")


def test_a_graph_is_the_same_again(first: LLM, model_folder: Path) -> None:
    with first.graph() as graph:
        x = graph.node("a document")
        y = graph.node("a draft", context=[x], max_tokens=7, temperature=1.0)
        graph.node("a verdict", context=[x.digest(), y.artifact("all")], max_tokens=7, temperature=0.7)
    report = again(model_folder, [record_of(result) for result in graph.results.values()])
    assert report.equal and len(report.answers) == 3


def test_a_query_is_the_same_again(first: LLM, model_folder: Path) -> None:
    draft = g(cross("draft", plus("a", "b")), max_tokens=6, temperature=1.0)
    query = g(
        cross(system("judge"), retrieve("shelf", "what?"), repeat(3, draft), "which?"),
        max_tokens=9,
        temperature=0.8,
    )
    found = first.query(query, retriever=lambda _: ["piece one", "piece two"], keep=False)
    report = again(model_folder, {"choices": [], "dag": {"record": found.record}})
    assert report.exact and report.equal and len(report.answers) == 4
    assert [answer.name for answer in report.answers][-1] == "g"


def test_a_difference_is_found_and_placed(first: LLM, model_folder: Path) -> None:
    record = record_of(first.generate("one", max_tokens=12, temperature=1.0, seed=3))
    wrong = json.loads(json.dumps(record))
    wrong["output"]["token_ids"][4] ^= 1
    report = again(model_folder, [wrong])
    assert not report.equal and report.answers[0].first_difference == 4
    other = json.loads(json.dumps(record))
    other["seed"] += 1
    assert not again(model_folder, [other]).equal
    short = json.loads(json.dumps(record))
    short["output"]["token_ids"].pop()
    assert again(model_folder, [short]).answers[0].first_difference == len(record["output"]["token_ids"]) - 1


@pytest.mark.parametrize("name", ["device", "versions", "implementation"])
@pytest.mark.parametrize("kind", ["request", "query"])
def test_equality_is_promised_on_the_same_device_versions_and_implementation_only(
    first: LLM, kind: str, name: str
) -> None:
    if kind == "query":
        asked = first.query(g("one", max_tokens=3), keep=False)
        record = json.loads(json.dumps(asked.record))
    else:
        record = json.loads(json.dumps(record_of(first.generate("one", max_tokens=3))))
    assert replay(first, [record]).exact
    record[name] = {"device": "cpu:1", "versions": {"dagengine": "0"}, "implementation": "other"}[name]
    report = replay(first, [record])
    assert not report.exact and report.equal
    assert [note.partition(":")[0] for note in report.differences] == [name]


def test_other_circumstances_are_told_and_another_model_is_refused(first: LLM, model_folder: Path) -> None:
    record = record_of(first.generate("one", max_tokens=3, temperature=0.0))
    report = again(model_folder, record, batch_invariant=False, page_size=8)
    assert not report.exact
    assert [note.partition(":")[0] for note in report.differences] == ["batch_invariant", "page_size"]
    with pytest.raises(DagError) as error:
        again(model_folder, record, seed=2)
    assert (error.value.code, error.value.field) == ("signature_mismatch", "records[0].signature.model")
    with pytest.raises(DagError):
        find_records({"choices": [{"text": "a"}]})


PLAIN = (
    "id",
    "index",
    "seed",
    "policy",
    "backend",
    "signature",
    "output",
    "inputs.context",
    "inputs.input_ids",
)
QUERY = ("calls", "calls.0.node", "calls.0.output.token_ids", "query", "policy", "max_tokens", "input_digest")


@pytest.mark.parametrize("value", ["gone", True, [[]]])
def test_a_malformed_record_is_refused_by_its_member(first: LLM, value: object) -> None:
    plain = record_of(first.generate("one", max_tokens=2))
    query = dict(first.query(g("two", max_tokens=2)).record)
    for record, names in ((plain, PLAIN), (query, QUERY)):
        for name in names:
            broken = holder = json.loads(json.dumps(record))
            *path, last = (int(part) if part.isdigit() else part for part in name.split("."))
            for part in path:
                holder = holder[part]
            if value == "gone":
                del holder[last]
            else:
                holder[last] = value
            if value == [[]] and last in ("token_ids", "input_ids", "context", "calls"):
                continue
            with pytest.raises(DagError) as error:
                replay(first, [broken])
            expected = "records[0]." + name.replace("calls.0", "calls[0]")
            assert (error.value.code, error.value.field) == ("invalid_request", expected)
    with pytest.raises(DagError, match="an object"):
        replay(first, [None])  # type: ignore[list-item]


def test_a_call_that_is_not_in_the_recorded_query_is_refused(first: LLM) -> None:
    record = json.loads(json.dumps(dict(first.query(g("two", max_tokens=2)).record)))
    record["calls"][0]["node"] = "another"
    with pytest.raises(DagError) as error:
        replay(first, [record])
    assert error.value.field == "records[0].calls[0].node"


@pytest.mark.parametrize("turn", [-1, 4, "1", True])
def test_a_turn_that_is_not_in_the_input_harms_no_other_request(first: LLM, turn: object) -> None:
    request = replace(first.request([1, 2, 3], None), turn_start=turn)
    with pytest.raises(DagError) as error:
        first.run([first.request([1], None), request])
    assert (error.value.code, error.value.field) == ("invalid_request", "turn_start")
