"""`dagengine bench` rag and nested through an endpoint, and bulk: figures are computed from what ran. Not how fast."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Server

from dagengine import DagError
from dagengine.shapes import shape_config, write_config
from dagengine_server.cli import main
from dagengine_server.cli.bench import bulk_runs, nested
from dagengine_server.cli.bench.endpoint import Endpoint, Reply
from dagengine_server.cli.bench.evidence import read_evidence
from dagengine_server.cli.bench.local_server import local_server
from dagengine_server.cli.bench.nested_queries import NestedQueries, Run
from dagengine_server.cli.bench.overlap import neighbours
from dagengine_server.cli.bench.rag_queries import Question, hit_rate
from dagengine_server.cli.bench.record import Figure
from dagengine_server.cli.bench.texts import Texts
from dagengine_server.cli.bench.words import write_tokenizer
from dagengine_server.cli.console import CommandError

TINY = ["--shape", "tiny", "--device", "cpu", "--threads", "1", "--page-size", "16"]
FIGURE = tuple(Figure.__dataclass_fields__)
Rows = dict[tuple[str, str | None], dict[str, Any]]


def measure(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["bench", *arguments, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def by_metric(rows: Sequence[dict[str, Any]], case: str = "") -> Rows:
    found = {(row["metric"], row["baseline"]): row for row in rows if case in row["case"]}
    assert found
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["bench", *arguments]) == 1
    return " ".join(capsys.readouterr().err.split())


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = shape_config("tiny")
    folder = write_config(tmp_path_factory.mktemp("shape") / "tiny", config)
    write_tokenizer(folder, config)
    return folder


@pytest.fixture
def small(tiny_folder: Path) -> Iterator[Endpoint]:
    """A server whose pool holds one prompt of three documents and little else."""
    options = {
        "device": "cpu",
        "load_format": "dummy",
        "seed": 0,
        "threads": 1,
        "page_size": 16,
        "kv_pages": 28,
    }
    with local_server(str(tiny_folder), options) as (url, _), Endpoint(url) as endpoint:
        yield endpoint


def test_rag_through_an_endpoint_tells_what_each_query_found(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--documents", "3", "--tokens", "40", "--question", "9", "--answer", "3"]
    runs = ["--repeats", "3", "--slow-repeats", "2"]
    found = by_metric(measure(capsys, "rag", *TINY, "--endpoint", "local", *sizes, *runs), "3 documents x 40")
    cached = found["first token, span query, cached, new order", "plain prompt in a new order"]
    assert cached["n"] == 3 and cached["ratio"] == pytest.approx(cached["value"] / cached["baseline_value"])
    assert cached["baseline_value"] == found["first token, plain prompt, new order", None]["value"]
    assert found["first token, span query, cold", None]["n"] == 2
    for way, hits, overlap in (("cached, new order", 1.0, 1.0), ("cold", 0.0, 0.0)):
        assert found[f"span hit rate, {way}", None]["value"] == hits
        assert found[f"fragment overlap with the query before, {way}", None]["value"] == overlap
        assert found[f"judge's input, {way}", None]["value"] == 2 + 16 + 3 * 41 + 9
        assert found[f"fragment length, {way}", None]["value"] == 40
        assert found[f"padding, {way}", None]["value"] == found[f"cropping, {way}", None]["value"] == 0
        assert found[f"planning, {way}", None]["value"] > 0
    for name in ("span query, cached, new order", "span query, cold", "plain prompt, again"):
        metric = f"first token, {name}"
        row = next(row for (told, _), row in found.items() if told == metric)
        assert 0 < found[f"in the engine: {metric}", None]["value"] < row["value"]
    assert found["TPOT, span query, cached", "plain prompt in a new order"]["n"] == 3
    (mark,) = [row for (metric, _), row in found.items() if metric == "sooner than a plain prompt, cached"]
    assert mark["baseline"].startswith("published, arXiv:2511.02749") and mark["baseline_value"] == 20
    assert mark["value"] == pytest.approx(1 / cached["ratio"])


def test_a_hit_that_was_lost_shows_in_the_rate(small: Endpoint) -> None:
    texts = Texts(small.count, small.count_chat, 0)
    documents = [texts.text(40) for _ in range(3)]

    def ask(order: Sequence[str]) -> float:
        return hit_rate(small.query(Question("a b", order, texts.text(9)).query(1), "spans"))

    assert ask(documents) == 0.0
    assert ask(documents[::-1]) == 1.0
    plain = Question("a b", [texts.text(40) for _ in range(7)], "a")
    small.chat(plain.messages, "plain", max_tokens=1)
    assert 0.0 <= ask(documents) < 1.0


def test_a_server_of_its_own_says_why_it_does_not_start_and_leaves_no_process(tiny_folder: Path) -> None:
    options = {"device": "cpu", "load_format": "dummy", "attention_backend": "no such"}
    with pytest.raises(DagError) as error, local_server(str(tiny_folder), options):
        pass
    assert "no such" in error.value.message and not multiprocessing.active_children()


def test_a_name_that_is_released_knows_nothing_more(server: Server) -> None:
    with Endpoint(server.url) as endpoint:
        texts = Texts(endpoint.count, endpoint.count_chat, 0)
        question = Question("a", [texts.text(30), texts.text(30)], "the a")
        endpoint.prepare(question.query(1), "one")
        assert hit_rate(endpoint.query(question.query(1), "one")) == 1.0
        assert hit_rate(endpoint.query(question.query(1), "two")) == 0.0
        assert server.http.get("/v1/states", params={"cache_salt": endpoint.salt("one")}).json()["data"]
        endpoint.release("one")
        assert not server.http.get("/v1/states", params={"cache_salt": endpoint.salt("one")}).json()["data"]


def test_nested_through_an_endpoint_judges_all_that_was_generated(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--fan-out", "3", "--length", "8", "--prompt", "20", "--question", "5", "--answer", "2"]
    heats = ["--temperature", "0", "--temperature", "1"]
    rows = measure(capsys, "nested", *TINY, "--endpoint", "local", *sizes, *heats, "--repeats", "2")
    hot, cold = (by_metric(rows, f"question 5, temperature {heat}, through") for heat in (1, 0))
    seen = 2 + 20 + 3 * 9 + 5
    assert hot["judge's input, span query", "prefix reuse"]["value"] == seen
    assert hot["judge's input, prefix reuse", None]["value"] == seen
    assert hot["judge's tokens computed, span query", "prefix reuse"]["value"] == 5
    assert hot["judge's tokens computed, prefix reuse", None]["value"] == seen - 16, "the pages of the prompt"
    assert hot["judge's input that was there, span query", "prefix reuse"]["value"] == 1 - 5 / seen
    assert hot["candidate diversity, span query", "prefix reuse"]["value"] == 1.0
    assert hot["padding", None]["value"] == hot["cropping", None]["value"] == 0
    assert hot["candidate length, span query", "prefix reuse"]["n"] == 6
    again = cold["judge's tokens computed, prefix reuse", None]
    assert again["value"] < seen - 16, "greedy candidates are the same again, and so is the prompt"
    assert cold["candidate diversity, prefix reuse", None]["value"] == pytest.approx(1 / 3)
    first = hot["judge's first token, span query", "prefix reuse"]
    whole = hot["query sent to the judge's first token, span query", "prefix reuse"]
    inner = hot["candidates generated, span query", "prefix reuse"]
    assert whole["value"] > inner["value"] > 0 and first["p50"] <= first["p95"] <= first["p99"]
    assert first["value"] > 0 and whole["value"] == pytest.approx(inner["value"] + first["value"])
    harder = hot["judge's first token with all before the candidates, span query", "prefix reuse"]
    submitting = hot["submitting", None]["value"]
    assert submitting >= hot["planning", None]["value"] + hot["tokenizing", None]["value"]
    assert harder["value"] == pytest.approx(first["value"] + submitting)
    assert harder["baseline_value"] == first["baseline_value"]


def test_a_judges_first_token_counts_from_the_last_candidate() -> None:
    judge = Reply(begin=10.0, sampled=[11.5, 11.75], tokens=3)
    judge.timing = {"submit": 250.0, "plan": 100.0, "tokenize": 50.0}
    judge.dag = {"timing_ms": {"waited": 1000.0, "first_token": 1125.0}}
    calls = [{"output": {"token_ids": ids}} for ids in ([1, 2], [3], [4])]
    judge.record = {"calls": calls}
    run = Run.of_query(judge)
    assert (run.submit, run.inner, run.first, run.whole) == (0.25, 1.25, 0.25, 1.75)
    assert run.candidates == [(1, 2), (3,)] and run.lengths == [2, 1], "the judge is none of them"


def test_tokens_that_a_judge_did_not_see_are_cropped_ones() -> None:
    class Counts:
        def count_chat(self, messages: object, *, generate: bool = True) -> int:
            return 31 if generate else 30

    class Judge:
        seen = 31 + 2 * (1 + 8) - 3

    runs = object.__new__(NestedQueries)
    runs._endpoint, runs._prompt, runs._question = Counts(), "a", "b"  # type: ignore[assignment]
    assert runs._extra(Run(Judge(), 0.0, 0.0, 0.0, ["x", "y"], [8, 8])) == -3  # type: ignore[arg-type]


def test_nested_sweeps_temperatures_at_two_fan_outs_and_fan_outs_at_one_temperature() -> None:
    swept = nested.points(None, None)
    assert len(swept) == len(set(swept)) == 2 * 7 + 4
    assert {fan for fan, heat in swept if heat == 1.5} == {1, 24}
    assert nested.points([2], None) == [(2, 0.5)] and nested.points(None, [1.0])[0] == (1, 1.0)


def test_an_endpoint_that_runs_is_driven_with_its_own_tokenizer(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--documents 2 --tokens 20 --question 24 --repeats 1 --slow-repeats 1".split()
    found = by_metric(measure(capsys, "rag", "--endpoint", server.url, *sizes, "--answer", "1"))
    assert found["span hit rate, cached, new order", None]["value"] == 1.0
    assert found["padding, cached, new order", None]["value"] == 0
    assert ("TPOT, span query, cached", "plain prompt in a new order") not in found, "one token has none"


BULK = [*TINY, "--queries", "12", "--fragments", "4", "--tokens", "20", "--question", "6", "--window", "4"]


def test_bulk_counts_what_was_shared(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--bulk", "1", "--bulk", "all", "--fragment-overlap", "0.37", "--fragment-overlap", "0.5"]
    rows = measure(capsys, "bulk", *BULK, *options, "--pool-share", "4")
    again = round(0.5 * 4 * 11)
    for size in ("1", "all"):
        found = by_metric(rows, f"4 fragments x 20, question 6, overlap 0.5, bulk {size},")
        assert found["fragment overlap", None]["value"] == pytest.approx(again / 48)
        read, different = 12 * 18 + 48 * 21, 18 + (48 - again) * 21
        hits = found["span hit rate, span queries", None]["value"]
        assert hits == pytest.approx(1 - different / read), "all that is read again is found"
        rate = found["throughput, span queries", "plain prompts, prefix caching"]
        assert rate["ratio"] == pytest.approx(rate["value"] / rate["baseline_value"])
        seen = 18 + 4 * 21 + 6
        assert found["judge's input, span queries", "plain prompts, prefix caching"]["value"] == seen
        plain = found["input that was there, plain prompts, prefix caching", None]["value"]
        assert plain < found["input that was there, span queries", "plain prompts, prefix caching"]["value"]
        assert found["padding", None]["value"] == found["cropping", None]["value"] == 0
        assert found["fan-out", None]["n"] == 12 and found["fragment length", None]["n"] == 48 - again
    marks = {
        (row["case"].partition("overlap ")[2].partition(", 12 questions")[0], row["metric"]): row
        for row in rows
        if "2Wiki" in (row["baseline"] or "")
    }
    sooner = "mean first token since the bulk was given, sooner than of plain prompts"
    names = ["throughput against plain prompts", sooner]
    assert list(marks) == [(f"0.37, bulk {size}", name) for size in ("1", "all") for name in names]
    assert [row["baseline_value"] for row in marks.values()] == [1.21, 1.21, 1.59, 1.59]
    for size in ("1", "all"):
        mean = by_metric(rows, f"overlap 0.37, bulk {size},")[
            f"{bulk_runs.MEAN}, span queries", bulk_runs.PLAIN
        ]
        assert marks[f"0.37, bulk {size}", sooner]["value"] == pytest.approx(1 / mean["ratio"])


def test_what_waits_in_a_bulk_counts_in_its_first_token(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--bulk", "1", "--bulk", "all", "--fragment-overlap", "0.5"]
    rows = measure(capsys, "bulk", *BULK, *sizes)
    for size in ("1", "all"):
        found = by_metric(rows, f"overlap 0.5, bulk {size},")
        for way, baseline in (("span queries", bulk_runs.PLAIN), (bulk_runs.PLAIN, None)):
            given = found[f"first token since the bulk was given, {way}", baseline]
            own = found[f"first token, {way}", baseline]
            mean = found[f"mean first token since the bulk was given, {way}", baseline]
            assert (given["n"], own["n"], mean["n"]) == (12, 12, 1)
            alone = size == "1" and way == bulk_runs.PLAIN
            assert all(given[name] >= own[name] for name in ("p50", "p95", "p99"))
            assert alone is (given["p50"] == own["p50"]), "a bulk is given before its parts run"
            if size == "all" and way == bulk_runs.PLAIN:
                assert given["p50"] > 1.2 * own["p50"], "of twelve, eight waited for a place"
            each_ms = 1e3 / found[f"throughput, {way}", baseline]["value"]
            assert mean["value"] <= each_ms * (12 if size == "all" else 1)


def test_each_bar_of_a_bulk_finds_the_figure_that_it_names(capsys: pytest.CaptureFixture[str]) -> None:
    rows = measure(capsys, "bulk", *BULK, "--bulk", "all", "--fragment-overlap", "0.37")
    said = "llama-3.1-8b, 10 fragments x 100, question 32, overlap 0.37, bulk all, 256 questions"
    figures = [Figure(**{name: row[name] for name in FIGURE} | {"case": said}) for row in rows]
    found = {bar.title: bar.find(figures) for bar in bulk_runs.BARS}
    assert len(found) == len(bulk_runs.BARS) == 12, "no two are called the same"
    rate, first = (found[f"2Wiki-like, bulk all, {name}"] for name in ("throughput", "mean first token"))
    assert (
        sum(figure is not None for figure in found.values()) == 2 and rate is not None and first is not None
    )
    assert (rate.unit, first.unit) == ("queries/s", "ms")
    for bar in bulk_runs.BARS:
        sooner, more = replace(first, ratio=0.5), replace(rate, ratio=2.0)
        assert bar.passed(sooner if "first token" in bar.title else more)
        assert not bar.passed(more if "first token" in bar.title else sooner)


def test_bulk_under_pressure_finds_less(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--bulk", "1", "--fragment-overlap", "0.5", "--kv-pages", "16"]
    found = by_metric(measure(capsys, "bulk", *BULK, *options))
    pressure = found["cache pressure, pages of all fragments", "the pool"]
    assert (pressure["value"], pressure["baseline_value"]) == (2 * 26, 16)
    ideal = 1 - (18 + 26 * 21) / (12 * 18 + 48 * 21)
    assert 0 <= found["span hit rate, span queries", None]["value"] < ideal - 0.05


def test_bulk_takes_evidence_of_its_own(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"question": "Who?", "fragments": [{"id": "a", "text": "a cow eats"}, "the goat is in"]},
        {"question": "Where?", "fragments": ["the goat is in", {"id": "a"}, "on the hill"]},
    ]
    file = tmp_path / "evidence.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--model", str(model_folder), "--device", "cpu", "--threads", "1", "--page-size", "8"]
    rows = measure(capsys, "bulk", *options, "--evidence", str(file), "--window", "2")
    found = by_metric(rows, "evidence evidence.jsonl, bulk all, 2 questions")
    assert found["fragment overlap", None]["value"] == pytest.approx(2 / 5)
    assert found["fan-out", None]["n"] == 2 and found["fragment length", None]["n"] == 3
    assert found["span hit rate, span queries", None]["value"] > 0.3


def test_a_made_model_with_words_takes_queries_and_no_other_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = tmp_path / "made", tmp_path / "evidence.jsonl"
    assert main(["bench", "make-model", "tiny", str(folder), "--words", "--device", "cpu"]) == 0
    file.write_text('{"question": "q", "fragments": ["lorem unheard-of", "ipsum unheard-of"]}\n')
    assert capsys.readouterr().out.strip() == str(folder)
    text = refused(capsys, "bulk", "--model", str(folder), "--device", "cpu", "--evidence", str(file))
    assert "evidence: to this model's tokenizer different fragments are the same tokens" in text
    sizes = [
        "--queries",
        "4",
        "--fragments",
        "2",
        "--tokens",
        "9",
        "--bulk",
        "all",
        "--fragment-overlap",
        "0",
    ]
    rows = measure(capsys, "bulk", "--model", str(folder), "--device", "cpu", "--threads", "1", *sizes)
    assert rows[0]["case"].startswith("made, 2 fragments x 9, question 32, overlap 0, bulk all, 4 questions")


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (['{"question": "q", "fragments": [{"id": "a"}]}'], "line 1: 'a' has no text yet"),
        (['{"question": "q", "fragments": ["a", "a"]}'], "each once"),
        (['{"question": "q", "fragments": []}'], "fragments are needed"),
        (['{"question": "q", "fragments": ["a"]}', "{"], "line 2: a line is"),
        (['{"question": "q", "fragments": ["a"], "answer": "b"}'], "line 1: a line is"),
        (['{"question": "q", "fragments": "two texts"}'], "line 1: a line is"),
        (['{"question": "q", "fragments": {"a": 1}}'], "line 1: a line is"),
        (['{"question": "q", "question": "r", "fragments": ["a"]}'], "line 1: a line is"),
        (['{"question": "\\ud800", "fragments": ["a"]}'], "line 1: a line is"),
        (["[" * 100_000], "line 1: a line is"),
        (
            [
                '{"question": "q", "fragments": [{"id": "a", "text": "b"}]}',
                '{"question": "q", "fragments": [{"id": "a", "text": "c"}]}',
            ],
            "line 2: 'a' had another text",
        ),
        ([""], "no question"),
    ],
)
def test_evidence_that_is_none_is_refused(lines: list[str], says: str, tmp_path: Path) -> None:
    file = tmp_path / "evidence.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(CommandError) as error:
        read_evidence(file)
    assert says in error.value.message and error.value.field == "evidence"


def test_only_line_feeds_end_a_line_of_evidence(tmp_path: Path) -> None:
    file = tmp_path / "evidence.jsonl"
    file.write_bytes('{"question": "q", "fragments": ["a\u2028b"]}\r\n\n'.encode())
    assert read_evidence(file).fragments == ["a\u2028b"]


@pytest.mark.parametrize("overlap", [0.0, 0.12, 0.37, 1.0])
def test_reads_again_are_as_many_as_the_overlap_says(overlap: float) -> None:
    reads = neighbours(50, 10, overlap, 3)
    assert reads == neighbours(50, 10, overlap, 3) != neighbours(50, 10, overlap, 4)
    assert all(len(set(found)) == 10 for found in reads), "no question reads a fragment twice"
    different = {index for found in reads for index in found}
    assert different == set(range(500 - round(overlap * 490)))


def test_sampled_ids_of_a_shape_are_the_same_ids_as_text(tiny_folder: Path) -> None:
    from dagengine.tokenizer import Tokenizer

    tokenizer = Tokenizer(tiny_folder)
    ids = [*range(tokenizer.vocab_size)]
    assert len(ids) == shape_config("tiny")["vocab_size"]
    assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids
    assert tokenizer.decode([7, 8]) == f"{tokenizer.decode([7])} {tokenizer.decode([8])}"


def _chat_of_marks(messages: Sequence[Mapping[str, str]], *, generate: bool) -> int:
    """A bos, a role before every message's words and two marks behind, and three that ask for an answer."""
    return 1 + sum(3 + len(message["content"].split()) for message in messages) + 3 * generate


def test_texts_differ_and_are_as_long_as_asked() -> None:
    def texts_of(count: Callable[[str], int]) -> Texts:
        return Texts(count, _chat_of_marks, 0)

    texts = texts_of(lambda text: len(text.split()))
    assert len({texts.text(3) for _ in range(50)}) == 50
    with pytest.raises(CommandError, match="no words of one token"):
        texts_of(lambda text: len(text))
    few = texts_of(lambda text: len(text.split()) if set(text.split()) <= {"a", "an"} | {"air"} else 99)
    with pytest.raises(CommandError, match="too few different texts of 1"):
        [few.text(1) for _ in range(9)]
    with pytest.raises(CommandError, match="is 1000 tokens"):
        texts_of(lambda text: 1000 if text.count(" ") > 1 else text.count(" ") + 1).text(3)


def test_a_question_is_as_long_as_asked_with_its_marks() -> None:
    texts = Texts(lambda text: len(text.split()), _chat_of_marks, 0)
    assert len(texts.question(32).split()) == 32 - 3 - 3
    with pytest.raises(CommandError, match="must be over 6"):
        texts.question(6)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["rag", "--answer", "3", "--shape", "tiny"], "answer: needs --endpoint"),
        (["nested", "--api-key", "k", "--shape", "tiny"], "api_key: needs --endpoint"),
        (["rag", "--endpoint", "here", "--shape", "tiny"], "endpoint: local, or the address"),
        (["rag", "--endpoint", "http://127.0.0.1:9", "--shape", "tiny"], "shape: the server runs already"),
        (["nested", "--endpoint", "http://127.0.0.1:9", "--kv-pages", "9"], "kv_pages: the server runs"),
        (["rag", "--endpoint", "http://127.0.0.1:9", "--threads", "1"], "threads: the server runs already"),
        (["rag", "--endpoint", "http://127.0.0.1:9"], "endpoint: http://127.0.0.1:9 does not answer"),
        (["nested", "--endpoint", "local", "--api-key", "k", "--shape", "tiny"], "api_key: a server that is"),
        (["bulk", "--shape", "tiny", "--queries", "9", "--bulk", "9"], "bulk: all, or a number from 1 below"),
        (["bulk", "--shape", "tiny", "--bulk", "some"], "bulk: all, or a number"),
        (["bulk", "--shape", "tiny", "--kv-pages", "9", "--pool-share", "1"], "pool_share: the pool's size"),
        (["bulk", "--shape", "tiny", "--pool-share", "inf"], "pool_share: a number, not inf"),
        (["bulk", "--shape", "tiny", "--evidence", "/dev/null"], "evidence: a shape knows no words"),
        (["bulk", "--model", "m", "--evidence", "/dev/null", "--tokens", "9"], "tokens: the evidence says"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_say_nothing_are_refused(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(capsys, *arguments)


def test_pages_say_what_was_published(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "bulk.md"
    assert (
        main(["bench", "bulk", *BULK, "--bulk", "all", "--fragment-overlap", "0.12", "--markdown", str(page)])
        == 0
    )
    text = page.read_text()
    assert "A baseline called published was not measured here" in text
    assert "published, arXiv:2511.02749: NQ, bulk all, mean first token" in text
    assert "in process" in capsys.readouterr().out
