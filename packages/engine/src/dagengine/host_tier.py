"""The host tier of one engine: the transfer that the store moves pages with, and what that costs. Knows no requests.

    TorchTransfer, `cpu_kv_gib`  ◄── PersistentTransfer, `kv_directory`  ◄── the store; Recalls for inputs

Costs are measured where steps and loads happen. Of steps that overlap, and of loads behind each other, each counts from
the end of the one before it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from dagengine_kvstore import EventLog, KVStore, KVStoreError, Transfer
from dagengine_kvstore.directory import PageDirectory
from dagengine_kvstore.persistent import PersistentTransfer
from dagengine_kvstore.recall import Recalls
from dagengine_kvstore.torch_arena import TorchArena
from dagengine_kvstore.torch_transfer import BACKGROUND_BYTES_PER_S, TorchTransfer

from .config import DEFAULT_KV_DIRECTORY_GIB, EngineConfig
from .costs import StepCosts
from .errors import DagError, as_dag_error
from .memory import gib_of
from .runner import Chunk
from .work import HI, LO

log = logging.getLogger("dagengine")


@dataclass(eq=False)
class HostTier:
    """
    Attributes:
        transfer: what the store was given.
        page_bytes: of one page over all layers.
        clock: seconds that only grow: the store's.
        closing: what to call at the end, in order.
        recalls: brings pages back that outlived an engine; None: nothing does.
    """

    transfer: Transfer
    costs: StepCosts
    page_bytes: int
    clock: Callable[[], float]
    closing: tuple[Callable[[], None], ...] = ()
    recalls: Recalls | None = None
    _steps: deque[tuple[int, int, float]] = field(default_factory=deque)
    _last_step: float = 0.0
    _loads: dict[int, float] = field(default_factory=dict)
    _last_load: float = 0.0
    _seen: int = 0

    def serve(self, store: KVStore) -> None:
        """The tier is this store's."""
        if isinstance(self.transfer, PersistentTransfer):
            self.recalls = Recalls(store, self.transfer)

    def begin_step(self, chunks: Sequence[Chunk]) -> None:
        """A step is launched; what it computes of inputs is measured where that is most of it."""
        tokens = sum(chunk.count for chunk in chunks)
        filling = sum(chunk.count for chunk in chunks if chunk.count > 1)
        pairs = 0
        if 2 * filling >= tokens:
            for chunk in chunks:
                context = chunk.work.context
                visible = int((context[:, HI] - context[:, LO]).sum()) + chunk.work.computed
                pairs += chunk.count * visible + chunk.count * (chunk.count + 1) // 2
        self._steps.append((tokens, pairs, self.clock()))

    def end_step(self, *, failed: bool) -> None:
        """The oldest launched step was collected."""
        tokens, pairs, began = self._steps.popleft()
        now = self.clock()
        seconds, self._last_step = now - max(began, self._last_step), now
        if pairs and seconds > 0 and not failed:
            self.costs.observe_step(tokens, pairs, seconds)

    def watch(self, events: EventLog) -> int:
        """Measure the loads among the events since the last call. Returns how many offloads are done since then.

        Where the log dropped events in between, loads begun before these are not measured: they may have ended there.
        """
        found = events.since(self._seen)
        if len(found) < events.next_seq - self._seen:
            self._loads.clear()
        self._seen = events.next_seq
        pages, began = 0, float("inf")
        for event in found:
            if event.ticket is None:
                continue
            if event.kind == "load":
                self._loads[event.ticket] = event.seconds
            elif event.kind == "loaded" and event.ticket in self._loads:
                pages += event.pages or 0
                began = min(began, self._loads.pop(event.ticket))
            elif event.kind in ("load_failed", "load_lost"):
                self._loads.pop(event.ticket, None)
        if pages:
            now = self.clock()
            seconds, self._last_load = now - max(began, self._last_load), now
            if seconds > 0:
                self.costs.observe_load(pages, seconds)
        return sum(event.kind == "offloaded" for event in found)

    def close(self) -> None:
        """Wait for what is under way, and write what is to be kept. Failures are logged: nothing depends on it."""
        for close in self.closing:
            try:
                close()
            except Exception:
                log.exception("the host tier could not be closed")


def make_host_tier(
    arena: TorchArena,
    num_pages: int,
    config: EngineConfig,
    device: torch.device,
    costs: StepCosts,
    clock: Callable[[], float],
    transfer: Callable[[TorchArena], Transfer] | None = None,
) -> HostTier:
    """A tier behind an arena: of `transfer`, or of what `cpu_kv_gib` and `kv_directory` ask for.

    Args:
        num_pages: on the host.
        clock: the store's.

    Raises:
        DagError: naming the option.
    """
    if transfer is not None:
        return HostTier(transfer(arena), costs, arena.page_bytes, clock)
    made, closing = _own_transfer(arena, num_pages, device, config)
    return HostTier(made, costs, arena.page_bytes, clock, closing)


def _own_transfer(
    arena: TorchArena, num_pages: int, device: torch.device, config: EngineConfig
) -> tuple[Transfer, tuple[Callable[[], None], ...]]:
    """What `cpu_kv_gib` and `kv_directory` ask for, and what closes it, in order. Raises DagError."""
    inner = _host_transfer(arena, num_pages, device)
    if config.kv_directory is None:
        return inner, (inner.close,)
    with ExitStack() as unfinished:
        unfinished.callback(inner.close)
        persistent = _persistent(inner, arena, config)
        unfinished.pop_all()
    return persistent, (persistent.close, inner.close)


def _host_transfer(arena: TorchArena, num_pages: int, device: torch.device) -> TorchTransfer:
    """The transfer of `cpu_kv_gib`, its memory pinned if the device is a GPU. Raises DagError."""
    begin = time.perf_counter()
    try:
        with ExitStack() as unfinished:
            pinned = device.type == "cuda"
            rate = BACKGROUND_BYTES_PER_S if pinned else None  # of stores; somebody waits for a load
            transfer = TorchTransfer(arena, num_pages, store_bytes_per_s=rate)
            unfinished.callback(transfer.close)
            if pinned:
                transfer.host.prepare(num_pages)
            unfinished.pop_all()
    except (KVStoreError, MemoryError, OSError, RuntimeError) as error:
        found = as_dag_error(error)
        code = "unsupported" if found.code == "device_error" else "capacity"
        message = (
            f"{gib_of(num_pages * arena.page_bytes)} of host memory cannot be had for pages: {found.message}"
        )
        raise DagError(code, message, "cpu_kv_gib") from None
    log.info(
        "host tier of %d pages, %s, ready after %.1f s",
        num_pages, gib_of(num_pages * arena.page_bytes), time.perf_counter() - begin,
    )  # fmt: skip
    return transfer


def _persistent(inner: TorchTransfer, arena: TorchArena, config: EngineConfig) -> PersistentTransfer:
    """The transfer that also keeps pages in `kv_directory`. Raises DagError."""
    assert config.kv_directory is not None
    num_bytes = int((config.kv_directory_gib or DEFAULT_KV_DIRECTORY_GIB) * 2**30)
    layout = {"order": "layer, K and V, head, row", "page_size": str(config.page_size)}
    try:
        directory = PageDirectory(config.kv_directory, arena.page_bytes, num_bytes, layout=layout)
    except OSError as error:
        raise DagError("invalid_request", f"it cannot be used: {error}", "kv_directory") from None
    except KVStoreError as error:
        raise DagError("invalid_request", error.message, "kv_directory_gib") from None
    try:
        transfer = PersistentTransfer(inner, inner.host, directory)
    except KVStoreError as error:
        raise DagError("invalid_request", f"for a kv_directory: {error.message}", "cpu_kv_gib") from None
    log.info("%d pages are kept in %s", directory.num_pages, config.kv_directory)
    return transfer
