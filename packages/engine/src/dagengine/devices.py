"""Which device a model runs on, in which dtype, and what this device is. Knows torch's devices, no requests.

`auto` is the GPU that torch takes by default, if there is one on which an attention backend runs the model;
otherwise it is the CPU. The reason is kept for the log.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

import torch

from dagengine_kernels.errors import UNSUPPORTED
from dagengine_kvstore.torch_arena import TorchArena
from dagengine_positions import ModelGeometry

from .attention import choose_backend
from .config import EngineConfig
from .errors import DagError
from .runner import Runner

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class Placement:
    """Where a model runs, in what, and why there."""

    device: torch.device
    dtype: torch.dtype
    reason: str


def place(config: EngineConfig, geometry: ModelGeometry, checkpoint_dtype: str | None) -> Placement:
    """The device and dtype of a configuration.

    Args:
        checkpoint_dtype: what `auto` is on a GPU; None, where nothing says it, is float32.

    Raises:
        DagError: `unsupported` or `invalid_request` naming `device`, for a device that this machine does not have.
    """
    if config.device != "auto":
        return _on(find_device(config.device), config, checkpoint_dtype, "asked for")
    if (missing := why_no_cuda()) is not None:
        return _on(torch.device("cpu"), config, checkpoint_dtype, missing)
    found = _on(find_device("cuda"), config, checkpoint_dtype, "the GPU is there")
    refused = _refusal(config, geometry, found)
    if refused is None:
        return found
    return _on(
        torch.device("cpu"), config, checkpoint_dtype, f"no attention backend runs on the GPU: {refused}"
    )


def why_no_cuda() -> str | None:
    """Why no CUDA device can be used, or None."""
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return None


def use_device(device: torch.device) -> None:
    """Make a GPU the current one of the calling thread, which own kernels are launched on. A CPU needs nothing."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def describe(device: torch.device) -> tuple[str, dict[str, str]]:
    """A line on the GPU, and the versions of driver and CUDA; an empty line and nothing for a CPU."""
    if device.type != "cuda":
        return "", {}
    found = torch.cuda.get_device_properties(device)
    line = f"{found.name}, {found.multi_processor_count} SMs, {found.total_memory / 2**30:.0f} GiB"
    versions = {"cuda": str(torch.version.cuda)}
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        )
        versions["driver"] = done.stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        pass
    return line, versions


def find_device(name: str) -> torch.device:
    """The device of a name: `cpu`, `cuda`, `cuda:N`, or `auto`, here the GPU wherever there is one.

    Raises:
        DagError: naming `device`: `unsupported` without CUDA, `invalid_request` for a GPU that is not there.
    """
    if name == "cpu" or (name == "auto" and why_no_cuda() is not None):
        return torch.device("cpu")
    if (missing := why_no_cuda()) is not None:
        raise DagError("unsupported", f"device {name} cannot be used: {missing}", "device")
    count = torch.cuda.device_count()
    index = int(name.partition(":")[2] or torch.cuda.current_device())
    if index >= count:
        known = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise DagError("invalid_request", f"there is no {name} here; there is {known}", "device")
    return torch.device("cuda", index)


def _on(device: torch.device, config: EngineConfig, checkpoint: str | None, reason: str) -> Placement:
    automatic = "float32" if device.type == "cpu" else checkpoint or "float32"
    return Placement(device, DTYPES[automatic if config.dtype == "auto" else config.dtype], reason)


def _refusal(config: EngineConfig, geometry: ModelGeometry, found: Placement) -> str | None:
    """Why the attention backend does not run there, tried on one page per layer without weights."""
    heads = geometry.groups[0]
    arena = TorchArena(
        geometry.num_layers,
        1,
        config.page_size,
        heads.num_kv_heads,
        heads.head_dim,
        found.dtype,
        found.device,
    )
    use_device(found.device)
    runner = Runner(None, geometry, arena, max_positions=config.page_size, device=found.device)  # type: ignore[arg-type]
    try:
        choose_backend(config.attention_backend, runner)
    except DagError as error:
        if error.code not in ("unsupported", UNSUPPORTED):
            raise
        return error.message
    return None
