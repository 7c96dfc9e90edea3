"""The runner for CUDA devices: decode steps and small others as CUDA graphs, large ones in eager launches; the host
waits for none.

    launch ── one token of each work ──► plan in the slots still right? ── no ──► plan anew (host), upload
       │                                          └── yes: it advanced itself ──┐        │
       │                                 fixed buffers of a capacity ◄── upload ┴────────┘
       │                                          └──► graph: ids, layers, head, plans advance
       ├── up to MIXED_ROWS tokens ────► plan, upload ──► fixed buffers of a capacity
       │                                          ├── such a step ran before ──► graph: ids, layers, head
       │                                          └── the first of its kind ───► the same in launches
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
from .step_buffers import StepBuffers, pack
from .views import Views
from .work import Extents, Work

log = logging.getLogger("dagengine")

MAX_NUM_SEQS = 256
MIXED_ROWS = 256
"""Tokens of a step that is padded and replayed: with more, a device has more to do than the host that launches."""

MIXED_CAPACITIES = (8, 16, 32, 64, 96, 128, 192)
"""What such a step is padded to. Fewer tokens than there are between two of these would be no faster."""

WANTED = (1, 8, 64)
"""What the rows of such a step whose logits are wanted are padded to, if they are no more: few kinds of steps, since
the head takes as long as reading its weight."""


@runtime_checkable
class SlotBackend(Protocol):
    """A backend whose plans can take turns in device memory at fixed addresses: see FusedBackend."""

    def new_slot(self, device: torch.device) -> Any: ...

    def advance(self, plan: Any) -> None: ...


@dataclass(frozen=True)
class _Slots:
    """A slot for each group of layers: for decode steps, whose plan is to stay, for other steps that are replayed, and
    for large ones, whose plans would make a slot grow that graphs hold addresses of.
    """

    decode: tuple[Any, ...]
    padded: tuple[Any, ...]
    large: tuple[Any, ...]


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
    buffers: StepBuffers
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

    Steps of one token for each work, and others of up to `mixed_rows` tokens, are padded to a capacity
    (`graphs.capacities`) and replayed as CUDA graphs where the attention backend has slots for its plans; where it has
    none, the log says why, and steps are launched eagerly. A graph depends on its capacity and on the graph keys of the
    groups' plans; `graphs.MOST_GRAPHS` are kept. That of a decode step takes all rows of its capacity through the head;
    that of another step as many as sample, padded too, and it is captured when its kind comes the second time, since
    many come once.

    Everything is queued on the current stream, which must be the same at every launch.

    Args:
        max_num_seqs: most works of a step that is replayed, and most rows of `pending`; larger steps are eager.
        mixed_rows: most tokens of a step that is replayed though some work has more than one; 0 for none.
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
        mixed_rows: int = MIXED_ROWS,
        enforce_eager: bool = False,
        capture: Capture | None = None,
    ) -> None:
        super().__init__(model, geometry, arena, max_positions=max_positions, device=device)
        self._dtype = arena.layer(0).dtype
        self._views = Views(arena.page_size, arena.num_pages)
        self._staging = Staging(device, torch.int64)
        self._capacities = capacities(max_num_seqs)
        self._mixed_rows = mixed_rows
        self._mixed_capacities = (*(c for c in MIXED_CAPACITIES if c < mixed_rows), mixed_rows)
        self._wanted = (*(c for c in WANTED if c < max_num_seqs), max_num_seqs)
        self._buffers: dict[int, StepBuffers] = {}
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
        if slots is None or len(chunks) > self._capacities[-1]:
            return self._launch_mixed(chunks, backend, slots, pending)
        total = sum(chunk.count for chunk in chunks)
        # What a decode step reads, but for its own rows, is read before the kernel that writes rows has ended. Those
        # that join are the last.
        if total > len(chunks) or chunks[-1].joins:
            if total > self._mixed_rows:
                return self._launch_mixed(chunks, backend, slots, pending)
            return self._launch_padded(chunks, backend, slots, pending)
        batch, self._batch = self._batch, None  # none where this launch fails half-way
        if batch is None or not batch.continues(backend, [chunk.work for chunk in chunks]):
            batch = self._plan_batch(chunks, backend, slots)
        logits = self._launch_batch(batch, chunks, pending)
        batch.advance()
        self._batch = batch
        return logits

    def _launch_batch(self, batch: _Batch, chunks: Sequence[Chunk], pending: Tensor | None) -> Tensor:
        buffers = batch.buffers
        buffers.fill_decode(chunks, batch.positions, pending, self._staging)
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
        return _Batch(
            backend=backend,
            ids=[work.id for work in works],
            contexts=[work.context for work in works],
            computed=computed,
            pages=[work.writer.pages for work in works],
            room=room,
            positions=positions,
            plans=plans,
            buffers=self._buffers_for(len(works), self._capacities),
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
        hidden = self._layers(
            buffers.ids(), buffers.positions, buffers.slots, batch.plans, batch.backend, settled=True
        )
        return self.model.logits(hidden)

    def _buffers_for(self, rows: int, among: Sequence[int]) -> StepBuffers:
        """Those of the least capacity that holds so many rows."""
        capacity = next(c for c in among if c >= rows)
        if capacity not in self._buffers:
            self._buffers[capacity] = StepBuffers(capacity, self._capacities[-1], self.device)
        return self._buffers[capacity]

    def _advance_plans(self, batch: _Batch) -> None:
        backend: Any = batch.backend
        for plan in batch.plans:
            backend.advance(plan)

    def _keep_logits(self, logits: Tensor, rows: int) -> None:
        """Into the buffer of all graphs; the first call, which is not captured, makes it."""
        if self._logits is None:
            self._logits = logits.new_empty(self._capacities[-1], logits.shape[1])
        self._logits[:rows].copy_(logits)

    def _launch_padded(
        self, chunks: Sequence[Chunk], backend: AttentionBackend, slots: _Slots, pending: Tensor | None
    ) -> Tensor:
        """A small step of chunks of any lengths: one upload, one for each plan, and a replay if its kind is known."""
        counts, positions, wanted = _rows_of(chunks)
        plans = self._plan(
            self._views.table([chunk.work for chunk in chunks], counts, positions), backend, slots.padded
        )
        buffers = self._buffers_for(len(positions), self._mixed_capacities)
        buffers.fill_mixed(chunks, positions, wanted, pending, self._staging)
        most = min(buffers.capacity, next(c for c in self._wanted if c >= len(wanted))) if wanted else 0

        def step() -> Tensor | None:
            rows = buffers.rows[:most]
            hidden = self._layers(buffers.ids(), buffers.positions, buffers.slots, plans, backend, rows=rows)
            return self.model.logits(hidden) if most else None

        def step_and_keep() -> None:
            logits = step()
            if logits is not None:
                self._keep_logits(logits, most)

        graph = None
        if self.graphs is not None:
            keys = tuple(plan.graph_key for plan in plans)  # type: ignore[attr-defined]
            graph = self.graphs.find_again((buffers.capacity, most, keys), step_and_keep, step_and_keep)
        if graph is None:
            logits = step()
        else:
            graph.replay()
            logits = self._logits
        return self._no_logits() if not wanted or logits is None else logits[: len(wanted)]

    def _no_logits(self) -> Tensor:
        return torch.empty(0, self.geometry.vocab_size, dtype=torch.float32, device=self.device)

    def _launch_mixed(
        self,
        chunks: Sequence[Chunk],
        backend: AttentionBackend,
        slots: _Slots | None,
        pending: Tensor | None,
    ) -> Tensor:
        """Eager launches for chunks of any lengths: one upload, and one for each plan."""
        works = [chunk.work for chunk in chunks]
        counts, positions, wanted = _rows_of(chunks)
        ends = np.cumsum(counts).tolist()
        total = ends[-1]
        unknown = [
            (end - 1, chunk.pending)
            for end, chunk in zip(ends, chunks, strict=True)
            if chunk.pending is not None
        ]
        sizes = (total, total, total, len(wanted), len(unknown), len(unknown))
        host = self._staging.take(sum(sizes))
        ids, to_positions, to_slots, logit_rows, places, sources = np.split(host, np.cumsum(sizes)[:-1])
        for chunk, end in zip(chunks, ends, strict=True):
            pack(chunk, ids[end - chunk.count : end], to_slots[end - chunk.count : end])
        to_positions[:] = positions
        logit_rows[:] = wanted
        if unknown:
            places[:], sources[:] = zip(*unknown, strict=True)
        ints = torch.empty(sum(sizes), dtype=torch.int64, device=self.device)
        self._staging.send(ints)
        on_device = ints.split(sizes)
        table = self._views.table(works, counts, positions)
        plans = self._plan(table, backend, None if slots is None else slots.large)
        if unknown:
            assert pending is not None, "a token is pending, but the previous launch sampled nothing"
            on_device[0].index_copy_(0, on_device[4], pending.index_select(0, on_device[5]))
        hidden = self._layers(on_device[0], on_device[1], on_device[2], plans, backend, rows=on_device[3])
        return self.model.logits(hidden) if wanted else self._no_logits()

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
            decode, *others = (tuple(backend.new_slot(self.device) for _ in self._groups) for _ in range(3))
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
                return _Slots(decode, *others)
        log.warning(
            "decode steps with attention backend %s are launched one kernel at a time: %s",
            backend.name,
            refused,
        )
        return None


def _rows_of(chunks: Sequence[Chunk]) -> tuple[NDArray[np.int64], NDArray[np.int64], list[int]]:
    """Tokens of each chunk, int64 [B]; positions of all, int64 [T]; the rows whose logits are wanted."""
    firsts, wanted, end = [], [], 0
    for chunk in chunks:
        firsts.append(chunk.work.own_start + chunk.work.computed - end)
        end += chunk.count
        if chunk.samples:
            wanted.append(end - 1)
    counts = np.array([chunk.count for chunk in chunks], np.int64)
    return counts, np.array(firsts, np.int64).repeat(counts) + np.arange(end), wanted


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
