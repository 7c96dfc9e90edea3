"""A model whose next token says exactly what it saw, and the attention backend that reads it from KV pages.

    layer 0   V = (token)              h0 = Σ mix(token, 0, view − query)           over everything visible
    layer 1   V = (token, h0)          h1 = Σ mix(token, h0, view − query)          over everything visible
    logits    arg max = pick(h1, query position)

The sums are modulo 2**64, so they depend on the multiset and on no order. `h0` is a fact about a token
instance: KV that was computed under another context, or at another relative position, gives other tokens for
whoever reads it. K holds a unit vector that the engine's own append rotates by one radian per stored
position: the backend finds there the position that was really written. Tokens reach the backend through the
pages that the segment table names, and in no other way.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import device_hash
import numpy as np
import torch
from late_device import make_late
from numpy.typing import NDArray
from torch import Tensor

from dagengine.build import assemble
from dagengine.config import EngineConfig
from dagengine.core import EngineCore
from dagengine.costs import StepCosts
from dagengine.models.layers import Attend
from dagengine_kernels import AttentionBackend, AttentionShape, RotaryTable, SegmentTable
from dagengine_kernels.backend import Capabilities, Plan
from dagengine_kernels.segments import DELTA, HI, LO, PAGE, STORED
from dagengine_kvstore import Transfer
from dagengine_kvstore.torch_arena import TorchArena
from dagengine_positions import LayerGroup, ModelGeometry, RopeSpec

VOCAB = 4096
HEAD_DIM = 4
MAX_POSITIONS = 320
UNLIKELY = -1e4
MODES = ("at once", "overlap", "late")
"""How steps follow each other: collected at once; one step later; that, on a device that is always behind."""
MARK = 7.0

default_mode = MODES[0]

Words = NDArray[np.uint64]


def mix(*values: NDArray[Any] | int) -> Words:
    """A 64-bit hash of integers, broadcast over arrays (the finaliser of splitmix64 after every value)."""
    with np.errstate(over="ignore"):
        state = np.uint64(0x243F6A8885A308D3)
        for value in values:
            state = (state + np.asarray(value).astype(np.int64).astype(np.uint64)) * np.uint64(
                0x9E3779B97F4A7C15
            )
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return state


def fold(words: Words) -> NDArray[np.int64]:
    """The upper 31 bits of the sum over the last axis, which a float64 holds exactly."""
    with np.errstate(over="ignore"):
        return (words.sum(axis=-1, dtype=np.uint64) >> np.uint64(33)).astype(np.int64)


def pick(h1: NDArray[np.int64], position: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The likeliest next token and the second likeliest."""
    word = mix(h1, position)
    first = (word % np.uint64(VOCAB)).astype(np.int64)
    step = 1 + ((word >> np.uint64(32)) % np.uint64(VOCAB - 1)).astype(np.int64)
    return first, (first + step) % VOCAB


class ScriptedModel:
    """Two layers without weights."""

    def forward(self, input_ids: Tensor, attend: Attend) -> Tensor:
        tokens = input_ids.to(torch.float64)
        seen = torch.zeros_like(tokens)
        query = tokens.new_zeros(len(tokens), 1, HEAD_DIM)
        for layer in range(2):
            key, value = torch.zeros_like(query), torch.zeros_like(query)
            key[:, 0, 0], key[:, 0, 2], key[:, 0, 3] = 1.0, tokens, float(layer)
            value[:, 0, 0], value[:, 0, 1], value[:, 0, 2], value[:, 0, 3] = tokens, seen, float(layer), MARK
            out = attend(layer, query, key, value)
            seen = out[:, 0, 0]
        return out[:, 0, :2]

    def logits(self, hidden: Tensor) -> Tensor:
        first, second = device_hash.pick(*hidden.nan_to_num(0.0).to(torch.int64).unbind(1), VOCAB)
        logits = torch.full((len(hidden), VOCAB), UNLIKELY, dtype=torch.float32, device=hidden.device)
        logits.scatter_(1, second[:, None], -0.5).scatter_(1, first[:, None], 0.0)
        return logits.masked_fill_(hidden.isnan().any(1, keepdim=True), torch.nan)


@dataclass(frozen=True, eq=False)
class ScriptedPlan(Plan):
    """Per sequence: its query positions, and page, row, stored and view position of every listed token."""

    sequences: tuple[tuple[NDArray[np.int64], ...], ...]


class ScriptedBackend(AttentionBackend):
    """Hashes what the table shows of the pages; refuses pages that hold something else than it says.

    Attributes:
        fail_at: the layer at which the next step fails, or None.
    """

    name: ClassVar[str] = "scripted"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=("cpu",), dtypes=(torch.float64,), window=False
    )
    implementation = "scripted"

    def __init__(self) -> None:
        super().__init__()
        self._static: dict[int, NDArray[np.int32]] = {}
        self.fail_at: int | None = None

    def plan(
        self,
        table: SegmentTable,
        shape: AttentionShape,
        rotary: RotaryTable | None,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> ScriptedPlan:
        device = self._check_plan(table, shape, rotary, device, dtype)
        sequences = []
        for index, sequence_id in enumerate(table.sequence_ids):
            extents = table.extents[table.extent_indptr[index] : table.extent_indptr[index + 1]]
            static = extents[: table.static_extents[index]].copy()
            known = self._static.setdefault(sequence_id, static)
            assert np.array_equal(known, static), f"the static extents of sequence {sequence_id} changed"
            counts = extents[:, HI] - extents[:, LO]
            within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            page, row = np.repeat(extents[:, PAGE], counts), np.repeat(extents[:, LO], counts) + within
            stored = np.repeat(extents[:, STORED], counts) + within
            view = stored + np.repeat(extents[:, DELTA], counts)
            queries = table.q_positions[table.q_indptr[index] : table.q_indptr[index + 1]]
            sequences.append((queries, page, row, stored, view))
        return ScriptedPlan(self.name, table, shape, rotary, torch.device(device), dtype, tuple(sequences))

    def run(
        self,
        plan: Plan,
        layer: int,
        q: Tensor,
        kv_layer: Tensor,
        *,
        sinks: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor:
        self._check_run(plan, q, kv_layer, sinks)
        assert isinstance(plan, ScriptedPlan) and not return_lse
        if self.fail_at == layer:
            self.fail_at = None
            raise RuntimeError("planted")
        pages = kv_layer.numpy()[:, :, 0]
        out = np.zeros((len(q), 2))
        begin = 0
        for queries, page, row, stored, view in plan.sequences:
            key, value = pages[page, 0, row], pages[page, 1, row]
            rotation = np.stack((np.cos(stored), np.sin(stored)), axis=1)
            wrong = np.abs(key[:, :2] - rotation).max(axis=1) > 1e-5
            wrong |= (
                (value[:, 3] != MARK)
                | (value[:, 2] != layer)
                | (key[:, 3] != layer)
                | (key[:, 2] != value[:, 0])
            )
            wrong |= np.isnan(key).any(axis=1) | np.isnan(value).any(axis=1)
            if wrong.any():
                bad = int(wrong.argmax())
                raise AssertionError(
                    f"page {page[bad]} row {row[bad]} of layer {layer} holds K {key[bad]} V {value[bad]}, "
                    f"the table says stored position {stored[bad]}"
                )
            relative = view[None, :] - queries[:, None]
            words = mix(value[:, 0].astype(np.int64), value[:, 1].astype(np.int64), relative)
            out[begin : begin + len(queries), 0] = fold(np.where(relative <= 0, words, np.uint64(0)))
            out[begin : begin + len(queries), 1] = queries
            begin += len(queries)
        result = torch.zeros_like(q)
        result[:, 0, :2] = torch.from_numpy(out)
        return result

    def forget(self, sequence_id: int) -> None:
        self._static.pop(sequence_id, None)


class TwinBackend(ScriptedBackend):
    """The same under another name, for batches of several backends."""

    name: ClassVar[str] = "scripted-twin"


def geometry() -> ModelGeometry:
    """Two equal layers, one head, one pair of dimensions that turns by one radian per position."""
    rope = RopeSpec(kind="default", theta=10000.0, head_dim=HEAD_DIM, rotary_dim=2)
    group = LayerGroup((0, 1), "full", 1, HEAD_DIM, rope, None, None, False, 1.0)
    return ModelGeometry(
        architecture="Scripted",
        model_type="scripted",
        num_layers=2,
        hidden_size=HEAD_DIM,
        num_heads=1,
        num_kv_heads=1,
        head_dim=HEAD_DIM,
        intermediate_size=1,
        vocab_size=VOCAB,
        max_positions=MAX_POSITIONS,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        attention_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        qk_norm=False,
        hidden_act="silu",
        dtype=None,
        bos_token_id=None,
        eos_token_ids=(),
        groups=(group,),
    )


def scripted_core(
    *,
    pages: int = 64,
    page_size: int = 4,
    clock: Callable[[], float] = time.monotonic,
    backend: str = "scripted",
    mode: str | None = None,
    transfer: Callable[[TorchArena], Transfer] | None = None,
    costs: StepCosts | None = None,
    **settings: Any,
) -> EngineCore:
    """A real core around the scripted model; `settings` are EngineConfig's. Unwritten pages hold NaN.

    `mode` is one of MODES; None is what the running test says (see `conftest.step_mode`).
    """
    mode = mode or default_mode
    assert mode in MODES, mode
    config = EngineConfig(
        **{"max_num_batched_tokens": 64, "overlap": mode != "at once", **settings},
        kv_pages=pages,
        page_size=page_size,
        attention_backend=backend,
    )
    core = assemble(
        ScriptedModel(),
        geometry(),
        replace(config),
        identity="scripted",
        dtype=torch.float64,
        clock=clock,
        transfer=transfer,
        costs=costs,
    )
    for layer in range(2):
        core._runner.arena.layer(layer).fill_(torch.nan)
    if mode == "late":
        core.late_device = make_late(core)  # type: ignore[attr-defined]
    return core


def register_backend(folder: Path, names: dict[str, str]) -> None:
    """Register backends the way a plug-in does: an installed distribution with entry points, on the path.

    Args:
        folder: an empty folder; stays on `sys.path`.
        names: backend name to `module:Class`.
    """
    info = folder / "scripted_backends-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scripted-backends\nVersion: 1\n")
    lines = [f"{name} = {target}" for name, target in names.items()]
    (info / "entry_points.txt").write_text("\n".join(["[dagengine.attention_backends]", *lines, ""]))
    sys.path.append(str(folder))
