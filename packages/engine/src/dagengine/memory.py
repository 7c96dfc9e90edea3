"""How many KV pages a device's memory holds. Knows sizes; allocates nothing.

    CPU   `kv_memory_gib`, by default 2 GiB
    CUDA  of the card's memory `gpu_memory_utilization`, less what is taken once the weights are loaded (theirs, and
          other processes'), less the reserve below

The reserve is what a step needs beside weights and pages, for the largest step that the configuration allows: T =
`max_num_batched_tokens` rows, of which R = `max_num_seqs` are sampled from, in a dtype of b bytes:

    T b (4 H + 2 (Hq + 2 Hkv) D + 2 Hq D + 3 I)     one layer's activations, and the residual stream
    20 R V                                          logits in float32, and as many copies as sampling sorts and sums
    4 T Hq (D + 1) N                                with `batch_invariant`: attention's partial sums, of N parts of 4096
                                                    tokens of `max_model_len`, where that is more than one
    768 MiB                                         captured graphs, workspaces of libraries, attention's partial sums,
                                                    128 MiB of buffers for copies to and from a host tier
"""

from __future__ import annotations

from pathlib import Path

import torch

from dagengine_kernels.fused.cuda.attend import INVARIANT_CHUNK_KEYS
from dagengine_positions import ModelGeometry

from .config import DEFAULT_GPU_MEMORY_UTILIZATION, DEFAULT_KV_MEMORY_GIB, EngineConfig
from .errors import DagError

FIXED_RESERVE = 768 << 20
BYTES_PER_LOGIT = 20


def page_bytes(geometry: ModelGeometry, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page of K and V over all layers."""
    numbers = sum(2 * g.num_kv_heads * g.head_dim * len(g.layers) for g in geometry.groups)
    return numbers * dtype.itemsize * page_size


def step_reserve(
    geometry: ModelGeometry, config: EngineConfig, dtype: torch.dtype, max_model_len: int
) -> int:
    """Bytes that a step may need beside weights and pages; the formula is the module's."""
    assert config.max_num_batched_tokens is not None and config.max_num_seqs is not None
    heads, kv_heads, dim = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
    per_row = 4 * geometry.hidden_size + (4 * heads + 4 * kv_heads) * dim + 3 * geometry.intermediate_size
    rows = config.max_num_batched_tokens * dtype.itemsize * per_row
    parts = -(-max_model_len // INVARIANT_CHUNK_KEYS) if config.batch_invariant else 1
    if parts > 1:
        rows += 4 * config.max_num_batched_tokens * heads * (dim + 1) * parts
    return rows + BYTES_PER_LOGIT * config.max_num_seqs * geometry.vocab_size + FIXED_RESERVE


def num_pages(
    geometry: ModelGeometry,
    config: EngineConfig,
    dtype: torch.dtype,
    max_model_len: int,
    memory: tuple[int, int] | None = None,
) -> int:
    """Pages of the pool: as many as asked for, or as memory allows, and no more than all sequences can fill.

    Args:
        config: with the device's defaults in it (`EngineConfig.on`).
        memory: free and total bytes of a GPU, with the weights loaded; None on a CPU.

    Raises:
        DagError: `capacity` or `invalid_request`, naming the option that leaves no room for a page.
    """
    if config.kv_pages is not None:
        return config.kv_pages
    size = page_bytes(geometry, config.page_size, dtype)
    assert config.max_num_seqs is not None
    enough = config.max_num_seqs * -(-max_model_len // config.page_size)
    if config.kv_memory_gib is not None or memory is None:
        gib = config.kv_memory_gib or DEFAULT_KV_MEMORY_GIB
        pages = int(gib * 2**30) // size
        if pages < 1:
            raise DagError("invalid_request", "kv_memory_gib is too small for a single page", "kv_memory_gib")
        return min(pages, enough)
    free, total = memory
    fraction = config.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION
    reserve = step_reserve(geometry, config, dtype, max_model_len)
    left = int(total * fraction) - (total - free) - reserve
    if left < size:
        message = (
            f"{fraction:g} of {gib_of(total)} leaves no room for a KV page: {gib_of(total - free)} are taken and "
            f"{gib_of(reserve)} are reserved for a step; raise it, or lower max_num_batched_tokens or max_num_seqs"
        )
        raise DagError("capacity", message, "gpu_memory_utilization")
    return min(left // size, enough)


def num_host_pages(geometry: ModelGeometry, config: EngineConfig, dtype: torch.dtype) -> int:
    """Pages of the host tier that `cpu_kv_gib` asks for; 0 if it is 0.

    Raises:
        DagError: naming `cpu_kv_gib`: `invalid_request` if it is too small for a page, `capacity` if the host has not
            so much memory left.
    """
    if not config.cpu_kv_gib:
        return 0
    asked = int(config.cpu_kv_gib * 2**30)
    size = page_bytes(geometry, config.page_size, dtype)
    if asked < size:
        message = f"{config.cpu_kv_gib:g} GiB hold no KV page, which takes {size} bytes"
        raise DagError("invalid_request", message, "cpu_kv_gib")
    left = host_memory_left()
    if left is not None and asked > left:
        message = f"{gib_of(asked)} are asked for, and the host has {gib_of(left)} left"
        raise DagError("capacity", message, "cpu_kv_gib")
    return asked // size


def host_memory_left(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Bytes of memory that this process may still take, by Linux' own account; None where there is none.

    Page cache that is not in use counts as left, of the machine as of the group.
    """
    left: list[int] = []
    try:
        found = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        left.append(int(found["MemAvailable"].split()[0]) << 10)
    except (OSError, ValueError, KeyError):
        pass
    try:
        most = (cgroup / "memory.max").read_text().strip()
        if most != "max":
            taken = int((cgroup / "memory.current").read_text())
            left.append(int(most) - taken + _inactive_file(cgroup / "memory.stat"))
    except (OSError, ValueError):
        pass
    return max(0, min(left)) if left else None


def _inactive_file(stat: Path) -> int:
    """Bytes of a group's page cache that the kernel takes back first; 0 where there is no account of them."""
    try:
        found = dict(line.split() for line in stat.read_text().splitlines())
        return int(found["inactive_file"])
    except (OSError, ValueError, KeyError):
        return 0


def gib_of(num_bytes: int) -> str:
    """Bytes for people."""
    return f"{num_bytes / 2**30:.1f} GiB"
