"""The TileLang executor without a GPU: what it takes, how it fits the card, and that its kernels compile cleanly."""

import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dagengine_kernels import AttentionShape, KernelError, SegmentTable, SequenceSegments
from dagengine_kernels.fused.plan import INVISIBLE, WORK_BEGIN, WORK_END, PlanClass
from dagengine_kernels.fused.tilelang import executor
from dagengine_kernels.fused.tilelang.executor import TileLangExecutor
from dagengine_kernels.fused.tilelang.variant import FARTHEST

SHARED_PER_SM, SHARED_PER_CTA, RESERVED = 228 * 1024, 227 * 1024, 1024


def table(extents=((0, 0, 9, 0, 0),), position=8, page_size=64):
    return SegmentTable.from_sequences(
        [SequenceSegments(position, 1, extents, 1)], page_size=page_size, num_pages=4
    )


def shape(**options):
    return AttentionShape(**{"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "scale": 0.1, **options})


@pytest.mark.parametrize(
    ("field", "given", "heads", "dtype"),
    [
        ("page_size", table(page_size=16), shape(), torch.bfloat16),
        ("head_dim", table(), shape(head_dim=96), torch.bfloat16),
        ("dtype", table(), shape(), torch.float32),
    ],
)
def test_capabilities_refuse(field, given, heads, dtype):
    with pytest.raises(KernelError) as refused:
        TileLangExecutor.capabilities.check("fused", given, heads, "cuda", dtype)
    assert refused.value.code == "capability_missing"
    assert refused.value.field == field


def test_capabilities_take_pages_of_64():
    TileLangExecutor.capabilities.check("fused", table(), shape(), "cuda", torch.float16)


def test_no_gpu_is_a_reason():
    assert "cpu" in TileLangExecutor.unavailable(torch.device("cpu"))


@pytest.mark.parametrize(
    ("field", "given", "heads"),
    [
        ("num_heads", table(), shape(num_heads=32)),
        ("scale", table(), shape(scale=-1.0)),
        ("extents[0].DELTA", table([(0, 0, 9, 0, FARTHEST)]), shape()),
        ("q_positions", table(position=FARTHEST), shape()),
    ],
)
def test_parameters_refuse(field, given, heads):
    with pytest.raises(KernelError) as refused:
        TileLangExecutor().parameters(given, heads, torch.device("cuda", 0))
    assert refused.value.code == "capability_missing"
    assert refused.value.field == field


def test_a_wrong_tile_width_is_refused():
    with pytest.raises(KernelError) as refused:
        TileLangExecutor(keys=32)
    assert refused.value.field == "keys"


def test_the_mark_of_an_invisible_run_is_out_of_reach():
    assert INVISIBLE < -FARTHEST


@pytest.mark.parametrize("v", executor.variants(), ids=str)
def test_shared_memory_fits(v):
    tables = 12 * v.rows_per_tile + 32 * v.stages
    assert v.stages >= 2
    assert v.smem_bytes + tables + 1024 <= SHARED_PER_CTA
    assert v.ctas_per_sm * (v.smem_bytes + tables + 1024 + RESERVED) <= SHARED_PER_SM


def test_wide_tiles_are_for_pages_with_many_readers():
    def readers(count, shared):
        pages = [(0, 0, 64, 0, 0)] if shared else None
        listed = [SequenceSegments(70, 1, pages or [(b, 0, 64, 0, 0)], b) for b in range(count)]
        return SegmentTable.from_sequences(listed, page_size=64, num_pages=count)

    assert executor.widely_shared(readers(32, True), 4)
    assert not executor.widely_shared(readers(32, False), 4)
    assert not executor.widely_shared(readers(16, True), 4)
    assert not executor.widely_shared(SegmentTable.from_sequences([], page_size=64, num_pages=1), 4)


def test_long_works_come_first():
    works = np.array([[0, 0, 0, 3, -1], [0, 1, 3, 10, 0], [1, 0, 10, 13, 8], [1, 1, 13, 20, -1]], np.int32)
    given = PlanClass(64, np.zeros((2, 16), np.int32), works, np.array([0, 2, 4], np.int32))
    found = executor.longest_first(given)
    lengths = found[:, WORK_END] - found[:, WORK_BEGIN]
    assert lengths.tolist() == [7, 7, 3, 3]
    assert {tuple(row) for row in found.tolist()} == {tuple(row) for row in works.tolist()}


def test_a_work_without_tiles_is_an_error():
    works = np.array([[0, 0, 3, 3, -1]], np.int32)
    with pytest.raises(AssertionError, match="without KV tiles"):
        executor.longest_first(PlanClass(64, np.zeros((1, 16), np.int32), works, np.array([0, 1], np.int32)))


def test_arrays_share_one_upload():
    arrays = {
        "a": np.arange(5, dtype=np.int32),
        "b": np.zeros((0, 4), np.int32),
        "c": np.ones((2, 3), np.int32),
    }
    loaded = executor.upload(arrays, torch.device("cpu"))
    assert loaded["a"].tolist() == [0, 1, 2, 3, 4]
    assert loaded["b"].shape == (1, 4)
    assert loaded["c"].tolist() == [[1, 1, 1], [1, 1, 1]]
    for name in arrays:
        assert loaded[name].is_contiguous()
        assert (loaded[name].data_ptr() - loaded["indices"].data_ptr()) % 16 == 0


@pytest.fixture(scope="module")
def ptxas():
    """Source text -> what ptxas says of it; skips where TileLang or nvcc is missing."""
    nvcc = shutil.which("nvcc")
    required = os.environ.get("DAGENGINE_REQUIRE_TILELANG") == "1"
    for name, found in (("tilelang", importlib.util.find_spec("tilelang")), ("nvcc", nvcc)):
        if found is None:
            (pytest.fail if required else pytest.skip)(f"{name} is not installed")
    root = Path(importlib.util.find_spec("tilelang").origin).parent
    includes = [f"-I{root / 'src'}", f"-I{root / '3rdparty' / 'cutlass' / 'include'}"]

    def build(source, folder):
        from dagengine_kernels.fused.tilelang.compiled import FLAGS

        path = folder / "kernel.cu"
        path.write_text(source)
        undefined = [
            f"-U__CUDA_NO_{x}__" for x in ("HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_CONVERSIONS")
        ]
        command = [nvcc, "-gencode=arch=compute_90a,code=sm_90a", "-cubin", "-std=c++17", "-Xptxas", "-v"]
        command += [*FLAGS, *undefined, *includes, "-o", str(folder / "kernel.cubin"), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stderr

    return build


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "v", executor.variants()[:4], ids=str
)  # tools/cuda_check.py --tilelang builds them all
def test_variants_compile_without_spills(v, ptxas, tmp_path):
    from dagengine_kernels.fused.tilelang.compiled import source

    said = ptxas(source(v), tmp_path)
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", said)]
    assert spilled
    assert not any(spilled), said
    assert "serialized" not in said, said
    registers = int(re.search(r"Used (\d+) registers", said)[1])
    assert registers * v.threads * v.ctas_per_sm <= 65536


def test_options_that_a_plan_lacks_cost_no_kernel():
    """Kernels are named by what they are compiled for, and by nothing else."""
    known = {str(executor.variant(torch.bfloat16, shape(scale=s), None, 64, 1)) for s in (0.1, 0.2)}
    assert len(known) == 1
    capped = executor.variant(torch.bfloat16, shape(softcap=3.0), None, 64, 1)
    assert capped == replace(capped, capped=True)
    assert str(capped) not in known
