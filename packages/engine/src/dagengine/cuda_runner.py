"""The runner for CUDA devices: decode steps as CUDA graphs, all others in eager launches; the host waits for neither.

    launch ── one token of each work ──► plan in the slots still right? ── no ──► plan anew (host), upload
       │                                          └── yes: it advanced itself ──┐        │
       │                                 fixed buffers of a capacity ◄── upload ┴────────┘
       │                                          └──► graph: ids, layers, head, plans advance
       └────── anything else ──────────► plan, upload, launches

A decode batch that is the last one, one token on, within pages that were reserved when it was planned, costs the host
one upload and one replay. Knows tensors and pages; no requests, graphs of contexts or policies.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dagengine_kernels import (
    AppendPlan,
    AttentionBackend,
    KernelError,
    Plan,
    SegmentTable,
)
from dagengine_kernels.errors import UNSUPPORTED
from dagengine_kernels.staging import Staging
from dagengine_kvstore.torch_arena import TorchArena
from dagengine_positions import ModelGeometry

from .graphs import Capture, CudaCapture, Graph, GraphCache, capacities
from .models.norm import RMSNorm
from .models.registry import Model
from .runner import Chunk, Runner
from .views import Views
from .work import Extents, Work

log = logging.getLogger("dagengine")

MAX_NUM_SEQS = 256


@runtime_checkable
class SlotBackend(Protocol):
    """A backend whose plans can take turns in device memory at fixed addresses: see FusedBackend."""

    def new_slot(self, device: torch.device) -> Any: ...

    def advance(self, plan: Any) -> None: ...


@dataclass(frozen=True)
class _Slots:
    """A slot for each group of layers: for decode steps, whose plan is to stay, and for all others."""

    decode: tuple[Any, ...]
    mixed: tuple[Any, ...]


class _Buffers:
    """What the graphs of one capacity C read, at fixed addresses, int64.

        source [C] | positions [C] | slots [C] | ids [C] | pending ids [most]
        |<------------- one upload a step -------------->|<- from the launch before

    The id of row i is (ids, pending ids)[source[i]]. Rows that pad have id 0, position 0, slot -1.
    """

    def __init__(self, capacity: int, most: int, device: torch.device) -> None:
        self.capacity = capacity
        self._ints = torch.zeros(4 * capacity + most, dtype=torch.int64, device=device)
        self.uploaded = self._ints[: 4 * capacity]
        self.source, self.positions, self.slots, _ = self.uploaded.view(4, capacity).unbind(0)
        self.choices = self._ints[3 * capacity :]
        self.pending = self._ints[4 * capacity :]
        self.own = np.arange(capacity)

    def fill(
        self,
        chunks: Sequence[Chunk],
        positions: NDArray[np.int64],
        pending: Tensor | None,
        staging: Staging,
    ) -> None:
        """Queue the upload of a step, and the copy of the ids that are pending."""
        count, capacity = len(chunks), self.capacity
        host = staging.take(4 * capacity).reshape(4, capacity)
        source, to_positions, slots, ids = host
        rows = [-1 if chunk.pending is None else chunk.pending for chunk in chunks]
        source[:] = self.own
        taken = np.array(rows)
        is_pending = taken >= 0
        if is_pending.all():
            np.add(taken, capacity, out=source[:count])
            ids[:] = 0
        else:
            np.copyto(source[:count], taken + capacity, where=is_pending)
            works = [chunk.work for chunk in chunks]
            ids[:count] = [
                work.tokens[work.computed] if row < 0 else 0 for work, row in zip(works, rows, strict=True)
            ]
            ids[count:] = 0
        to_positions[:count], to_positions[count:] = positions, 0
        slots[:count], slots[count:] = [chunk.slots[0] for chunk in chunks], -1
        staging.send(self.uploaded)
        if is_pending.any():
            assert pending is not None, "a token is pending, but the previous launch sampled nothing"
            assert len(pending) <= len(self.pending), "more rows were sampled than sequences may run"
            self.pending[: len(pending)].copy_(pending)


@dataclass
class _Batch:
    """The decode batch whose plans are in the slots.

    Attributes:
        ids, contexts: of its works, in order.
        computed: of each before the next launch.
        pages: the lists of pages that they were planned with; other lists once some were given back.
        room: launches for which the reserved pages still suffice.
        positions: int64 [B] of the next launch.
        graph: None where launches are eager.
    """

    backend: AttentionBackend
    ids: list[int]
    contexts: list[Extents]
    computed: list[int]
    pages: list[list[int]]
    room: int
    positions: NDArray[np.int64]
    plans: list[Plan]
    buffers: _Buffers
    graph: Graph | None = None

    def continues(self, backend: AttentionBackend, works: Sequence[Work]) -> bool:
        """Whether these works, each with one token more, are what the plans have advanced to."""
        return (
            self.room > 0
            and backend is self.backend
            and [work.computed for work in works] == self.computed
            and [work.id for work in works] == self.ids
            and all(map(is_, [work.context for work in works], self.contexts))
            and all(map(is_, [work.writer.pages for work in works], self.pages))
        )

    def advance(self) -> None:
        self.room -= 1
        self.computed = [count + 1 for count in self.computed]
        self.positions += 1


class CudaRunner(Runner):
    """A runner that launches ahead of the device.

    Steps of one token for each work are padded to a capacity (`graphs.capacities`) and replayed as CUDA graphs where
    the attention backend has slots for its plans; where it has none, the log says why, and steps are launched eagerly.
    A graph depends on its capacity and on the graph keys of the groups' plans; `graphs.MOST_GRAPHS` are kept. It takes
    all rows of its capacity through the head; elsewhere only rows that sample go there.

    Everything is queued on the current stream, which must be the same at every launch.

    Args:
        max_num_seqs: most works of a step that is replayed, and most rows of `pending`; larger steps are eager.
        enforce_eager: launch what would be replayed; the same kernels with the same padding, so with equal results.
        capture: makes graphs; by default `CudaCapture`.
    """

    def __init__(
        self,
        model: Model,
        geometry: ModelGeometry,
        arena: TorchArena,
        *,
        max_positions: int,
        device: torch.device,
        max_num_seqs: int = MAX_NUM_SEQS,
        enforce_eager: bool = False,
        capture: Capture | None = None,
    ) -> None:
        super().__init__(model, geometry, arena, max_positions=max_positions, device=device)
        self._dtype = arena.layer(0).dtype
        self._views = Views(arena.page_size, arena.num_pages)
        self._staging = Staging(device, torch.int64)
        self._capacities = capacities(max_num_seqs)
        self._buffers: dict[int, _Buffers] = {}
        self._slots: dict[AttentionBackend, _Slots | None] = {}
        self._batch: _Batch | None = None
        self._logits: Tensor | None = None
        self.graphs: GraphCache | None = None
        if not enforce_eager:
            self.graphs = GraphCache(capture or CudaCapture(device))

    @torch.inference_mode()
    def launch(self, chunks: Sequence[Chunk], backend: AttentionBackend, pending: Tensor | None) -> Tensor:
        """As `Runner.launch`. Logits of replayed steps are in one buffer: use them on this stream before the next."""
        slots = self._slots_of(backend)
        if slots is None or len(chunks) > self._capacities[-1] or any(chunk.count != 1 for chunk in chunks):
            return self._launch_mixed(chunks, backend, slots, pending)
        batch, self._batch = self._batch, None  # none where this launch fails half-way
        if batch is None or not batch.continues(backend, [chunk.work for chunk in chunks]):
            batch = self._plan_batch(chunks, backend, slots)
        logits = self._launch_batch(batch, chunks, pending)
        batch.advance()
        self._batch = batch
        return logits

    def _launch_batch(self, batch: _Batch, chunks: Sequence[Chunk], pending: Tensor | None) -> Tensor:
        buffers = batch.buffers
        buffers.fill(chunks, batch.positions, pending, self._staging)
        if self.graphs is None:
            logits = self._decode(batch)
            self._advance_plans(batch)
        else:
            if batch.graph is None:
                batch.graph = self._graph_of(self.graphs, batch)
            batch.graph.replay()
            assert self._logits is not None
            logits = self._logits
        rows = [row for row, chunk in enumerate(chunks) if chunk.samples]
        if len(rows) == len(chunks):
            return logits[: len(chunks)]
        return logits.index_select(0, self._upload(rows))

    def _plan_batch(self, chunks: Sequence[Chunk], backend: AttentionBackend, slots: _Slots) -> _Batch:
        works = [chunk.work for chunk in chunks]
        size = self.arena.page_size
        computed = [work.computed for work in works]
        positions = np.array([work.own_start for work in works], np.int64) + computed
        table = self._views.table(works, np.ones(len(works), np.int64), positions.copy())
        reserve = [
            work.writer.pages[count // size + 1 :] for work, count in zip(works, computed, strict=True)
        ]
        room = min(len(work.writer.pages) * size - count for work, count in zip(works, computed, strict=True))
        # Settled: a step begins with a kernel of torch's, the embedding, which waits for all before it.
        plans = self._plan(table, backend, slots.decode, reserve=reserve, settled=True)
        capacity = next(c for c in self._capacities if c >= len(works))
        if capacity not in self._buffers:
            self._buffers[capacity] = _Buffers(capacity, self._capacities[-1], self.device)
        return _Batch(
            backend=backend,
            ids=[work.id for work in works],
            contexts=[work.context for work in works],
            computed=computed,
            pages=[work.writer.pages for work in works],
            room=room,
            positions=positions,
            plans=plans,
            buffers=self._buffers[capacity],
        )

    def _graph_of(self, graphs: GraphCache, batch: _Batch) -> Graph:
        """The graph of one step of this batch. K and V are written, and logits computed, twice where it is captured."""

        def step() -> None:
            self._keep_logits(self._decode(batch), batch.buffers.capacity)

        def step_and_advance() -> None:
            step()
            self._advance_plans(batch)

        keys: tuple[Hashable, ...] = tuple(plan.graph_key for plan in batch.plans)  # type: ignore[attr-defined]
        return graphs.find((batch.buffers.capacity, keys), step, step_and_advance)

    def _decode(self, batch: _Batch) -> Tensor:
        """Logits [capacity, vocab] of what is in the buffers."""
        buffers = batch.buffers
        ids = buffers.choices.index_select(0, buffers.source)
        hidden = self._layers(ids, buffers.positions, buffers.slots, batch.plans, batch.backend, settled=True)
        return self.model.logits(hidden)

    def _advance_plans(self, batch: _Batch) -> None:
        backend: Any = batch.backend
        for plan in batch.plans:
            backend.advance(plan)

    def _keep_logits(self, logits: Tensor, capacity: int) -> None:
        """Into the buffer of all graphs; the first call, which is not captured, makes it."""
        if self._logits is None:
            self._logits = logits.new_empty(self._capacities[-1], logits.shape[1])
        self._logits[:capacity].copy_(logits)

    def _launch_mixed(
        self,
        chunks: Sequence[Chunk],
        backend: AttentionBackend,
        slots: _Slots | None,
        pending: Tensor | None,
    ) -> Tensor:
        """Eager launches for chunks of any lengths: one upload, and one for each plan."""
        works = [chunk.work for chunk in chunks]
        counts = np.array([chunk.count for chunk in chunks], np.int64)
        ends = np.cumsum(counts)
        starts, total = ends - counts, int(ends[-1])
        first = np.array([work.own_start + work.computed for work in works], np.int64)
        positions = np.repeat(first - starts, counts) + np.arange(total)
        wanted = [row for row, chunk in zip((ends - 1).tolist(), chunks, strict=True) if chunk.samples]
        unknown = [
            (row, chunk.pending)
            for row, chunk in zip((ends - 1).tolist(), chunks, strict=True)
            if chunk.pending is not None
        ]
        sizes = (total, total, total, len(wanted), len(unknown), len(unknown))
        host = self._staging.take(sum(sizes))
        ids, to_positions, to_slots, logit_rows, places, sources = np.split(host, np.cumsum(sizes)[:-1])
        for chunk, start, end in zip(chunks, starts.tolist(), ends.tolist(), strict=True):
            work = chunk.work
            known = end - (chunk.pending is not None)
            ids[start:known] = work.tokens[work.computed : work.computed + known - start]
            ids[known:end] = 0
            to_slots[start:end] = chunk.slots
        to_positions[:] = positions
        logit_rows[:] = wanted
        if unknown:
            places[:], sources[:] = zip(*unknown, strict=True)
        ints = torch.empty(sum(sizes), dtype=torch.int64, device=self.device)
        self._staging.send(ints)
        on_device = ints.split(sizes)
        table = self._views.table(works, counts, positions)
        plans = self._plan(table, backend, None if slots is None else slots.mixed)
        if unknown:
            assert pending is not None, "a token is pending, but the previous launch sampled nothing"
            on_device[0].index_copy_(0, on_device[4], pending.index_select(0, on_device[5]))
        hidden = self._layers(on_device[0], on_device[1], on_device[2], plans, backend)
        if not wanted:
            return torch.empty(0, self.geometry.vocab_size, dtype=torch.float32, device=self.device)
        return self.model.logits(hidden.index_select(0, on_device[3]))

    def _plan(
        self,
        table: SegmentTable,
        backend: AttentionBackend,
        slots: Sequence[Any] | None,
        **options: Any,
    ) -> list[Plan]:
        """A plan for each group of layers."""
        plans = []
        for index, (_, shape, rotary) in enumerate(self._groups):
            if slots is not None:
                options["slot"] = slots[index]
            plans.append(backend.plan(table, shape, rotary, device=self.device, dtype=self._dtype, **options))
        return plans

    def _append(
        self,
        write: AppendPlan,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: Tensor,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
    ) -> Tensor:
        """As `Runner._append`. A q without norm is made contiguous, as attention wants it, by the same launch."""
        if q_norm is None and k_norm is None and write.implementation == "cuda" and not q.is_contiguous():
            contiguous = write.write(k, v, kv, q=q)
            assert contiguous is not None
            return contiguous
        return super()._append(write, layer, q, k, v, kv, q_norm, k_norm)

    def _upload(self, values: Sequence[int] | NDArray[Any]) -> Tensor:
        listed = np.asarray(values, np.int64)
        self._staging.take(listed.size)[:] = listed
        found = torch.empty(listed.size, dtype=torch.int64, device=self.device)
        self._staging.send(found)
        return found

    def _slots_of(self, backend: AttentionBackend) -> _Slots | None:
        """Slots for a backend's plans; None where it plans every batch into memory of its own."""
        if backend not in self._slots:
            self._slots[backend] = self._make_slots(backend)
        return self._slots[backend]

    def _make_slots(self, backend: AttentionBackend) -> _Slots | None:
        refused = "it has no slots for plans"
        if isinstance(backend, SlotBackend):
            decode, mixed = (tuple(backend.new_slot(self.device) for _ in self._groups) for _ in range(2))
            empty = SegmentTable.from_sequences(
                (), page_size=self.arena.page_size, num_pages=self.arena.num_pages
            )
            try:
                self._plan(empty, backend, decode, reserve=[])
            except KernelError as error:
                if error.code != UNSUPPORTED:
                    raise
                refused = error.message
            else:
                return _Slots(decode, mixed)
        log.warning(
            "decode steps with attention backend %s are launched one kernel at a time: %s",
            backend.name,
            refused,
        )
        return None


def make_runner(
    model: Model,
    geometry: ModelGeometry,
    arena: TorchArena,
    *,
    max_positions: int,
    device: torch.device,
    max_num_seqs: int = MAX_NUM_SEQS,
    enforce_eager: bool = False,
) -> Runner:
    """The runner for a device: CudaRunner on CUDA; elsewhere Runner, which is eager always."""
    if device.type != "cuda":
        return Runner(model, geometry, arena, max_positions=max_positions, device=device)
    return CudaRunner(
        model,
        geometry,
        arena,
        max_positions=max_positions,
        device=device,
        max_num_seqs=max_num_seqs,
        enforce_eager=enforce_eager,
    )
