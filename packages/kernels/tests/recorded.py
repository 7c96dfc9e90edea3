"""A driver that writes launches down: tensors of the CPU pass for a device's, nothing is compiled and nothing runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from dagengine_kernels import AppendPlan, cuda_linear
from dagengine_kernels.cuda_linear import CudaLinear
from dagengine_kernels.fused.cuda import (
    driver,
    gate,
    gated,
    gemv,
    merge,
    norm,
    products,
    skinny,
    streamed,
    tiled,
)
from dagengine_kernels.fused.cuda.attend import CudaExecutor

SMS = 132
STREAM = 11


@dataclass(frozen=True)
class Launched:
    """One launch.

    Attributes:
        kernel: its source, name and macros.
        layout: grid, block, bytes of shared memory, pdl, cluster.
        params: the kernel's struct.
    """

    kernel: tuple[Any, ...]
    layout: tuple[Any, ...]
    stream: int
    params: bytes


@dataclass
class Recorder:
    """What the driver was asked for.

    Attributes:
        launched: in order.
        maps: the arguments of every tensor map, by the mark that it begins with.
    """

    launched: list[Launched] = field(default_factory=list)
    maps: dict[int, tuple[Any, ...]] = field(default_factory=dict)

    CudaError = RuntimeError

    def Module(self, cubin: tuple[Any, ...], device: int | None) -> Any:
        return SimpleNamespace(function=lambda name: self._function((*cubin, name)))

    def _function(self, kernel: tuple[Any, ...]) -> Any:
        def launch(
            grid: Any, block: Any, smem: int, stream: int, params: Any, pdl: bool, cluster: Any
        ) -> None:
            self.launched.append(Launched(kernel, (grid, block, smem, pdl, cluster), stream, bytes(params)))

        return SimpleNamespace(name=kernel[-1], launch=launch)

    def tensor_map(self, *given: Any) -> bytes:
        self.maps[len(self.maps) + 1] = given
        return len(self.maps).to_bytes(8, "little") + bytes(120)

    def map_of(self, words: Any) -> tuple[Any, ...]:
        """What the tensor map in a struct was made of."""
        return self.maps[int.from_bytes(bytes(words)[:8], "little")]

    def take(self) -> list[Launched]:
        """The launches since the last time."""
        taken, self.launched = self.launched, []
        return taken


KEPT = (
    gate._kernel,
    gated._kernel,
    gated._prepared,
    gemv._kernel,
    merge._kernel,
    norm._launch,
    products.map_of,
    skinny._kernel,
    streamed._kernel,
    tiled._kernel,
)


@contextmanager
def recording() -> Iterator[Recorder]:
    recorder = Recorder()

    def sources(source: str, macros: dict[str, Any], arch: str) -> tuple[Any, ...]:
        return source, tuple(sorted(macros.items())), arch

    with ExitStack() as stack:
        for target, name, value in (
            (driver, "_native", lambda: recorder),
            (driver, "cubin", sources),
            (driver, "_kernels", {}),
            (driver, "_modules", {}),
            (torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM),
            (norm, "DEVICE", "cpu"),
            (cuda_linear, "DEVICE", "cpu"),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
            (torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=SMS)),
            (AppendPlan, "implementation", "cuda"),
            (CudaLinear, "unavailable", staticmethod(lambda weight: None)),
            (CudaExecutor, "unavailable", classmethod(lambda cls, device: None)),
            (CudaExecutor, "capabilities", replace(CudaExecutor.capabilities, devices=("cpu",))),
        ):
            stack.enter_context(patch.object(target, name, value, create=target is torch._C))
        for kept in KEPT:
            kept.cache_clear()
        try:
            yield recorder
        finally:
            for kept in KEPT:
                kept.cache_clear()
