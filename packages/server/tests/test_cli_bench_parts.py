"""The parts that benchmarks share: lengths, latencies, costs, commands as they are told, where figures go."""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from dagengine_server.cli.bench import memory, record, report
from dagengine_server.cli.bench.arguments import Common, counts
from dagengine_server.cli.bench.costs import Costs
from dagengine_server.cli.bench.http_load import Load, arrivals, base_url, prompts
from dagengine_server.cli.bench.latency import Objective, Stream, latency_figures
from dagengine_server.cli.bench.lengths import LEAST, LOWEST_ID, MOST, Lengths, fixed, sharegpt
from dagengine_server.cli.bench.publish import Destination, publish
from dagengine_server.cli.bench.record import Circumstances, Figure, command_line
from dagengine_server.cli.bench.settings import Settings
from dagengine_server.cli.console import CommandError
from dagengine_server.cli.threads import ThreadChoice

WHERE = Circumstances("a machine", {"python": "3"}, "abc", "dagengine bench x")


def stream(begin: float, *events: tuple[float, int]) -> Stream:
    found = Stream(begin=begin)
    for at, tokens in events:
        found.tell(at, tokens)
    return found


def test_drawn_lengths_have_the_distribution_that_is_documented() -> None:
    drawn = sharegpt(20000, 1)
    for values, median, mean in (
        ([size.input for size in drawn], 95, 214),
        ([size.output for size in drawn], 128, 200),
    ):
        assert statistics.median(values) == pytest.approx(median, rel=0.05)
        assert statistics.mean(values) == pytest.approx(mean, rel=0.03)
        assert min(values) == LEAST and max(values) == MOST


def test_lengths_follow_the_seed_and_do_not_depend_on_how_many_are_drawn() -> None:
    assert sharegpt(50, 7)[:20] == sharegpt(20, 7) != sharegpt(20, 8)
    assert fixed(2, 3, 4) == [Lengths(3, 4), Lengths(3, 4)]


def test_latencies_are_those_of_their_definitions() -> None:
    found = stream(1.0, (1.5, 1), (1.6, 2), (1.9, 1))
    assert (found.ttft, found.e2e) == (0.5, pytest.approx(0.9))
    assert found.tpot == pytest.approx(0.4 / 3)
    assert found.gaps == pytest.approx([0.1, 0.3])
    assert found.intervals_s == pytest.approx([0.1, 0.0, 0.3])
    found.tokens = 9
    assert found.tpot == pytest.approx(0.4 / 8)
    alone = stream(0.0, (0.2, 1))
    assert alone.tpot is None and alone.gaps == []


def test_an_event_without_tokens_is_no_gap() -> None:
    assert stream(0.0, (0.1, 1), (0.2, 0), (0.4, 1)).gaps == pytest.approx([0.3])


def test_latency_figures_hold_every_sample_in_milliseconds() -> None:
    streams = [stream(0.0, *[(0.01 * i + 0.1 * n, 1) for n in (1, 2, 3)]) for i in range(11)]
    found = {figure.metric: figure for figure in latency_figures("case", "b", streams)}
    assert (found["TTFT"].n, found["ITL"].n, found["TPOT"].n, found["E2E"].n) == (11, 22, 11, 11)
    assert found["TTFT"].value == pytest.approx(150)
    assert found["TTFT, p90"].value == pytest.approx(190)
    assert found["ITL"].p99 == pytest.approx(100)


def test_streams_of_one_token_have_no_time_per_token() -> None:
    assert {f.metric for f in latency_figures("c", "", [stream(0.0, (0.1, 1))])} == {
        "TTFT",
        "TTFT, p90",
        "E2E",
        "E2E, p90",
    }


def test_an_objective_is_met_by_all_its_limits() -> None:
    found = stream(0.0, (0.1, 1), (0.3, 1))
    assert Objective(100.1, 200.1, 300.1).met(found)
    assert not Objective(ttft_ms=99).met(found)
    assert not Objective(tpot_ms=199).met(found)
    assert not Objective(e2e_ms=299).met(found)
    assert Objective(tpot_ms=1).met(stream(0.0, (0.1, 1)))
    assert not Objective().given
    assert str(Objective(ttft_ms=500, e2e_ms=1e3)) == "TTFT ≤ 500 ms, E2E ≤ 1000 ms"


def llama_8b() -> Costs:
    group = SimpleNamespace(num_kv_heads=8, head_dim=128, layers=range(32))
    geometry = SimpleNamespace(
        hidden_size=4096, head_dim=128, num_heads=32, num_kv_heads=8, num_layers=32, intermediate_size=14336,
        vocab_size=128256, groups=[group],
    )  # fmt: skip
    return Costs.of(geometry, "bfloat16")


def test_a_step_of_the_8b_shape_reads_15_gb_and_128_kib_a_token() -> None:
    costs = llama_8b()
    assert costs.weight_bytes == pytest.approx(15.0e9, rel=0.001)
    assert costs.kv_bytes == 128 * 1024
    assert costs.step_bytes(1000) == costs.weight_bytes + 1000 * 128 * 1024


def test_32_documents_apart_take_2_58_times_fewer_operations_than_one_prompt() -> None:
    costs, visible = llama_8b(), 32 * 2857
    whole = costs.prefill_flops([(visible + 64, 0)])
    apart = costs.prefill_flops([(2857, 0)] * 32 + [(64, visible)])
    assert whole / apart == pytest.approx(2.58, abs=0.01)


def test_operations_do_not_depend_on_how_a_prefill_is_cut() -> None:
    costs = llama_8b()
    assert costs.prefill_flops([(300, 7)]) == costs.prefill_flops([(100, 7), (200, 107)])


def test_a_command_is_told_without_this_machines_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [
        "bench",
        "rag",
        "--model",
        "/mnt/models/m",
        "--output",
        "/x/y.jsonl",
        "--markdown=/x/y.md",
        "--json",
    ]
    assert command_line("rag", [*given, "--tokens", "9"]) == "dagengine bench rag --model m --tokens 9"
    assert command_line("rag", ["bench", "rag", "--model=/mnt/m"]) == "dagengine bench rag --model=m"
    assert command_line("serve", ["bench", "serve", "--api-key", "secret", "--url", "http://h/"]) == (
        "dagengine bench serve --url http://h/"
    )
    below = command_line("rag", ["bench", "rag", "--model", str(tmp_path / "models" / "m")])
    assert record.circumstances(below, 1).command == "dagengine bench rag --model models/m"
    assert command_line("rag", ["elsewhere"]) == "dagengine bench rag"


def test_circumstances_name_the_gpu_and_what_belongs_to_it() -> None:
    assert WHERE.on("", {"driver": "1"}) == WHERE
    found = WHERE.on("a GPU", {"driver": "1"})
    assert (found.hardware, found.versions) == ("a GPU, a machine", {"python": "3", "driver": "1"})
    assert "threads used" not in record.hardware(None) and "2 threads used" in record.hardware(2)


BAR = report.Bar("a bar", "case", "time", None, report.value_of, 1.0, "ms", False)


def test_figures_are_named_written_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = [Figure.of("case", "b", "time", [2.0, 4.0], "ms")]
    to = Destination(tmp_path / "f.jsonl", tmp_path / "f.md", check=False, as_json=False)
    publish("x", figures, WHERE, to, [BAR])
    shown = capsys.readouterr().out
    assert "FAIL" in shown and "a machine" in shown
    written, where = record.load_lines((tmp_path / "f.jsonl").read_text())
    assert (written[0].bench, written[0].value, where) == ("x", 3.0, WHERE)
    assert "| a bar | ≤ 1 ms | 3 ms | FAIL |" in (tmp_path / "f.md").read_text()
    with pytest.raises(typer.Exit):
        publish("x", figures, WHERE, Destination(None, None, check=True, as_json=True), [BAR])
    to = Destination(tmp_path / "g.jsonl", tmp_path / "g.md", check=True, as_json=True)
    with pytest.raises(CommandError):  # nothing to check is no pass
        publish("x", figures, WHERE, to)
    assert "Bars" not in (tmp_path / "g.md").read_text()


def test_each_case_is_shown_once_and_a_column_only_where_something_is_in_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cases = [f"a model, {size} fragments x 1024, question 32, 256 questions, in process" for size in (8, 16)]
    figures = [Figure.count(case, "", f"metric {index}", 3.0, "ms") for index in range(9) for case in cases]
    to = Destination(None, None, check=False, as_json=False)

    def shown(*figures: Figure) -> tuple[str, list[str]]:
        publish("x", figures, WHERE, to)
        out = capsys.readouterr().out
        return " ".join(out.split()), [line.strip("┃ ") for line in out.splitlines() if line.startswith("┃")]

    text, heads = shown(*figures)
    assert [text.count(case) for case in cases] == [1, 1] and text.count("metric 8") == 2
    assert text.index(cases[0]) < text.index("metric 8") < text.index(cases[1])
    assert [head.split() for head in heads] == ["metric ┃ value ┃ unit ┃ n".split()] * 2
    text, heads = shown(figures[0].against("another", 2.0), *figures[1:])
    assert "another: 2" in text
    assert [head.split() for head in heads] == ["metric ┃ value ┃ unit ┃ n ┃ baseline ┃ ratio".split()] * 2


def common(**given: object) -> Common:
    to = Destination(None, None, False, False)
    return Common(None, None, 5, 64, ThreadChoice(2, "as asked"), dict(given), to)


def test_the_pool_is_what_a_run_needs_unless_its_size_was_given() -> None:
    assert common().engine(tokens=640, sequences=3)["kv_pages"] == 10 + 6 + 8
    assert common(kv_pages=7).engine(tokens=640)["kv_pages"] == 7
    assert "kv_pages" not in common(kv_memory_gib=1.0).engine(tokens=640)
    assert "max_num_seqs" not in common().engine(tokens=1, sequences=64)
    assert common().engine(tokens=1, sequences=65)["max_num_seqs"] == 65
    found = common(max_num_seqs=4).engine(tokens=1, sequences=65)
    assert (found["max_num_seqs"], found["seed"], found["threads"]) == (4, 5, 2)


def test_counts_keep_their_order_and_are_positive() -> None:
    assert counts([3, 1, 3], (9,), "n") == [3, 1]
    assert counts(None, (9,), "n") == [9]
    with pytest.raises(CommandError) as refused:
        counts([1, 0], (9,), "n")
    assert refused.value.field == "n"


def load(words: bool, seed: int = 1) -> Load:
    return Load("u", "m", None, fixed(3, 7, 1), 1, None, words, 200, 1.0, seed)


def test_requests_are_random_ids_or_words_of_their_lengths() -> None:
    assert prompts(load(False)) == prompts(load(False)) != prompts(load(False, seed=2))
    for prompt in prompts(load(False)):
        assert len(prompt) == 7 and all(isinstance(i, int) and LOWEST_ID <= i < 200 for i in prompt)
    assert [len(str(prompt).split()) for prompt in prompts(load(True))] == [7, 7, 7]


def test_arrivals_are_a_poisson_process_of_the_rate() -> None:
    at = arrivals(4001, 10.0, 3)
    gaps = [b - a for a, b in pairwise(at)]
    assert at[0] == 0.0 and min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.1, rel=0.1)
    assert arrivals(3, None, 1) == [0.0, 0.0, 0.0]


def test_an_address_is_taken_with_and_without_its_version() -> None:
    assert base_url("http://h:1/v1/") == base_url("http://h:1") == "http://h:1"


class SlowToCount:
    """A probe whose tokens come 1 ms apart, and 5 ms apart where pages are counted at each."""

    core = SimpleNamespace(default_backend="fused", config=SimpleNamespace(page_size=16))
    page_bytes = 10

    def __init__(self) -> None:
        self._live = iter((0, 4))

    def pages_live(self) -> int:
        return next(self._live)

    def prefill(self, prompts: list[object]) -> list[SimpleNamespace]:
        return [SimpleNamespace(release=lambda: None) for _ in prompts]

    def ids(self, count: int) -> int:
        return count

    def request(self, *given: object, **named: object) -> None:
        return None

    def temp_bytes(self, *, reset: bool = False) -> dict[str, int]:
        return {"fused": 0}

    def run(self, requests: list[None], traces: list[memory.Trace]) -> list[memory.Trace]:
        for trace in traces:
            trace.sampled += [i * (0.005 if trace.want_pages else 0.001) for i in range(4)]
            trace.pages += [9] * (4 if trace.want_pages else 0)
        return traces


def test_tokens_of_readers_are_timed_in_a_run_that_counts_no_pages() -> None:
    found = {
        figure.metric: figure
        for figure in memory.measure_readers(SlowToCount(), Settings(readers=3))  # type: ignore[arg-type]
    }
    assert found["KV bytes in use"].value == 90
    assert found["time per token"].value == pytest.approx(1.0)
    assert found["time per token, one reader"].value == pytest.approx(1.0)
