"""The runner for CUDA devices under the scripted model: functions stand for its graphs, a double for slots of plans.

Whatever the scheduler does, a replayed step reads exactly what the definition says: plans that advanced by themselves,
padding, ids that are taken from the step before, pages that change hands.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_model import MAX_POSITIONS, ScriptedBackend, assemble
from simulator import Settings, World, run_world

from dagengine import SamplingParams
from dagengine.core import EngineCore
from dagengine.cuda_runner import CudaRunner
from dagengine.request import Request

sys.path.append(str(Path(__file__).parents[2] / "packages" / "engine" / "tests"))

from stepping import FakeCapture, with_slots

Slotted = with_slots(ScriptedBackend)


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> list[EngineCore]:
    """Every core that is made runs on a CudaRunner in the CPU's memory."""
    made: list[EngineCore] = []

    def with_graphs(*arguments: Any, **options: Any) -> EngineCore:
        core = assemble(*arguments, **options)
        plain = core._runner
        core._runner = core._pipeline._runner = CudaRunner(
            plain.model,
            plain.geometry,
            plain.arena,
            max_positions=MAX_POSITIONS,
            device=torch.device("cpu"),
            max_num_seqs=core.config.max_num_seqs,
            capture=FakeCapture(),
        )
        core._backends[core.default_backend] = Slotted()
        made.append(core)
        return core

    monkeypatch.setattr("scripted_model.assemble", with_graphs)
    monkeypatch.setattr(logging.getLogger("dagengine"), "disabled", True)
    return made


@pytest.mark.parametrize("mode", ["at once", "overlap"])
@pytest.mark.parametrize(("page_size", "pages"), [(4, 64), (16, 7)])
def test_replayed_steps_compute_the_definition(
    cores: list[EngineCore], mode: str, page_size: int, pages: int
) -> None:
    replayed = planned = 0
    for seed in range(3):
        counts = run_world(
            seed, 6, Settings(page_size, pages, max_num_batched_tokens=32, max_num_seqs=8), mode
        )
        assert counts["answers"], counts
    for core in cores:
        backend: Any = core._backends[core.default_backend]
        replayed += backend.advanced
        planned += backend.num_plans
    assert len(cores) == 3 and replayed > 100, "hardly a step was replayed: the test would show little"
    assert planned < 3 * replayed


@pytest.mark.parametrize("mode", ["at once", "overlap"])
def test_a_steady_batch_is_planned_once_in_page_size_steps(cores: list[EngineCore], mode: str) -> None:
    """Eight works, each of which needs its next page at another step."""
    size, steps = 16, 96
    world = World(0, Settings(size, 160, max_num_batched_tokens=64, max_num_seqs=8), mode)
    (core,) = cores
    params = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
    for number in range(8):
        prompt = tuple(range(100 * number, 100 * number + 8 + 3 * number))
        world.submit(Request(str(number), prompt, params))
    while core.num_waiting or any(work.remaining > 1 for work in core._scheduler.running):
        world.step()
    for _ in range(3):
        world.step()
    backend: Any = core._backends[core.default_backend]
    planned = backend.num_plans
    for _ in range(steps):
        world.step()
    assert 1 <= backend.num_plans - planned <= steps // size
    assert core.num_running == 8
    world.run()
    world.clean_up()
