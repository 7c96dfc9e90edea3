"""`dagengine bench` rag, nested, branches, offline, serve and make-model on a tiny model: figures are whole and true to
their definitions. Not how fast."""

from __future__ import annotations

import gc
import importlib
import json
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Server

from dagengine.request import Request
from dagengine_server.cli import main
from dagengine_server.cli.bench.nested import BARS, DECLARED, _Judging
from dagengine_server.cli.bench.probe import Probe, Trace
from dagengine_server.cli.bench.record import Figure

FIELDS = "bench case backend metric value unit baseline baseline_value ratio n p50 p95 p99 "
FIELDS += "hardware versions commit command"


@pytest.fixture(autouse=True)
def quick_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagengine.ceilings.CPU_BYTES", 8 << 20)


def measure(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> list[dict[str, Any]]:
    assert main(["bench", *arguments, "--json"]) == status
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for row in rows:
        assert list(row) == FIELDS.split()
        assert row["bench"] == arguments[0]
    return rows


def by_metric(rows: list[dict[str, Any]], case: str) -> dict[tuple[str, str | None], dict[str, Any]]:
    found = {(row["metric"], row["baseline"]): row for row in rows if case in row["case"]}
    assert found
    return found


def engine(folder: Path) -> list[str]:
    return ["--model", str(folder), "--device", "cpu", "--threads", "1", "--page-size", "8"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 1) -> str:
    assert main(["bench", *arguments]) == status
    return " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_rag_measures_each_way_and_what_each_reads(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--documents", "1", "--documents", "3", "--tokens", "20", "--question", "6"]
    rows = measure(capsys, "rag", *engine(model_folder), *sizes, "--repeats", "3", "--slow-repeats", "2")
    found = by_metric(rows, "3 documents x 20")
    cached = found["first token, cached", "full prefill"]
    assert cached["n"] == 3 and cached["p50"] <= cached["p95"] <= cached["p99"]
    assert cached["baseline_value"] == found["first token, full", None]["value"]
    assert cached["ratio"] == pytest.approx(cached["value"] / cached["baseline_value"])
    assert found["first token, cached", "one contiguous state"]["ratio"] > 0
    assert found["first token, cold", "full prefill"]["n"] == 2
    added = found["KV pages added by a cached request", "own"]
    assert added["value"] <= added["baseline_value"] == 1
    flops = found["operations, full prefill", "cold"]
    pairs = 66 * 67 / 2 - (3 * 20 * 21 / 2 + 6 * 60 + 6 * 7 / 2)
    assert flops["value"] - flops["baseline_value"] == pairs * 4 * 2 * 4 * 8
    bandwidth = by_metric(rows, "device")["read bandwidth", None]["value"]
    floor = found["first token, cached", "its bytes at the measured bandwidth"]["baseline_value"]
    vocab = json.loads((model_folder / "config.json").read_text())["vocab_size"]
    numbers = 2 * (32 * 8 * 8 + 32 * 32 + 3 * 32 * 64) + 32 * vocab + 60 * 2 * 2 * 2 * 8
    assert floor == pytest.approx(4 * numbers / bandwidth / 1e6)


def test_rag_over_more_than_the_model_sees_is_refused(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refused(capsys, "rag", *engine(model_folder), "--documents", "9", "--tokens", "100")
    assert "documents" in text and "at most 512" in text


def test_nested_judges_as_many_tokens_every_way(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--fan-out", "3", "--length", "9", "--length", "12", "--prompt", "16", "--question", "5"]
    rows = measure(capsys, "nested", *engine(model_folder), *sizes, "--repeats", "2")
    found = by_metric(rows, "3 candidates x 12, prompt 16, question 5, temperature 0.5")
    assert found["judge's first token, as states", "prefix reuse"]["n"] == 2
    assert found["judge's input, nothing cropped", None]["value"] == 16 + 3 * 12 + 5
    again = found["judge's tokens computed, as states", "prefix reuse"]
    assert (again["value"], again["baseline_value"]) == (5, 3 * 12 + 5)
    whole = found["candidates and judge, as states", "prefix reuse"]
    assert whole["value"] > found["candidates generated", None]["value"] > 0
    again = found["judge's tokens computed, declared", "prefix reuse"]
    assert (again["value"], again["baseline_value"]) == (5, 3 * 12 + 5)
    first = found["judge's first token, declared with its candidates", "prefix reuse"]
    assert (
        first["n"] == 2
        and first["baseline_value"] == found["judge's first token, prefix reuse", None]["value"]
    )
    assert 0 < first["p50"] <= first["p95"] < found["candidates and judge, declared", "prefix reuse"]["p50"]
    assert by_metric(rows, "3 candidates x 9")


def test_a_judge_declared_with_its_candidates_is_one_submission_timed_from_their_last_token(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"device": "cpu", "threads": 1, "page_size": 8, "kv_pages": 64}
    with Probe(str(model_folder), seed=0, options=options) as probe:
        groups: list[tuple[Sequence[Request], list[Trace]]] = []
        run = probe.run

        def watched(requests: Sequence[Request]) -> list[Trace]:
            groups.append((requests, run(requests)))
            return groups[-1][1]

        (shared,) = probe.prefill([probe.ids(16)])
        runs = _Judging(probe, 3, 9, 16, 5, 0.5)
        monkeypatch.setattr(probe, "run", watched)
        runs._candidates(shared)
        declared = runs._declared(shared)
        (alone, _), (together, traces) = groups
        assert len(together) == 4 and [ref.request for ref in together[-1].context] == [
            None,
            *(request.id for request in together[:3]),
        ]
        for one, other in zip(alone, together[:3], strict=True):
            assert one.sampling is not None and other.sampling is not None
            assert replace(one.sampling, seed=None) == replace(other.sampling, seed=None)
            assert len(one.input_ids) == len(other.input_ids) and one.context == other.context
        samplings = [request.sampling for request in (*alone, *together[:3])]
        assert [params.seed for params in samplings if params is not None] == [1, 2, 3, 4, 5, 6]
        *candidates, judge = traces
        assert [len(trace.sampled) for trace in traces] == [9, 9, 9, 1]
        assert declared.first == judge.sampled[0] - max(trace.sampled[-1] for trace in candidates) > 0
        assert judge.begin == min(trace.begin for trace in candidates)


def test_each_bar_of_nested_finds_the_figure_that_it_names(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--fan-out", "1", "--length", "9", "--prompt", "16", "--question", "5"]
    rows = measure(capsys, "nested", *engine(model_folder), *sizes, "--repeats", "1")
    members = tuple(Figure.__dataclass_fields__)
    for candidates in (1, 24):
        said = f"llama-3.1-8b, {candidates} candidates x 256, prompt 512, question 32, temperature 0.5"
        figures = [Figure(**{name: row[name] for name in members} | {"case": said}) for row in rows]
        found = {bar.title: bar.find(figures) for bar in BARS}
        assert len(found) == len(BARS) == 4, "no two are called the same"
        assert {title: figure.metric for title, figure in found.items() if figure is not None} == {
            f"judge over {candidates} x 256 against prefix reuse": "judge's first token, as states",
            f"judge declared with its {candidates} x 256 against prefix reuse": DECLARED,
        }


def test_branches_have_the_tokens_of_each_alone_and_merge_without_copies(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--branches", "3", "--shared", "20", "--prompt", "3", "--tokens", "6", "--question", "4"]
    rows = measure(capsys, "branches", *engine(model_folder), *sizes, "--alone", "2", "--repeats", "2")
    found = by_metric(rows, "3 branches of 6 over 20")
    alone = found["branches with the tokens of the branch alone", None]
    assert (alone["value"], alone["n"]) == (1.0, 2)
    separate = found["branches with the tokens of the separate request", None]
    assert (separate["value"], separate["n"]) == (1.0, 6)
    merged = found["KV pages added by the merge", "own"]
    assert merged["value"] <= merged["baseline_value"] == 1
    assert found["output rate", "separate requests"]["value"] > 0


def test_offline_measures_rates_and_latencies(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--streams", "1", "--streams", "3", "--input-len", "10", "--output-len", "4", "--repeats", "2"]
    rows = measure(capsys, "offline", *engine(model_folder), *sizes)
    found = by_metric(rows, "3 streams, 3 requests, in 10, out 4")
    assert found["TTFT", None]["n"] == 6
    assert found["ITL", None]["n"] == 6 * 3
    assert found["TTFT, p90", None]["value"] >= found["TTFT", None]["p50"]
    assert found["output rate", None]["value"] > 0
    assert found["decode step", "its bytes at the measured bandwidth"]["n"] == 2
    assert ("host time not hidden", None) not in found, "on a CPU the host computes"
    one = by_metric(rows, "1 stream, 1 requests")
    assert one["time per token", "its bytes at the measured bandwidth"]["n"] == 2 * 3


def test_offline_says_how_long_a_gpu_waits_for_the_host(
    model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = iter((0.01, 0.03))

    def watched(self: Probe, run: Callable[[], None]) -> float:
        run()
        return next(shares)

    monkeypatch.setattr(Probe, "watched", watched)
    sizes = ["--streams", "2", "--input-len", "10", "--output-len", "4", "--repeats", "2"]
    found = by_metric(measure(capsys, "offline", *engine(model_folder), *sizes), "2 streams")
    row = found["host time not hidden", None]
    assert (row["unit"], row["n"]) == ("%", 2) and row["value"] == pytest.approx(2.0)
    assert found["TTFT", None]["n"] == 4, "the watched runs are those whose streams are kept"


def test_offline_runs_more_requests_than_streams_of_drawn_lengths(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = [
        "--streams",
        "4",
        "--requests",
        "6",
        "--lengths",
        "sharegpt",
        "--repeats",
        "1",
        "--shape",
        "tiny",
    ]
    rows = measure(capsys, "offline", "--device", "cpu", "--threads", "1", *sizes)
    found = by_metric(rows, "4 streams, 6 requests, ShareGPT-like lengths")
    assert found["TTFT", None]["n"] == 6
    assert ("decode step", None) not in found


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["offline", "--engine", "vlm"], "did you mean 'vllm'?"),
        (["offline", "--engine", "vllm"], "not installed"),
        (["offline", "--engine", "sglang", "--requests", "100"], "leave it out"),
        (["offline", "--lengths", "sharegp"], "did you mean 'sharegpt'?"),
        (["serve", "--lengths", "fixd"], "did you mean 'fixed'?"),
        (["serve", "--input-len", "16"], "input_len: --lengths sharegpt draws the lengths"),
        (["offline", "--lengths", "sharegpt", "--output-len", "4"], "output_len: --lengths sharegpt draws"),
        (["rag", "--documents", "0"], "at least 1"),
        (["nested", "--length", "-2"], "at least 1"),
        (["branches", "--shape", "tiny", "--model", "m"], "not both"),
        (["branches", "--batch-invariant"], "batch_invariant"),
        (["rag", "--gpu-memory-utilization", "0.5", "--device", "cpu"], "gpu_memory_utilization"),
        (["rag", "--device", "gpu"], "cuda:N"),
        (["nested", "--kv-pages", "9", "--kv-memory-gib", "1"], "kv_pages"),
        (["offline", "--page-size", "0"], "page_size"),
        (["rag", "--page-size", "0"], "page_size"),
        (["nested", "--page-size", "-64"], "page_size"),
        (["offline", "--output", "/proc/none/x"], "/proc/none/x"),
        (["rag", "--markdown", "/proc/none/x"], "/proc/none/x"),
        (["serve", "--output", "/proc/none/x"], "/proc/none/x"),
        (["make-model", "tiny", "/proc/none"], "/proc/none"),
        (["make-model", "tiny", "/tmp/dagengine-none", "--seed", str(2**64)], "seed"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_settings_are_refused(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = [] if "--shape" in arguments or arguments[0] in ("serve", "make-model") else ["--shape", "tiny"]
    assert says in refused(capsys, *arguments, *shape)


def test_an_unknown_option_or_bench_is_refused_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--documents" in refused(capsys, "rag", "--document", "3", "--shape", "tiny", status=2)
    assert "nested" in refused(capsys, "neste", status=2)
    assert "qwen3-0.6b" in refused(capsys, "rag", "--shape", "qwen3")


def test_options_of_the_engine_come_from_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "bench.toml"
    file.write_text('shape = "tiny"\nfan-out = [2]\nlength = [4]\nrepeats = 1\nprompt = 9\nkv-pages = 1\n')
    monkeypatch.setenv("DAGENGINE_KV_PAGES", "200")
    monkeypatch.setenv("DAGENGINE_DEVICE", "cpu")
    rows = measure(capsys, "nested", "--config", str(file), "--prompt", "10", "--threads", "1")
    assert by_metric(rows, "tiny, 2 candidates x 4, prompt 10")


def test_a_closed_probe_holds_no_memory(model_folder: Path) -> None:
    probe = Probe(str(model_folder), seed=0, options={"device": "cpu", "kv_pages": 32, "page_size": 8})
    probe.generate(probe.ids(4), tokens=2)
    core, arena = weakref.ref(probe.core), weakref.ref(probe.core.attention.runner.arena)
    probe.close()
    gc.collect()
    assert core() is None and arena() is None


def test_make_model_writes_a_folder_that_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "made"
    assert main(["bench", "make-model", "tiny", str(folder), "--seed", "3", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.strip() == str(folder)
    assert (folder / "model.safetensors").exists() and (folder / "config.json").exists()
    assert "another folder" in refused(capsys, "make-model", "tiny", str(folder), "--device", "cpu")
    sizes = ["--branches", "2", "--shared", "8", "--tokens", "3", "--repeats", "1"]
    rows = measure(capsys, "branches", "--model", str(folder), "--device", "cpu", "--threads", "1", *sizes)
    assert rows[0]["case"].startswith("made, 2 branches")


FAKES = {
    "vllm": """
class SamplingParams:
    def __init__(self, **options):
        self.options = options

class LLM:
    def __init__(self, **options):
        TOLD.append(options)

    def generate(self, prompts, params, use_tqdm):
        GIVEN.append([(len(p["prompt_token_ids"]), q.options["max_tokens"]) for p, q in zip(prompts, params)])
""",
    "sglang": """
class Engine:
    def __init__(self, **options):
        TOLD.append(options)

    def generate(self, input_ids, sampling_params):
        GIVEN.append([(len(i), q["max_new_tokens"]) for i, q in zip(input_ids, sampling_params)])

    def shutdown(self):
        GIVEN.append("stopped")
""",
}


@pytest.mark.parametrize("name", list(FAKES))
def test_offline_gives_other_engines_the_same_requests(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(f"TOLD, GIVEN = [], []\n{FAKES[name]}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    sizes = ["--streams", "3", "--input-len", "10", "--output-len", "4", "--repeats", "1"]
    more = ["--shape", "tiny", "--gpu-memory-utilization", "0.5", "--max-num-seqs", "3"]
    rows = measure(capsys, "offline", "--engine", name, *sizes, *more)
    fake = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    assert fake.GIVEN[:4] == [[(10, 1)] * 3, [(10, 4)] * 3] * 2
    told = {str(value) for value in fake.TOLD[0].values()}
    assert {"0.5", "3", "dummy", "True", "15"} <= told
    found = by_metric(rows, "tiny, 3 streams, 3 requests, in 10, out 4")
    assert {row["backend"] for row in rows} == {name}
    assert {metric for metric, _ in found} == {"output rate", "prefill rate", "decode step"}
    assert "page_size" in refused(capsys, "offline", "--engine", name, *sizes, *more, "--page-size", "8")


@pytest.fixture
def url(shared_server: Server) -> Iterator[str]:
    yield f"http://127.0.0.1:{shared_server.port}"
    shared_server.settle()


LOAD = ["--requests", "5", "--warm-up", "1", "--lengths", "fixed", "--input-len", "8", "--output-len", "6"]


@pytest.mark.parametrize("pace", [["--streams", "2"], ["--request-rate", "200"]], ids=["streams", "rate"])
def test_serve_measures_a_server(url: str, pace: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--slo-ttft", "60000", "--slo-tpot", "60000"]
    rows = measure(capsys, "serve", "--url", url, *LOAD, *pace, *limits, "--highest-id", "250")
    found = {row["metric"]: row for row in rows}
    assert found["TTFT"]["n"] == found["E2E"]["n"] == 5
    assert found["failed requests"]["value"] == 0
    assert found["served well, TTFT ≤ 60000 ms, TPOT ≤ 60000 ms"]["value"] == 1
    assert found["output rate"]["value"] / found["request rate"]["value"] == pytest.approx(6)
    assert found["input rate"]["value"] / found["request rate"]["value"] == pytest.approx(8)


def test_serve_sends_words_and_prints_percentiles(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "serve.jsonl"
    assert main(["bench", "serve", "--url", f"{url}/v1", *LOAD, "--text", "--output", str(output)]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("p90", "TTFT", "TPOT", "output rate"))
    assert str(tmp_path) not in output.read_text()


def test_serve_tells_of_requests_that_fail(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(capsys, "serve", "--url", url, "--model", "another", *LOAD)
    assert "every request failed" in text and "404" in text
    assert "does not answer" in refused(capsys, "serve", "--url", "http://127.0.0.1:9", *LOAD)
