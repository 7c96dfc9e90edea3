"""What a decode step costs the host before it is queued: CudaRunner with a model, graphs and a device that do nothing.

    PYTHONPATH=tools python -m bench.runner_host

Steady steps (fill, upload, replay) and steps that are planned anew, at several numbers of works, in microseconds. The
planner and the slots are the product's, for 132 multiprocessors; copies go to the CPU's memory, and neither CUDA's own
calls (two copies, an event, a graph launch; a copy more for a plan) nor the scheduler is in it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dagengine.cuda_runner import CudaRunner
from dagengine.runner import Chunk
from dagengine.work import Work
from dagengine_kernels import AttentionBackend, AttentionShape, Capabilities, RotaryTable, SegmentTable
from dagengine_kernels.fused import planner
from dagengine_kernels.fused.cuda import attend
from dagengine_kernels.fused.cuda.slot import PlanSlot
from dagengine_kernels.fused.executor import FusedPlan
from dagengine_kernels.fused.plan import PlanParameters
from dagengine_kvstore import KVStore
from dagengine_kvstore.torch_arena import TorchArena
from dagengine_positions import geometry_from_config

PAGE_SIZE = 64
CONTEXT = 1024
SMS = 132
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 4,
    "vocab_size": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


class NoKernel:
    name = "none"

    def prepare(self, *layout: object, **options: object) -> None:
        pass


class NoGraph:
    def replay(self) -> None:
        pass


class PlanningBackend(AttentionBackend):
    """Plans as `fused` does on a GPU, and runs nothing."""

    name = "planning"
    capabilities = Capabilities(devices=("cpu",), dtypes=(torch.bfloat16,))

    def __init__(self) -> None:
        super().__init__()
        self._executor = attend.CudaExecutor()

    def new_slot(self, device: torch.device) -> PlanSlot:
        return PlanSlot(device)

    def plan(  # type: ignore[override]
        self,
        table: SegmentTable,
        shape: AttentionShape,
        rotary: RotaryTable | None,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        reserve: Any = None,
        slot: PlanSlot | None = None,
        settled: bool = False,
    ) -> FusedPlan:
        device = self._check_plan(table, shape, None, device, dtype, planner_checks=planner.checks_tables())
        heights = (attend.NARROW, attend.WIDE)
        parameters = PlanParameters(
            group=shape.group,
            num_kv_heads=shape.num_kv_heads,
            rows_per_tile=heights,
            workers=tuple(SMS * (attend.WIDE // rows) for rows in heights),
            boxes=1,
            min_chunk=4,
            work_cost=2,
            run_cost=1,
            owners=True,
        )
        arrays = planner.plan_table(table, parameters, reserve=reserve)
        plan = FusedPlan("fused", table, shape, None, device, dtype, arrays, "cuda", slot=slot)
        self._executor.load(plan)
        return plan

    def advance(self, plan: FusedPlan) -> None:
        pass

    def run(self, *arguments: Any, **options: Any) -> Tensor:
        raise AssertionError("nothing runs")


@contextmanager
def without_kernels() -> Iterator[None]:
    """Plans are loaded as on a GPU, but nothing is compiled."""
    with (
        patch.object(attend.driver, "kernel", lambda *arguments, **options: NoKernel()),
        patch.object(attend, "prepare", lambda device=None: None),
    ):
        yield


def make(num_works: int) -> tuple[CudaRunner, list[Work]]:
    geometry = geometry_from_config(MODEL)
    pages = num_works * (CONTEXT // PAGE_SIZE + 80) + 1
    arena = TorchArena(1, 1, PAGE_SIZE, 8, 4, torch.bfloat16)
    arena.num_pages = pages
    runner = CudaRunner(
        None,  # type: ignore[arg-type]
        geometry,
        arena,
        max_positions=8192,
        device=torch.device("cpu"),
        capture=lambda warm_up, body: NoGraph(),
    )
    runner._logits = torch.zeros(256, 64)
    store = KVStore(pages, PAGE_SIZE)
    works = []
    for number in range(num_works):
        writer = store.begin([], [], 0, signature={"model": str(number)})
        tokens = [1] * (CONTEXT + 1)
        writer.reserve(CONTEXT + number % PAGE_SIZE + 1)
        writer.append(tokens[:CONTEXT])
        works.append(Work(number, (0, number, 0), "planning", 0, tokens, writer, computed=CONTEXT))
    return runner, works


def step(runner: CudaRunner, works: list[Work], backend: AttentionBackend, pending: Tensor) -> float:
    """Microseconds that a launch takes; the token before it is pending."""
    chunks = []
    for row, work in enumerate(works):
        work.writer.reserve(1)
        chunks.append(Chunk(work, 1, tuple(work.writer.append([], 1)), samples=True, pending=row))
    began = time.perf_counter()
    runner.launch(chunks, backend, pending)
    took = time.perf_counter() - began
    for work in works:
        work.computed += 1
    return took * 1e6


def measure(num_works: int, steps: int, prepare: Callable[[CudaRunner, list[Work]], None]) -> float:
    """Median of a step."""
    runner, works = make(num_works)
    backend, pending = PlanningBackend(), torch.zeros(num_works, dtype=torch.int64)
    step(runner, works, backend, pending)
    times = []
    for _ in range(steps):
        prepare(runner, works)
        times.append(step(runner, works, backend, pending))
    return statistics.median(times)


def ahead(runner: CudaRunner, works: list[Work]) -> None:
    pass


def anew(runner: CudaRunner, works: list[Work]) -> None:
    runner._batch = None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    with without_kernels():
        print("works   steady µs   planned anew µs")
        for num_works in (1, 8, 64, 256):
            steady, planned = measure(num_works, steps, ahead), measure(num_works, steps, anew)
            print(f"{num_works:5}   {steady:9.0f}   {planned:15.0f}")


if __name__ == "__main__":
    main()
