"""One forward pass: a batch of chunks to model inputs, through the model, to logits.

The runner knows tensors and pages; it knows no requests, graphs or policies. K is written into its page, rotated at
its stored position, before attention reads: an own token is an ordinary token of the segment table.

`launch` is all that a step asks for: build_input (host arrays, one upload each) → forward (plan, layers, logits).
It enqueues and waits for nothing, so that the host may go on while a device runs; a runner for one kind of device
overrides any of the three.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dagengine_kernels import (
    AppendPlan,
    AttentionBackend,
    AttentionShape,
    Plan,
    RotaryTable,
    SegmentTable,
    build_table,
    plan_append,
)
from dagengine_kernels.append import HeadNorm
from dagengine_kvstore.torch_arena import TorchArena
from dagengine_positions import LayerGroup, ModelGeometry

from .models.norm import RMSNorm
from .models.registry import Model, gives_rows
from .repositioning import PageMover
from .work import Work


class Chunk(NamedTuple):
    """The next `count` own tokens of `work`, with the slots (page * page_size + row) their KV goes to.

    They begin at `work.computed`, which moves on once the chunk is launched.

    Attributes:
        samples: whether a token is sampled after this chunk, so that its last row's logits are wanted.
        pending: None, or the row of the previous launch's ids that its last token is; the host does not know it.
        joins: whether it reads what other chunks of this launch write; it stands behind all that do not.
    """

    work: Work
    count: int
    slots: tuple[int, ...]
    samples: bool = False
    pending: int | None = None
    joins: bool = False


@dataclass(frozen=True)
class ModelInput:
    """One batch. T tokens in all.

    Attributes:
        input_ids, positions, slots: int64 [T].
        logit_rows: the rows whose logits are asked for, int64 [R].
    """

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    table: SegmentTable
    logit_rows: Tensor


class Runner:
    """Runs a model over an arena of KV pages."""

    def __init__(
        self,
        model: Model,
        geometry: ModelGeometry,
        arena: TorchArena,
        *,
        max_positions: int,
        device: torch.device,
    ) -> None:
        self.model, self.geometry, self.arena, self.device = model, geometry, arena, device
        self._groups = tuple(
            (group, _shape(geometry, group), _rotary(group, 2 * max_positions, device))
            for group in geometry.groups
        )
        self._rows_model = model if gives_rows(model) else None
        self._head_norms: dict[int, tuple[HeadNorm, HeadNorm]] = {}
        self._group_of = {layer: i for i, (group, _, _) in enumerate(self._groups) for layer in group.layers}

    def launch(self, chunks: SequenceOf[Chunk], backend: AttentionBackend, pending: Tensor | None) -> Tensor:
        """Enqueue one batch; waits for nothing.

        Args:
            pending: the ids that the previous launch samples, int64 [rows] on the device; None where there was none.

        Returns: logits [R, vocab] of the chunks that sample, in order, in float32 or wider. They are the caller's
        until the next launch.
        """
        return self.forward(self.build_input(chunks, pending), backend)

    def page_mover(self) -> PageMover:
        """What moves rows of the arena's pages, behind everything launched so far."""
        return PageMover(self.arena, [(group.layers, rotary) for group, _, rotary in self._groups])

    def marker(self) -> Callable[[], None]:
        """A mark behind everything launched so far: call it to wait until the device has passed it."""
        if self.device.type != "cuda":
            return _nothing
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def build_input(self, chunks: SequenceOf[Chunk], pending: Tensor | None = None) -> ModelInput:
        """Pack chunks, in order, into one batch; ids that are `pending` are taken on the device."""
        ids: list[int] = []
        places: list[int] = []
        sources: list[int] = []
        slots: list[int] = []
        positions: list[np.ndarray] = []
        extents: list[np.ndarray] = []
        rows, static, logit_rows = [0], [], []
        for chunk in chunks:
            work, begin = chunk.work, chunk.work.computed
            ids += work.tokens[begin : begin + chunk.count]
            if chunk.pending is not None:
                places.append(len(ids))
                sources.append(chunk.pending)
                ids.append(0)
            slots += chunk.slots
            first = work.own_start + begin
            positions.append(np.arange(first, first + chunk.count, dtype=np.int64))
            extents.append(work.extents(chunk.count))
            static.append(len(work.context))
            rows.append(len(ids))
            if chunk.samples:
                logit_rows.append(len(ids) - 1)
        assert len(ids) == len(slots), "a chunk's tokens are neither known nor pending"
        query_positions = np.concatenate(positions)
        table = SegmentTable(
            q_indptr=np.array(rows, np.int32),
            q_positions=query_positions,
            extent_indptr=np.cumsum([0, *(len(e) for e in extents)], dtype=np.int32),
            extents=np.concatenate(extents),
            page_size=self.arena.page_size,
            num_pages=self.arena.num_pages,
            sequence_ids=tuple(chunk.work.id for chunk in chunks),
            static_extents=np.array(static, np.int32),
        )
        input_ids = self._upload(ids)
        if places:
            assert pending is not None, "a token is pending, but the previous launch sampled nothing"
            taken = pending.index_select(0, self._upload(sources))
            input_ids.index_copy_(0, self._upload(places), taken)
        return ModelInput(
            input_ids=input_ids,
            positions=self._upload(query_positions),
            slots=self._upload(slots),
            table=table,
            logit_rows=self._upload(logit_rows),
        )

    def _upload(self, values: SequenceOf[int] | np.ndarray) -> Tensor:
        """int64 on the device, by a copy that the host does not wait for: from pinned memory."""
        found = torch.from_numpy(np.asarray(values, np.int64))
        if self.device.type != "cuda":
            return found.to(self.device)
        return found.pin_memory().to(self.device, non_blocking=True)

    def try_backend(self, backend: AttentionBackend) -> None:
        """Plan an empty batch for every group of layers. Raises: what the backend refuses the model with."""
        empty = SegmentTable.from_sequences(
            (), page_size=self.arena.page_size, num_pages=self.arena.num_pages
        )
        for _, shape, rotary in self._groups:
            backend.plan(empty, shape, rotary, device=self.device, dtype=self.arena.layer(0).dtype)

    @torch.inference_mode()
    def forward(self, batch: ModelInput, backend: AttentionBackend) -> Tensor:
        """Write the batch's KV and return logits [R, vocab] of its `logit_rows`."""
        plans = [
            backend.plan(batch.table, shape, rotary, device=self.device, dtype=self.arena.layer(0).dtype)
            for _, shape, rotary in self._groups
        ]
        hidden = self._layers(
            batch.input_ids, batch.positions, batch.slots, plans, backend, rows=batch.logit_rows
        )
        return self.model.logits(hidden)

    def _layers(
        self,
        input_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        plans: SequenceOf[Plan],
        backend: AttentionBackend,
        *,
        rows: Tensor | None = None,
        settled: bool = False,
    ) -> Tensor:
        """Hidden states [T, H] behind the last layer; K and V of all rows with a slot are written on the way.

        Args:
            rows: those that are wanted, int64 [R]; None: all of them.
            settled: as `dagengine_kernels.plan_append` is told of positions and slots.
        """
        size = self.arena.page_size
        writes = [
            plan_append(positions, slots, rotary, size, settled=settled) for _, _, rotary in self._groups
        ]

        def attend(
            layer: int,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            *,
            q_norm: RMSNorm | None = None,
            k_norm: RMSNorm | None = None,
        ) -> Tensor:
            group, kv = self._group_of[layer], self.arena.layer(layer)
            q = self._append(writes[group], layer, q, k, v, kv, q_norm, k_norm)
            out = backend.run(plans[group], layer, q, kv)
            assert isinstance(out, Tensor)
            return out

        if rows is None:
            return self.model.forward(input_ids, attend)
        if self._rows_model is not None:
            return self._rows_model.forward_rows(input_ids, attend, rows)
        return self.model.forward(input_ids, attend).index_select(0, rows)

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
        """Write k and v into the pages and return q, both normed if the model norms its heads."""
        if q_norm is None or k_norm is None:
            assert q_norm is None and k_norm is None, "q and k are normed together or not at all"
            write.write(k, v, kv)
            return q
        if write.implementation != "cuda":
            write.write(k_norm(k), v, kv)
            return q_norm(q)
        if layer not in self._head_norms:
            self._head_norms[layer] = _head_norm(q_norm), _head_norm(k_norm)
        query, key = self._head_norms[layer]
        normed = write.write(k, v, kv, k_norm=key, q=q, q_norm=query)
        assert normed is not None
        return normed


def _nothing() -> None:
    """A device that runs what it is given at once is always done."""


def _head_norm(norm: RMSNorm) -> HeadNorm:
    return HeadNorm(norm.weight.to(torch.float32).contiguous(), norm.eps)


def _shape(geometry: ModelGeometry, group: LayerGroup) -> AttentionShape:
    return AttentionShape(
        num_heads=geometry.num_heads,
        num_kv_heads=group.num_kv_heads,
        head_dim=group.head_dim,
        scale=group.scale,
        window=group.window,
        softcap=group.softcap,
    )


def _rotary(group: LayerGroup, length: int, device: torch.device) -> RotaryTable | None:
    if group.rope is None:
        return None
    rope = group.rope
    return build_table(rope.inv_freq(), rope.attention_scaling, length, pairing=rope.pairing, device=device)
