"""tools/bench/linear: what it counts, what it compiles, what it writes. Its times need a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import linear as bench_main
from bench import linear_cases as cases
from bench import linear_gpu, linear_report
from bench.kernels_ceilings import Ceilings
from bench.kernels_record import TIME, Circumstances
from dagengine_kernels.fused.cuda import driver, gemv, streamed

SMS = 132


def test_bytes_and_operations_are_those_of_the_product() -> None:
    layer = cases.Layer("m", "l", 30, 20, gated=True, normed=True, residual=True)
    assert layer.weight_bytes == 2 * 30 * 20 * 2
    assert layer.fewest_bytes(3) == layer.weight_bytes + 3 * 20 * 2 + 2 * 3 * 30 * 2
    assert layer.operations(3) == 2 * 3 * 60 * 20
    for layers in cases.MODELS.values():
        for layer in layers:
            assert layer.copies * layer.weight_bytes >= cases.L2_TIMES_BYTES
            assert layer.copies * layer.weight_bytes <= linear_gpu.MEMORY_BYTES
    products = sum(layer.weight_bytes for layer in cases.LLAMA[:4])
    assert 32 * products + cases.LLAMA[4].weight_bytes <= linear_gpu.MEMORY_BYTES


def test_what_will_be_launched_is_compiled_beforehand() -> None:
    wanted = set(cases.kernels(cases.LLAMA, cases.ROWS, SMS))
    assert {source for source, _ in wanted} == {"gemv", "skinny", "streamed", "tiled", "norm", "gate"}
    for name, macros in wanted:
        text = driver.read_source(name)
        assert all(macro in text for macro, _ in macros)
    chosen = gemv.layout(1, 4096, 4096, False, SMS)
    assert chosen is not None
    macros = gemv.macros({"DTYPE": 2, "OUT_TYPE": 2, "GATED": 0}, chosen, 4096, False)
    assert ("gemv", tuple(macros.items())) in wanted


def test_a_sweep_has_every_layout_once() -> None:
    for layer in cases.LLAMA:
        found = cases.layouts(layer, 1, SMS)
        assert len(found) == len(set(found))
        assert {(one.depth, one.resident) for one in found} == {(8, 3), (16, 2), (8, 2)}
        assert {one.split for one in found} == {1, 2}
        assert gemv.layout(1, layer.inputs, layer.out, layer.gated, SMS) in found
    assert cases.layouts(cases.LLAMA[0], 9, SMS) == []


def test_a_sweep_of_streamed_layouts_has_each_once_and_fills_the_processors() -> None:
    for layer in (*cases.LLAMA, *cases.QWEN):
        for rows in (8, 64):
            found = cases.streamed_layouts(layer, rows, SMS)
            assert len(found) == len(set(found)) >= 4
            assert found[0] == streamed.layout(rows, layer.inputs, layer.out, layer.gated, SMS)
            assert {one.resident for one in found} == {1, 2}
            assert {one.halves for one in found} == {1, 2}
            for one in found[1:]:
                assert one.blocks >= 0.7 * SMS
                assert one.blocks <= 2 * SMS or one.split == 1 or one.tile == found[0].tile
    assert cases.streamed_layouts(cases.LLAMA[0], 65, SMS) == []
    assert cases.swept_rows([3, 4, 8, 16, 30, 64, 1024]) == {8, 16, 30, 64}


def test_the_fastest_is_named_by_number_of_rows() -> None:
    run = linear_gpu.Run(torch.empty(0), 3, SMS, 0.0, Ceilings(4e12, 4e12, 8e14, {}))
    layer = cases.LLAMA[0]
    for rows, *times in ((4, 5.0, 6.0, 7.0), (64, None, 6.0, 7.0), (16, None, 7.0, 6.0)):
        kinds = (linear_gpu.FEW, linear_gpu.STREAMED, linear_gpu.CUBLAS)
        for name, us in zip(kinds, times, strict=True):
            if us is not None:
                linear_gpu.record(run, layer.case(rows), name, [us], 1, 1)
    told = linear_gpu.fastest(run, [layer], [64, 16, 4, 1])
    assert told.endswith("qkv 4 gemv, 16 cuBLAS, 64 streamed.")


def test_how_far_few_rows_win_ends_where_they_first_lose() -> None:
    run = linear_gpu.Run(torch.empty(0), 3, SMS, 0.0, Ceilings(4e12, 4e12, 8e14, {}))
    layer = cases.LLAMA[0]
    for rows, few, cublas in ((1, 5.0, 6.0), (2, 6.0, 6.0), (4, 7.0, 6.5), (8, 6.0, 7.0)):
        linear_gpu.record(run, layer.case(rows), linear_gpu.FEW, [few], 1, 1)
        linear_gpu.record(run, layer.case(rows), linear_gpu.CUBLAS, [cublas], 1, 1)
    assert linear_gpu.few_rows_won(run, [layer], [8, 1, 2, 4, 64]).endswith("qkv 2.")


def fake_measure(layers, rows, *, quick, sweep, seconds):
    """A run whose calls take twice what their bytes take."""
    run = linear_gpu.Run(torch.empty(0), 3, SMS, seconds, Ceilings(4e12, 4e12, 8e14, {}))
    for layer in layers:
        for number in rows:
            us = layer.fewest_bytes(number) / 4e12 * 2e6
            samples = [us, us * 1.1, us * 0.9]
            linear_gpu.record(
                run, layer.case(number), linear_gpu.OURS, samples, layer.fewest_bytes(number), 0
            )
    run.notes.append(f"quick {quick}, sweep {sweep}")
    return run


def test_the_page_and_the_lines_say_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(linear_gpu, "measure", fake_measure)
    monkeypatch.setattr("bench.kernels_machine.hardware", lambda device: ("a card", {"driver": "1"}))
    arguments = [
        "--quick",
        "--layers",
        "qkv,down",
        "--sweep",
        "streamed",
        "--out",
        str(tmp_path),
        "--commit",
        "abc",
    ]
    options = bench_main.parser().parse_args(arguments)
    assert bench_main.work(options, arguments) == 0
    lines = [json.loads(line) for line in (tmp_path / "linear.jsonl").read_text().splitlines()]
    times = [line for line in lines if line["metric"] == TIME]
    assert len(times) == 2 * len(cases.QUICK_ROWS)
    assert {line["bench"] for line in lines} == {"linear"}
    assert {line["command"] for line in lines} == {
        "tools/bench/linear --quick --layers qkv,down --sweep streamed"
    }
    assert {line["commit"] for line in lines} == {"abc"}
    page = (tmp_path / "linear.md").read_text()
    assert page == capsys.readouterr().out.rstrip("\n") + "\n"
    assert "- quick True, sweep ['streamed']" in page
    case = cases.LLAMA[0].case(1)
    assert f"| {case} | CudaLinear | {times[0]['value']:.4g} | 50% | 50% |" in page


def test_a_wrong_result_is_told_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(*_, **__):
        return linear_gpu.Run(torch.empty(0), 3, SMS, 0.0, faults=["qkv is off"])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(linear_gpu, "measure", wrong)
    monkeypatch.setattr("bench.kernels_machine.hardware", lambda device: ("a card", {}))
    assert bench_main.work(bench_main.parser().parse_args(["--out", str(tmp_path)]), []) == 1
    assert "FAIL qkv is off" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--rows", "0"], ["--rows", "x"], ["--sweep", "skinny"], ["--models", "none"], ["--layers", "q"]],
)
def test_arguments_that_leave_nothing_are_refused(arguments: list[str], tmp_path: Path) -> None:
    options = bench_main.parser().parse_args([*arguments, "--out", str(tmp_path)])
    assert bench_main.work(options, arguments) == 2
    assert not list(tmp_path.iterdir())


def test_a_distance_knows_what_is_not_finite() -> None:
    assert linear_gpu.distance(torch.tensor([1.0, float("nan")]), torch.ones(2)) == float("inf")
    assert linear_gpu.distance(torch.tensor([1.0, 1.0]), torch.ones(2).double()) == 0


def test_torchs_own_operations_are_the_layer() -> None:
    layer = cases.Layer("m", "l", 6, 8, gated=True, normed=True)
    given = linear_gpu.Tensors(torch.randn(3, 8).bfloat16(), torch.ones(8).bfloat16(), None)
    weight = torch.randn(12, 8).bfloat16()
    x = given.x.double()
    y = x / (x.square().mean(-1, keepdim=True) + linear_gpu.EPS).sqrt() @ weight.double().t()
    want = torch.nn.functional.silu(y[:, :6]) * y[:, 6:]
    assert linear_gpu.distance(linear_gpu.by_torch(layer, given, weight, torch.float64), want) < 1e-12
    assert linear_gpu.distance(linear_gpu.by_torch(layer, given, weight), want) < 2e-2


def test_a_page_without_times_has_its_circumstances() -> None:
    page = linear_report.page([], Circumstances("a card", {"torch": "2"}, "abc", "cmd"), ["a note"])
    assert "a card" in page
    assert "- a note" in page
