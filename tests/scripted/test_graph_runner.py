"""The runner for CUDA devices under the scripted model: a step that is replayed reads exactly what the definition says.

Whatever the scheduler does: plans that advance by themselves, padding, ids that are taken from the step before, pages
that change hands. On the CPU functions stand for graphs, and slots of plans are a double's, or tensors as on a GPU.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import device_hash
import numpy as np
import pytest
import torch
from devices import DEVICES, on_gpu
from scripted_device import DeviceBackend
from scripted_model import (
    MAX_POSITIONS,
    VOCAB,
    ScriptedBackend,
    ScriptedModel,
    assemble,
    fold,
    geometry,
    mix,
    pick,
)
from simulator import Settings, World, run_world

from dagengine import ContextRef, Keep, SamplingParams
from dagengine.config import EngineConfig
from dagengine.core import EngineCore
from dagengine.cuda_runner import CudaRunner
from dagengine.devices import find_device
from dagengine.graphs import Capture, Graph
from dagengine.request import FinishedEvent, Request

sys.path.append(str(Path(__file__).parents[2] / "packages" / "engine" / "tests"))

from stepping import FakeCapture, FakeGraph, with_slots

Slotted = with_slots(ScriptedBackend)

KINDS = ["double", "cpu", on_gpu("cuda")]
GRAPHS_PER_WORLD = 6
MOST_TIGHT_WORLDS = 30
CONFIG = EngineConfig(kv_pages=20, page_size=4, max_num_batched_tokens=64)
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


@dataclass(eq=False)
class Counted:
    """A capture whose graphs count how often they are replayed."""

    capture: Capture
    replayed: int = 0

    def __call__(self, warm_up: Callable[[], None], body: Callable[[], None]) -> Graph:
        graph = self.capture(warm_up, body)

        def replay() -> None:
            self.replayed += 1
            graph.replay()

        return FakeGraph(replay)


@dataclass(eq=False)
class Cores:
    """Every core that was made.

    Attributes:
        kind: `double` and `cpu` run in the CPU's memory, `cuda` on a GPU.
    """

    kind: str
    made: list[EngineCore] = field(default_factory=list)
    captures: list[Counted] = field(default_factory=list)

    def make(self, model: Any, geometry: Any, config: Any, **options: Any) -> EngineCore:
        device = find_device("cuda" if self.kind == "cuda" else "cpu")
        if self.kind != "double":
            config = replace(config, attention_backend=DeviceBackend.name)
        core = assemble(model, geometry, config, device=device, **options)
        runner = core._runner
        if device.type == "cpu":
            runner = core._runner = core._pipeline._runner = CudaRunner(
                model,
                geometry,
                runner.arena,
                max_positions=MAX_POSITIONS,
                device=device,
                max_num_seqs=core.config.max_num_seqs,
                capture=FakeCapture(),
            )
        if self.kind == "double":
            core._backends[core.default_backend] = Slotted()
        assert type(runner) is CudaRunner and runner.graphs is not None
        self.captures.append(Counted(runner.graphs._capture))
        runner.graphs._capture = self.captures[-1]
        self.made.append(core)
        return core

    def backends(self) -> list[Any]:
        return [core._backend(core.default_backend) for core in self.made]

    def check(self) -> None:
        """Nothing was read that a page does not hold, also in rows that nobody asked for any more."""
        for backend in self.backends():
            if self.kind != "double":
                assert int(backend.wrong) == 0, "pages held something else than the tables said"

    def captured_mixed(self) -> list[int]:
        """Graphs of steps with chunks of several tokens that each core keeps; their keys say for how many logits."""
        return [sum(len(key) == 3 for key in core._runner.graphs._kept) for core in self.made]

    def count(self) -> tuple[int, int]:
        """Steps that were replayed, and batches that were planned."""
        replayed = sum(capture.replayed for capture in self.captures)
        return replayed, sum(backend.num_plans for backend in self.backends())


@pytest.fixture(params=KINDS)
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cores:
    """Every core that is made runs on a CudaRunner."""
    cores = Cores(request.param)
    monkeypatch.setattr("scripted_model.assemble", cores.make)
    monkeypatch.setattr(logging.getLogger("dagengine"), "disabled", True)
    return cores


@pytest.mark.parametrize("mode", ["at once", "overlap"])
@pytest.mark.parametrize(("page_size", "pages"), [(4, 64), (16, 7)])
def test_replayed_steps_compute_the_definition(cores: Cores, mode: str, page_size: int, pages: int) -> None:
    for seed in range(3):
        settings = Settings(page_size, pages, max_num_batched_tokens=32, max_num_seqs=8)
        counts = run_world(seed, GRAPHS_PER_WORLD, settings, mode)
        assert counts["answers"], counts
    cores.check()
    replayed, planned = cores.count()
    assert len(cores.made) == 3 and replayed > 100, "hardly a step was replayed: the test would show little"
    assert planned < 3 * replayed
    assert any(cores.captured_mixed()), "no step with a chunk of several tokens came twice"


@pytest.mark.parametrize("cores", ["double", "cpu", on_gpu("cuda")], indirect=True)
@pytest.mark.parametrize("mode", ["at once", "overlap"])
def test_a_steady_batch_is_planned_once_in_page_size_steps(cores: Cores, mode: str) -> None:
    """Eight works, each of which needs its next page at another step."""
    size, steps = 16, 96
    world = World(0, Settings(size, 160, max_num_batched_tokens=64, max_num_seqs=8), mode)
    (core,) = cores.made
    params = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
    for number in range(8):
        prompt = tuple(range(100 * number, 100 * number + 8 + 3 * number))
        world.submit(Request(str(number), prompt, params))
    while core.num_waiting or any(work.remaining > 1 for work in core._scheduler.running):
        world.step()
    for _ in range(3):
        world.step()
    (backend,) = cores.backends()
    planned = backend.num_plans
    for _ in range(steps):
        world.step()
    assert 1 <= backend.num_plans - planned <= steps // size
    assert core.num_running == 8
    world.run()
    world.clean_up()
    cores.check()


@pytest.mark.parametrize(
    "cores", [pytest.param("cpu", marks=pytest.mark.slow), on_gpu("cuda")], indirect=True
)
@pytest.mark.parametrize("mode", ["at once", "overlap"])
@pytest.mark.parametrize("part", range(4))
def test_random_graphs_in_random_engines_equal_the_definition(cores: Cores, mode: str, part: int) -> None:
    """Pages of 1, 3 and 16 tokens, pools that hold from barely one request to many, failed steps and aborts."""
    for seed in range(200 + 4 * part, 204 + 4 * part):
        assert run_world(seed, GRAPHS_PER_WORLD, mode=mode)["answers"]
    cores.check()


@pytest.mark.parametrize("cores", ["cpu", on_gpu("cuda")], indirect=True)
@pytest.mark.parametrize(("page_size", "pages"), [(1, 45), (3, 20), (16, 7)])
def test_tight_memory_preempts_and_restores(cores: Cores, page_size: int, pages: int) -> None:
    settings = Settings(page_size, pages, max_num_batched_tokens=16, max_num_seqs=8)
    counts: Counter[str] = Counter()
    happening = ("preemptions", "restored tokens", "evictions")
    for seed in range(MOST_TIGHT_WORLDS):
        if seed >= 3 and all(counts[happened] for happened in happening):
            break
        counts += run_world(seed, GRAPHS_PER_WORLD, settings, "overlap")
    assert all(counts[happened] for happened in happening), counts
    cores.check()


@pytest.mark.parametrize("device", DEVICES)
def test_the_hash_on_a_device_is_the_oracles(device: str) -> None:
    rng = np.random.default_rng(0)
    tokens, facts = rng.integers(0, VOCAB, 40), rng.integers(0, 1 << 31, 40)
    relative = rng.integers(-MAX_POSITIONS, 1, (50, 40))
    there = [torch.from_numpy(x).to(device) for x in (tokens, facts, relative)]
    h1, position = fold(mix(tokens, facts, relative)), np.arange(50)
    on_device = device_hash.fold(device_hash.mix(*there))
    assert np.array_equal(on_device.cpu().numpy(), h1)
    chosen = device_hash.pick(on_device, torch.from_numpy(position).to(device), VOCAB)
    for found, expected in zip(chosen, pick(h1, position), strict=True):
        assert np.array_equal(found.cpu().numpy(), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("part", "column"), [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 2), (1, 3)], ids=str
)
def test_a_page_that_holds_something_else_is_counted(device: str, part: int, column: int) -> None:
    """K is part 0; V, part 1, holds no fact in layer 0 yet."""
    core = Cores("cuda" if device == "cuda" else "cpu").make(
        ScriptedModel(), geometry(), CONFIG, identity="scripted", dtype=torch.float64
    )
    (first,) = run(core, Request("first", tuple(range(9)), None, keep=Keep()))
    state = ContextRef(state=first.choices[0].dag.state)
    (fine,) = run(core, Request("fine", (1, 2), GREEDY, (state,)))
    wrong = core._backend(core.default_backend).wrong
    assert fine.error is None and int(wrong) == 0
    core._runner.arena.layer(0)[:, part, 0, 2, column] += 1e-3
    (failed,) = run(core, Request("failed", (3, 4), GREEDY, (state,)))
    assert failed.error is not None and int(wrong) > 0


def run(core: EngineCore, request: Request) -> list[FinishedEvent]:
    core.submit(request)
    ends = []
    while core.has_work:
        ends += [event for event in core.step() if isinstance(event, FinishedEvent)]
    return ends
