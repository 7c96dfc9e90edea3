"""tools/bench/kernels: checks hold backends to the definition, and find faults."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from bench import kernels_bars, kernels_checks, kernels_tables
from bench.kernels_record import Table
from dagengine_kernels import Capabilities, get_backend
from dagengine_kernels.conformance_cases import Case, definition
from dagengine_kernels.segmented import SegmentedBackend

LARGE = ("ragged", "many readers", "long decode", "prefills", "window over a prefill")


@pytest.mark.parametrize("name", [n for n in kernels_tables.BATCHES if n not in LARGE])
def test_the_truth_is_the_definition(name: str) -> None:
    config = kernels_checks.Config(torch.float64, 16, 2, 16)
    x = kernels_checks.inputs(kernels_tables.BATCHES[name](16), config, "cpu", seed=1, kv_heads=1)
    out, lse2 = kernels_checks.attend(x, None)
    case = Case(x.batch.table, x.shape, x.rotary, x.q, x.pages, x.sinks)
    want, want_lse2 = definition(case)
    assert np.allclose(out.numpy(), want, atol=1e-5)
    assert np.allclose(lse2.numpy(), want_lse2, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["segmented", "reference"])
def test_sound_backends_pass_every_batch(backend: str) -> None:
    """`segmented` rounds every part to bf16 before it merges them, so its errors are only near the bar."""
    config = kernels_checks.Config(torch.bfloat16, 64, 2, 16)
    for name in kernels_tables.BATCHES:
        if backend == "reference" and name in LARGE:
            continue
        found = kernels_checks.check(lambda: get_backend(backend), name, config, "cpu")
        assert found.failed is None
        assert found.refused is None
        assert found.same
        assert found.clean
        assert found.lse2 <= kernels_checks.LSE2
        assert found.ratio <= (1.5 if backend == "segmented" else 1.0)


class Broken(SegmentedBackend):
    """Does one thing wrong."""

    def __init__(self, fault: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.fault = fault

    def run(self, *arguments: object, **options: object) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.fault(*super().run(*arguments, **options))  # type: ignore[arg-type, misc]


class Narrow(SegmentedBackend):
    """Takes float32 only."""

    capabilities = Capabilities(devices=("cpu",), dtypes=(torch.float32,))


def _one_row_is_nan(out: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    out[-1, -1, -1] = math.nan
    return out, lse2


FAULTS = {
    "1 % off": lambda out, lse2: (out * 1.01, lse2),
    "natural LSE": lambda out, lse2: (out, lse2 * math.log(2)),
    "LSE off by 0.1": lambda out, lse2: (out, lse2 + 0.1),
    "NaN": _one_row_is_nan,
    "other bits": lambda out, lse2: (out * (1 + 1e-2 * (torch.rand(()) < 2) * torch.rand(())), lse2),
    "rows that see nothing": lambda out, lse2: (out, lse2.nan_to_num(neginf=-1e30)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_backend_does_not_pass(fault: str) -> None:
    name = "rows that see nothing" if fault == "rows that see nothing" else "own order"
    config = kernels_checks.Config(torch.bfloat16, 64, 2, 16)
    found = kernels_checks.check(lambda: Broken(FAULTS[fault]), name, config, "cpu")
    assert not found.passed
    sound = kernels_checks.check(lambda: Broken(lambda *x: x), name, config, "cpu")
    assert sound.clean
    assert sound.same
    assert sound.ratio < 1.5


def test_what_a_backend_raises_is_a_failure_and_what_it_refuses_is_not() -> None:
    def fail(*_: object) -> tuple[Tensor, Tensor]:
        raise RuntimeError("illegal memory access")

    config = kernels_checks.Config(torch.bfloat16, 64, 2, 16)
    broken = kernels_checks.check(lambda: Broken(fail), "ragged", config, "cpu")
    assert broken.failed == "RuntimeError: illegal memory access"
    assert not broken.passed
    refused = kernels_checks.check(Narrow, "ragged", config, "cpu")
    assert refused.refused is not None
    assert refused.passed
    row = kernels_checks.as_row(refused, "x")
    bars = kernels_bars.evaluate(Table(()), [row])
    assert bars[0].passed is None, "a backend that refuses everything has shown nothing"


def test_configs_cover_dtypes_head_dims_pages_and_groups() -> None:
    listed = kernels_checks.configs((torch.bfloat16, torch.float16))
    assert len(listed) == 8
    assert {c.group for c in listed} == {1, 2, 4, 8}
    assert len(kernels_checks.configs((torch.bfloat16,), every=True)) == 16
