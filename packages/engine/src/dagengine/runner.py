"""One forward pass: a batch of chunks to model inputs, through the model, to logits.

The runner knows tensors and pages; it knows no requests, graphs or policies. K is written into its page, rotated at
its stored position, before attention reads: an own token is an ordinary token of the segment table.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dagengine_kernels import (
    AttentionBackend,
    AttentionShape,
    RotaryTable,
    SegmentTable,
    build_table,
    plan_append,
)
from dagengine_kvstore.torch_arena import TorchArena
from dagengine_positions import LayerGroup, ModelGeometry

from .models.registry import Model
from .work import Work


@dataclass(frozen=True)
class Chunk:
    """The next `count` own tokens of `work`, with the slots (page * page_size + row) their KV goes to."""

    work: Work
    count: int
    slots: tuple[int, ...]

    @property
    def samples(self) -> bool:
        """Whether a token is sampled after this chunk, so that its last row's logits are wanted."""
        return self.work.wants_logits and self.work.computed + self.count == len(self.work.tokens)


@dataclass(frozen=True)
class ModelInput:
    """One batch. T tokens in all; `logit_rows` are the rows whose logits are asked for."""

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
        self._group_of = {layer: i for i, (group, _, _) in enumerate(self._groups) for layer in group.layers}

    def build_input(self, chunks: SequenceOf[Chunk]) -> ModelInput:
        """Pack chunks, in order, into one batch."""
        ids: list[int] = []
        slots: list[int] = []
        positions: list[np.ndarray] = []
        extents: list[np.ndarray] = []
        rows, static, logit_rows = [0], [], []
        for chunk in chunks:
            work, begin = chunk.work, chunk.work.computed
            ids += work.tokens[begin : begin + chunk.count]
            slots += chunk.slots
            first = work.own_start + begin
            positions.append(np.arange(first, first + chunk.count, dtype=np.int64))
            extents.append(work.extents(chunk.count))
            static.append(len(work.context))
            rows.append(len(ids))
            if chunk.samples:
                logit_rows.append(len(ids) - 1)
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
        return ModelInput(
            input_ids=torch.tensor(ids, device=self.device),
            positions=torch.from_numpy(query_positions).to(self.device),
            slots=torch.tensor(slots, device=self.device),
            table=table,
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=self.device),
        )

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
        writes = [
            plan_append(batch.positions, batch.slots, rotary, self.arena.page_size)
            for _, _, rotary in self._groups
        ]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            index = self._group_of[layer]
            kv = self.arena.layer(layer)
            writes[index].write(k, v, kv)
            out = backend.run(plans[index], layer, q, kv)
            assert isinstance(out, Tensor)
            return out

        hidden = self.model.forward(batch.input_ids, attend)
        return self.model.logits(hidden[batch.logit_rows])


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
