"""What an engine is told when it is built. Values are resolved here once; nothing reads the environment later."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import DagError, shown
from .sampling import MAX_SEED

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
LOAD_FORMATS = ("auto", "dummy")
DEFAULT_KV_MEMORY_GIB = 2.0
MAX_COUNT = 2**31 - 1


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine.

    Attributes:
        dtype: of weights and KV; `auto` is the checkpoint's on a GPU, and float32 on a CPU.
        max_model_len: tokens a request may see and sample together; None is the model's maximum.
        max_num_seqs: most sequences in one step.
        max_num_batched_tokens: most tokens computed in one step; longer prompts are computed in chunks.
        page_size: tokens per KV page.
        kv_pages: pages in the pool; None derives them from `kv_memory_gib`.
        kv_memory_gib: size of the pool when `kv_pages` is None.
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

    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    page_size: int = 64
    kv_pages: int | None = None
    kv_memory_gib: float = DEFAULT_KV_MEMORY_GIB
    attention_backend: str = "auto"
    position_policy: str = "linear"
    seed: int | None = None
    load_format: str = "auto"
    overlap: bool | None = None
    threads: int | None = None
    max_waiting: int | None = None
    max_failed_steps: int = 3

    def __post_init__(self) -> None:
        _choice("dtype", self.dtype, DTYPES)
        _choice("load_format", self.load_format, LOAD_FORMATS)
        for name in ("max_num_seqs", "max_num_batched_tokens", "page_size", "max_failed_steps"):
            _count(name, getattr(self, name))
        for name in ("max_model_len", "kv_pages", "threads", "max_waiting"):
            if getattr(self, name) is not None:
                _count(name, getattr(self, name))
        if self.overlap is not None and not isinstance(self.overlap, bool):
            raise DagError(
                "invalid_request", f"overlap is true, false or None, not {shown(self.overlap)}", "overlap"
            )
        gib = self.kv_memory_gib
        if isinstance(gib, bool) or not isinstance(gib, int | float) or not 0 < gib < 1e6:
            raise DagError(
                "invalid_request", "kv_memory_gib must be a positive number of GiB", "kv_memory_gib"
            )
        for name in ("attention_backend", "position_policy"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise DagError("invalid_request", f"{name} is a name, not {shown(value)}", name)
        seed = self.seed
        if seed is not None and (
            isinstance(seed, bool) or not isinstance(seed, int) or not -MAX_SEED - 1 <= seed <= MAX_SEED
        ):
            message = f"seed must be an integer from {-MAX_SEED - 1} to {MAX_SEED}, not {shown(seed)}"
            raise DagError("invalid_request", message, "seed")


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise DagError(
            "invalid_request", f"{name} must be one of {', '.join(allowed)}, not {shown(value)}", name
        )


def _count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_COUNT:
        rule = f"must be an integer of at least 1 and at most {MAX_COUNT}, not {shown(value)}"
        raise DagError("invalid_request", f"{name} {rule}", name)
