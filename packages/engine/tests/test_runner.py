"""The runner alone: ids that the host does not know, norms of heads, and that nothing is waited for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dagengine import SamplingParams
from dagengine.build import assemble
from dagengine.config import EngineConfig
from dagengine.core import EngineCore
from dagengine.model_files import read_model
from dagengine.models.norm import RMSNorm
from dagengine.models.registry import model_class
from dagengine.request import FinishedEvent, Request
from dagengine.runner import Chunk, Runner
from dagengine.weights import DummySource
from dagengine.work import Work
from dagengine_kernels import AppendPlan, plan_append

GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"))
DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=GPU)]
each_device = pytest.mark.parametrize("device", DEVICES, ids=["cpu", "cuda"])


@pytest.fixture
def qwen3(model_folder: Path, tmp_path: Path) -> Path:
    """A family that norms its heads."""
    config = json.loads((model_folder / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def make(folder: Path, device: torch.device, **options: Any) -> EngineCore:
    files = read_model(folder)
    dtype = torch.float32
    source = DummySource(1, dtype=dtype, device=device, tied=files.geometry.tie_word_embeddings)
    model = model_class(files.geometry.architecture).load(files.geometry, source)
    config = EngineConfig(**{"page_size": 4, "kv_pages": 64, "seed": 1, **options})
    return assemble(model, files.geometry, config, identity="test", dtype=dtype, device=device)


def launched(core: EngineCore, tokens: list[int], *, known: int, pending: Tensor | None = None) -> Tensor:
    """Logits behind `tokens`, of which the runner is told the first `known`; the other one is in row 1 of `pending`."""
    writer = core.store.begin([], [], 0, signature={})
    writer.reserve(len(tokens))
    slots = tuple(writer.append(tokens[:known], len(tokens) - known))
    work = Work(1, (0, 0, 0), core.default_backend, 0, tokens[:known], writer)
    chunk = Chunk(work, len(tokens), slots, samples=True, pending=None if known == len(tokens) else 1)
    try:
        with torch.inference_mode():
            return core._runner.launch([chunk], core.attention.backend, pending).clone()
    finally:
        core.attention.backend.forget(work.id)
        writer.abort()


@each_device
def test_a_pending_id_is_taken_from_the_launch_before(qwen3: Path, device: torch.device) -> None:
    core = make(qwen3, device)
    ids = torch.tensor([17, 5, 99], device=device)
    expected = launched(core, [1, 2, 3, 5], known=4)
    assert torch.equal(launched(core, [1, 2, 3, 5], known=3, pending=ids), expected)
    assert not torch.equal(launched(core, [1, 2, 3, 5], known=3, pending=ids.flip(0) + 1), expected)


@each_device
def test_overlapping_steps_sample_the_same(qwen3: Path, device: torch.device) -> None:
    def answers(overlap: bool) -> dict[str, tuple[int, ...]]:
        core = make(qwen3, device, overlap=overlap, max_num_batched_tokens=8)
        for index in range(5):
            params = SamplingParams(max_tokens=6 + index, temperature=float(index % 2), seed=index)
            core.submit(Request(f"r{index}", tuple(range(index, 3 * index + 3)), params))
        ends: dict[str, tuple[int, ...]] = {}
        while core.has_work:
            for event in core.step():
                if isinstance(event, FinishedEvent):
                    ends[event.request_id] = event.choices[0].token_ids
            core.store.check()
        return ends

    assert answers(True) == answers(False)


class InTheWrite:
    """An append plan that says that it norms in its write, as the one of a GPU does."""

    implementation = "cuda"

    def __init__(self, plan: AppendPlan) -> None:
        self._plan = plan
        self.norms = 0

    def write(self, *args: Any, **options: Any) -> Tensor | None:
        self.norms += sum(options.get(name) is not None for name in ("q_norm", "k_norm"))
        return self._plan.write(*args, **options)


@each_device
def test_heads_are_normed_in_the_write_as_before_it(qwen3: Path, device: torch.device) -> None:
    runner: Runner = make(qwen3, device)._runner
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(6, heads, 8, generator=generator).to(device) for heads in (4, 2, 2))
    norms = [RMSNorm(1 + torch.rand(8, generator=generator).to(device), eps) for eps in (1e-5, 1e-3)]
    positions, slots = torch.arange(6, device=device), torch.arange(6, device=device) + 3
    plan = plan_append(positions, slots, runner._groups[0][2], 4)
    kv = runner.arena.layer(0)
    fused = InTheWrite(plan)
    found = runner._append(fused, 0, q, k, v, kv, *norms)  # type: ignore[arg-type]
    pages = kv.clone()
    assert fused.norms == 2
    kv.zero_()
    plan.write(norms[1](k), v, kv)
    torch.testing.assert_close(found, norms[0](q))
    torch.testing.assert_close(pages, kv)
    assert kv.abs().sum() > 0


def test_without_norms_in_the_write_they_come_before_it(qwen3: Path) -> None:
    runner: Runner = make(qwen3, torch.device("cpu"))._runner
    q, k, v = torch.randn(6, 4, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    norms = [RMSNorm(1 + torch.rand(8), eps) for eps in (1e-5, 1e-3)]
    plan = plan_append(torch.arange(6), torch.arange(6), runner._groups[0][2], 4)
    kv = runner.arena.layer(0)
    found = runner._append(plan, 0, q, k, v, kv, *norms)
    pages = kv.clone()
    plan.write(norms[1](k), v, kv)
    assert torch.equal(found, norms[0](q)) and torch.equal(pages, kv)


@pytest.mark.parametrize("device", [pytest.param(torch.device("cuda"), marks=GPU)], ids=["cuda"])
def test_packing_a_batch_waits_for_nothing(qwen3: Path, device: torch.device) -> None:
    core = make(qwen3, device)
    writer = core.store.begin([], [], 0, signature={})
    writer.reserve(4)
    slots = tuple(writer.append([1, 2, 3], 1))
    chunk = Chunk(Work(1, (0, 0, 0), "", 0, [1, 2, 3], writer), 4, slots, samples=True, pending=0)
    ids = torch.tensor([7], device=device)
    core._runner.build_input([chunk], ids)
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = core._runner.build_input([chunk], ids)
        done = core._runner.marker()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    done()
    assert batch.input_ids.tolist() == [1, 2, 3, 7]
