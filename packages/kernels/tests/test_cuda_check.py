"""The compile gate: every CUDA kernel in use compiles for sm_90a without spills. Needs nvcc, no GPU."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

from dagengine_kernels.fused.cuda.driver import Variant

GATE = Path(__file__).parents[3] / "tools" / "cuda_check.py"

pytestmark = pytest.mark.skipif(not GATE.exists(), reason="the package is not tested in its repository")


@pytest.fixture(scope="module")
def gate():
    spec = importlib.util.spec_from_file_location("cuda_check", GATE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["cuda_check"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def nvcc():
    found = shutil.which("nvcc")
    if found is None:
        if os.environ.get("DAGENGINE_REQUIRE_NVCC") == "1":
            pytest.fail("DAGENGINE_REQUIRE_NVCC=1 and nvcc is not on PATH")
        pytest.skip("nvcc is not on PATH")
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "source",
    "append merge transform advance attend draw greatest gemv skinny tiled streamed gated norm gate".split(),
)
def test_kernels_compile_without_spills(gate, nvcc, source):
    built = gate.check(gate.listed([source]), nvcc)
    assert built
    for one in built:
        assert one.fault is None, one.line()
        assert one.registers > 0


def test_tilelang_kernels_are_gated(gate):
    """test_tilelang.py compiles them."""
    pytest.importorskip("tilelang")
    from dagengine_kernels.fused.tilelang import executor

    ((variant, text, options),) = gate.tilelang_listed(1)
    assert len(executor.variants()) > 1
    assert variant.source == "tilelang" and "__global__" in text and any("sm_90a" in o for o in options)


def test_every_cuda_source_is_gated(gate):
    folder = Path(importlib.util.find_spec("dagengine_kernels").origin).parent / "fused" / "csrc" / "cuda"
    assert {path.stem for path in folder.glob("*.cu")} == set(gate.SOURCES)


def test_a_spill_and_a_broken_source_are_faults(gate, nvcc):
    broken = gate.build(Variant("merge", "merge_parts", (("DTYPE", 2),)), nvcc)
    assert broken.fault == "does not compile"
    assert "HEAD_DIM" in broken.log
    told = (
        "ptxas info    : Compiling entry function 'other' for 'sm_90a'\n"
        "ptxas info    : Function properties for other\n"
        "    8 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Used 9 registers, used 0 barriers, 48 bytes smem\n"
        "ptxas info    : Compiling entry function 'mine' for 'sm_90a'\n"
        "ptxas info    : Function properties for mine\n"
        "    0 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 2 barriers, 1024 bytes smem\n"
    )
    spilled = gate.read_ptxas(Variant("x", "mine", ()), told)
    assert (spilled.registers, spilled.spill_bytes, spilled.shared_bytes) == (168, 12, 1024)
    assert spilled.fault == "spills 12 bytes"
    assert gate.read_ptxas(Variant("x", "mine", (), hot=False), told).fault is None
    assert gate.read_ptxas(Variant("x", "absent", ()), told).fault == "does not compile"


def test_a_missing_nvcc_skips_for_users_and_fails_in_ci(gate, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.delenv("CI", raising=False)
    assert gate.main([]) == 0
    assert gate.main(["--require"]) == 2
    monkeypatch.setenv("CI", "true")
    assert gate.main([]) == 2
    assert "not compiled" in capsys.readouterr().err
