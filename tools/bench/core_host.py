"""What a whole decode step costs the host: EngineCore.step() over a device that does nothing.

    PYTHONPATH=tools python -m bench.core_host

Scheduling, launch, sampling of greedy rows, collection of the step before, commit and events, in microseconds of CPU:
the median of all steps, the median of those planned anew, and how many these were. Works are out of phase: each
needs its next page at another step. What runs is the product but for the model, the graphs and CUDA's own calls (see
`bench.runner_host`); answers are token ids.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from dagengine import SamplingParams
from dagengine.build import assemble
from dagengine.config import EngineConfig
from dagengine.core import EngineCore
from dagengine.cuda_runner import CudaRunner
from dagengine.request import Request
from dagengine.runner import Chunk
from dagengine_kernels import AttentionBackend
from dagengine_positions import geometry_from_config

from .runner_host import CONTEXT, MODEL, PAGE_SIZE, NoGraph, PlanningBackend, without_kernels

MOST = 256
VOCAB = 64


class HostRunner(CudaRunner):
    """Prefills nothing."""

    def _launch_mixed(
        self, chunks: Sequence[Chunk], backend: AttentionBackend, slots: object, pending: Tensor | None
    ) -> Tensor:
        return torch.zeros(sum(chunk.samples for chunk in chunks), VOCAB)

    _launch_padded = _launch_mixed  # type: ignore[assignment]


class CountingBackend(PlanningBackend):
    def __init__(self) -> None:
        super().__init__()
        self.num_plans = 0

    def plan(self, *arguments: object, **options: object):  # type: ignore[no-untyped-def,override]
        self.num_plans += 1
        return super().plan(*arguments, **options)  # type: ignore[arg-type]


def make(num_works: int, steps: int) -> tuple[EngineCore, CountingBackend]:
    """A core with so many requests past their prefill, and its backend."""
    pages = num_works * (-(-(CONTEXT + steps) // PAGE_SIZE) + 4)
    config = EngineConfig(
        device="cpu",
        max_num_seqs=MOST,
        max_num_batched_tokens=8192,
        page_size=PAGE_SIZE,
        kv_pages=pages,
        attention_backend="reference",
        overlap=True,
    )
    core = assemble(None, geometry_from_config(MODEL), config, identity="none", dtype=torch.bfloat16)  # type: ignore[arg-type]
    plain, backend = core._runner, CountingBackend()
    runner = HostRunner(
        plain.model,
        plain.geometry,
        plain.arena,  # type: ignore[arg-type]
        max_positions=core.max_model_len,
        device=plain.device,
        max_num_seqs=MOST,
        capture=lambda warm_up, body: NoGraph(),
    )
    runner._logits = torch.zeros(MOST, VOCAB)
    core._runner = core._pipeline._runner = runner
    core._backends[core.default_backend] = backend
    params = SamplingParams(max_tokens=steps + 64, temperature=0.0, ignore_eos=True)
    for number in range(num_works):
        length = CONTEXT + number * 37 % PAGE_SIZE
        prompt = tuple((number + place * (number + 1)) % VOCAB for place in range(length))
        core.submit(Request(str(number), prompt, params))
    while any(work.remaining > 1 for work in core._scheduler.running) or core.num_waiting:
        core.step()
    for _ in range(3):
        core.step()
    gc.collect()
    gc.freeze()
    return core, backend


def measure(num_works: int, steps: int) -> tuple[list[float], list[float]]:
    """Microseconds of every step, and of those that were planned anew."""
    core, backend = make(num_works, steps)
    times: list[float] = []
    planned: list[float] = []
    for _ in range(steps):
        before = backend.num_plans
        began = time.thread_time()
        core.step()
        times.append((time.thread_time() - began) * 1e6)
        if backend.num_plans > before:
            planned.append(times[-1])
    return times, planned


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--works", type=int, action="append")
    parser.add_argument("--profile", type=int, metavar="N", help="the N costliest functions, by own time")
    chosen = parser.parse_args()
    with without_kernels():
        print("works   median µs   mean µs   planned anew: steps   median µs")
        for num_works in chosen.works or (1, 8, 64, 256):
            if chosen.profile:
                profile(num_works, chosen.steps, chosen.profile)
                continue
            times, planned = measure(num_works, chosen.steps)
            anew = statistics.median(planned) if planned else float("nan")
            print(
                f"{num_works:5}   {statistics.median(times):9.0f}   {statistics.mean(times):7.0f}"
                f"   {len(planned):19}   {anew:9.0f}"
            )


def profile(num_works: int, steps: int, most: int) -> None:
    core, _ = make(num_works, steps)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        core.step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(most)


if __name__ == "__main__":
    main()
