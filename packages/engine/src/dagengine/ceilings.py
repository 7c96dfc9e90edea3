"""What the device can do at best, measured where a model runs, so that times can be set beside it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

GPU_BYTES = 4 << 30
CPU_BYTES = 256 << 20
WARM_UP = 3


def read_bandwidth(device: torch.device, repeats: int = 9) -> list[float]:
    """Bytes a second read from memory: `repeats` trials of the fastest of torch's own ways.

    The ways are a sum, a maximum, and a copy, whose bytes count twice as it writes as many, over 4 GiB on a GPU (less
    where less is free) and 256 MiB on a CPU: both more than any cache holds.
    """
    num_bytes = CPU_BYTES
    if device.type == "cuda":
        num_bytes = min(GPU_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.ones(num_bytes // 8192 * 2048, dtype=torch.float32, device=device)
    rows, half = source.view(1024, -1), source.numel() // 2
    ways: list[tuple[int, Callable[[], object]]] = [
        (source.nbytes, partial(rows.sum, 1)),
        (source.nbytes, source.max),
        (source.nbytes, partial(source[:half].copy_, source[half:])),
    ]
    found = []
    for size, way in ways:
        for _ in range(WARM_UP):
            way()
        found.append([size / _seconds(way, device) for _ in range(repeats)])
    del source, rows, ways, way
    release_memory(device)
    return max(found, key=median)


def release_memory(device: torch.device) -> None:
    """Give back what nothing holds any more: an engine that was closed, tensors of a measurement."""
    gc.collect()
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


def _seconds(way: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        way()
        return time.perf_counter() - begin
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    way()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3
