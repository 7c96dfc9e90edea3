"""What an engine is told when it is built. Values are resolved here once; nothing reads the environment later.

None stands for a default that depends on the device:

                              CPU           CUDA
    max_num_seqs              64            256
    max_num_batched_tokens    512           8192
    the pool                  2 GiB         what `gpu_memory_utilization` (0.9) of the card leaves
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from .errors import DagError, shown
from .sampling import MAX_SEED

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
LOAD_FORMATS = ("auto", "dummy")
DEFAULT_KV_MEMORY_GIB = 2.0
DEFAULT_GPU_MEMORY_UTILIZATION = 0.9
DEFAULT_KV_DIRECTORY_GIB = 64.0
DEFAULT_MAX_NUM_SEQS = {"cpu": 64, "cuda": 256}
DEFAULT_MAX_NUM_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}
DEVICE = re.compile(r"auto|cpu|cuda(:(0|[1-9][0-9]{0,3}))?")
MAX_COUNT = 2**31 - 1
OPTIONAL_COUNTS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "kv_pages",
    "threads",
    "max_waiting",
)
POOL_SIZES = ("kv_pages", "kv_memory_gib", "gpu_memory_utilization")


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine.

    Of `kv_pages`, `kv_memory_gib` and `gpu_memory_utilization` at most one may be given: each decides the pool.

    Attributes:
        device: `cpu`, `cuda`, `cuda:N`, or `auto`: the GPU if there is one and an attention backend runs the model
            there, otherwise the CPU; the log says why.
        dtype: of weights and KV; `auto` is the checkpoint's on a GPU, and float32 on a CPU.
        max_model_len: tokens a request may see and sample together; None is the model's maximum.
        max_num_seqs: most sequences in one step; None is the device's default.
        max_num_batched_tokens: most tokens computed in one step; longer prompts are computed in chunks. None is the
            device's default.
        page_size: tokens per KV page.
        kv_pages: pages in the pool.
        kv_memory_gib: size of the pool.
        gpu_memory_utilization: fraction of the card's memory, in (0, 1], that weights, pool and activations may
            take together with whatever else is on the card. Only on a GPU.
        cpu_kv_gib: host memory for pages that leave the device, and come back from there; pinned if that is a GPU. With
            0 there is none, and they are computed again.
        kv_directory: a folder where pages that reach the host are kept beyond the engine's life, for inputs of engines
            of the same model; evicted states are not brought back from there, and what is on the device only at the
            end is not kept. Needs `cpu_kv_gib`.
        kv_directory_gib: most that it takes there; None: 64.
        eviction: which states leave the device first: `lru`, `next_use` (those that requests will read last), or a
            registered policy.
        enforce_eager: launch every kernel by itself; never capture and replay CUDA graphs. Nothing to choose on a CPU.
        batch_invariant: the same bits for a request in any batch, on a CPU in bfloat16 and on a GPU in bfloat16 or
            float16; refused where the kernels cannot promise it. Costs shared reads.
        attention_backend: `auto` or the name of a registered backend.
        position_policy: for requests that name none.
        seed: of dummy weights and of the seeds drawn for requests that name none; None draws from the system.
        load_format: `auto` reads the folder's weights, `dummy` makes seeded random ones of its shape.
        overlap: launch a step before the results of the one before it are read, so that the host works while the device
            does; None: on a GPU.
        threads: of torch on the CPU; None leaves torch's choice.
        max_waiting: requests that may wait before `queue_full`; None is unbounded.
        max_failed_steps: failed steps in a row after which the engine declares itself dead.
    """

    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    page_size: int = 64
    kv_pages: int | None = None
    kv_memory_gib: float | None = None
    gpu_memory_utilization: float | None = None
    cpu_kv_gib: float = 0.0
    kv_directory: str | None = None
    kv_directory_gib: float | None = None
    eviction: str = "lru"
    enforce_eager: bool = False
    batch_invariant: bool = False
    attention_backend: str = "auto"
    position_policy: str = "linear"
    seed: int | None = None
    load_format: str = "auto"
    overlap: bool | None = None
    threads: int | None = None
    max_waiting: int | None = None
    max_failed_steps: int = 3

    def __post_init__(self) -> None:
        if not isinstance(self.device, str) or not DEVICE.fullmatch(self.device):
            rule = f"device must be auto, cpu, cuda or cuda:N, not {shown(self.device)}"
            raise DagError("invalid_request", rule, "device")
        _choice("dtype", self.dtype, DTYPES)
        _choice("load_format", self.load_format, LOAD_FORMATS)
        for name in ("page_size", "max_failed_steps"):
            _count(name, getattr(self, name))
        for name in OPTIONAL_COUNTS:
            if getattr(self, name) is not None:
                _count(name, getattr(self, name))
        if self.overlap is not None and not isinstance(self.overlap, bool):
            raise DagError(
                "invalid_request", f"overlap is true, false or None, not {shown(self.overlap)}", "overlap"
            )
        _below("kv_memory_gib", self.kv_memory_gib, 1e6, "a positive number of GiB")
        _below("gpu_memory_utilization", self.gpu_memory_utilization, 1.0, "a number above 0 and at most 1")
        if self.cpu_kv_gib != 0 or isinstance(self.cpu_kv_gib, bool):
            _below("cpu_kv_gib", self.cpu_kv_gib, 1e6, "0 or a positive number of GiB")
        _below("kv_directory_gib", self.kv_directory_gib, 1e6, "a positive number of GiB")
        if self.kv_directory is not None and (
            not isinstance(self.kv_directory, str) or not self.kv_directory or "\0" in self.kv_directory
        ):
            rule = f"kv_directory is the path of a folder, not {shown(self.kv_directory)}"
            raise DagError("invalid_request", rule, "kv_directory")
        for name, needed in (("kv_directory", self.cpu_kv_gib), ("kv_directory_gib", self.kv_directory)):
            if getattr(self, name) is not None and not needed:
                other = {"kv_directory": "cpu_kv_gib", "kv_directory_gib": "kv_directory"}[name]
                raise DagError("invalid_request", f"{name} needs {other}", name)
        given = [name for name in POOL_SIZES if getattr(self, name) is not None]
        if len(given) > 1:
            rule = f"{given[1]} cannot be given beside {given[0]}: each of them sets the size of the pool"
            raise DagError("invalid_request", rule, given[1])
        for name in ("enforce_eager", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                rule = f"{name} must be true or false, not {shown(getattr(self, name))}"
                raise DagError("invalid_request", rule, name)
        for name in ("attention_backend", "position_policy", "eviction"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise DagError("invalid_request", f"{name} is a name, not {shown(value)}", name)
        seed = self.seed
        if seed is not None and (
            isinstance(seed, bool) or not isinstance(seed, int) or not -MAX_SEED - 1 <= seed <= MAX_SEED
        ):
            message = f"seed must be an integer from {-MAX_SEED - 1} to {MAX_SEED}, not {shown(seed)}"
            raise DagError("invalid_request", message, "seed")

    def on(self, device_type: str) -> EngineConfig:
        """The same with the defaults of a device, `cpu` or `cuda`, in place of None."""
        return replace(
            self,
            max_num_seqs=self.max_num_seqs or DEFAULT_MAX_NUM_SEQS[device_type],
            max_num_batched_tokens=self.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS[device_type],
        )


def _below(name: str, value: object, most: float, rule: str) -> None:
    """Refuse a number that is not above 0 and at most `most`; None is no number."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        raise DagError("invalid_request", f"{name} must be {rule}, not {shown(value)}", name)


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise DagError(
            "invalid_request", f"{name} must be one of {', '.join(allowed)}, not {shown(value)}", name
        )


def _count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_COUNT:
        rule = f"must be an integer of at least 1 and at most {MAX_COUNT}, not {shown(value)}"
        raise DagError("invalid_request", f"{name} {rule}", name)
