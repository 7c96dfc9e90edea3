"""tools/bench/transfers: what it covers, what it writes, which bars it holds up. Its rates need a GPU."""

from __future__ import annotations

import json

import pytest

from bench import transfers, transfers_report
from bench.kernels_record import Circumstances, Figure, dump_lines
from bench.transfers_gpu import BARS, EXTENTS, OTHERS, QUICK, SHAPES, Case, contenders, kv
from bench.transfers_report import BACKGROUND, CHOSEN, DEVICE_RATE, RATE, STEPS

WHERE = Circumstances("a GPU", {"torch": "2"}, "abc", "tools/bench/transfers")


def figure(case: str, way: str, metric: str, value: float, baseline: float) -> Figure:
    return Figure.of(case, way, metric, [value], "GB/s").against("peak", baseline)


def test_the_sweep_covers_extents_from_4_kib_to_64_mib_and_the_shapes_of_models() -> None:
    sizes = [transfers_report.extent_bytes(case.name) for case in EXTENTS]
    assert sizes == [case.page_bytes for case in EXTENTS] == [4096 << shift for shift in range(15)]
    assert kv("8B", 32, 8, 128, 64) == Case("8B, page size 64", 32, 256 << 10)
    assert {case.name for case in QUICK} < {case.name for case in (*EXTENTS, *SHAPES)}
    assert len({case.name for case in (*EXTENTS, *SHAPES)}) == len(EXTENTS) + len(SHAPES)
    assert all({"direct", "kernel"} <= {*contenders(case)} for case in EXTENTS[:8])
    assert all({"staged", "kernel"} <= {*contenders(case)} for case in SHAPES)
    assert len({(way.case.name, way.name) for way in (*BARS, *OTHERS)}) == len(BARS) + len(OTHERS)


@pytest.mark.parametrize(
    ("case", "rates", "expected"),
    [
        ("extents of 512 KiB, store", {CHOSEN: 45.1, "kernel": 50.0}, 0),
        ("extents of 512 KiB, store", {CHOSEN: 44.9, "kernel": 30.0}, 1),
        ("extents of 256 KiB, load", {CHOSEN: 28.0, "kernel": 31.0, "direct": 10.0}, 0),
        ("extents of 256 KiB, load", {CHOSEN: 27.8, "kernel": 31.0, "direct": 10.0}, 1),
        ("8B, page size 64, load", {CHOSEN: 27.8, "staged": 31.0}, 1),
        ("8B, page size 64, load", {"staged": 31.0}, 0),
    ],
)
def test_a_rate_below_its_bar_is_told(case: str, rates: dict[str, float], expected: int) -> None:
    figures = [figure(case, way, RATE, rate, 50.0) for way, rate in rates.items()]
    figures += [figure(case, way, DEVICE_RATE, 40.0, 50.0) for way in rates]
    missed = transfers_report.missed(figures)
    assert len(missed) == expected
    assert all(case in line for line in missed)


def test_steps_that_copies_slow_down_are_told() -> None:
    for way, steps, expected in ((BACKGROUND, 95.1, 0), (BACKGROUND, 94.9, 1), (CHOSEN, 80.0, 0)):
        figures = [figure("8B, store beside steps", way, STEPS, steps, 100.0)]
        assert len(transfers_report.missed(figures)) == expected


def test_the_page_has_a_row_for_every_contender() -> None:
    figures = [
        Figure.of("ceilings", "one pinned copy", "store", [50.0], "GB/s"),
        figure("extents of 4 KiB, store", CHOSEN, RATE, 12.0, 50.0),
        figure("extents of 4 KiB, store", "direct", RATE, 3.0, 50.0),
        figure("extents of 4 KiB, store", "direct", DEVICE_RATE, 4.0, 50.0),
        figure("8B, store beside steps", CHOSEN, STEPS, 97.0, 100.0),
    ]
    page = transfers_report.page(figures, WHERE, ["Left out."])
    assert "| extents of 4 KiB, store | TorchTransfer | 12 | 24.0% |  |  |  |" in page
    assert "| extents of 4 KiB, store | direct | 3 | 6.0% | 8.0% |  |  |" in page
    assert "| 8B, store beside steps | TorchTransfer |  |  |  |  | 97.0% |" in page
    assert "store 50 GB/s" in page and "- Left out." in page
    assert len([json.loads(line) for line in dump_lines(figures, WHERE).splitlines()]) == 5


def test_numbers_that_measure_nothing_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--repeats", "0"], ["--megabytes", "0"]):
        assert transfers.main(arguments) == 2
    assert "at least 1" in capsys.readouterr().err
