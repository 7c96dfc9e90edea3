"""What a model allows to be done to the positions of its stored keys and values.

An adapter looks at a geometry and a layout and says what is in the way, before any work is done. The default
one knows the rules that follow from the geometry alone; a model with rules of its own brings an adapter,
registered under the name of its architecture. `rope_regime_mismatch` is for such adapters: every built-in
rope kind has one regime.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .geometry import ModelGeometry
from .layout import Layout, Segment
from .registry import Registry

REFUSAL_CODES = ("kv_kind_unsupported", "rope_regime_mismatch", "chunk_crossing")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a model cannot read a layout.

    Attributes:
        code: ``kv_kind_unsupported``, ``rope_regime_mismatch`` or ``chunk_crossing``.
        field: what is refused, such as ``groups[1].kv_kind`` or ``segments[3].delta``.
        message: one sentence naming what would be right.
    """

    code: str
    field: str
    message: str


class ModelAdapter(Protocol):
    """The rules of one architecture. Stateless; a check without refusals returns an empty tuple."""

    @property
    def name(self) -> str: ...

    def check(self, geometry: ModelGeometry, layout: Layout) -> tuple[Refusal, ...]: ...


model_adapters: Registry[ModelAdapter] = Registry(
    "dagengine.model_adapters", methods=("check",), code="unsupported_model"
)


def adapter_for(geometry: ModelGeometry) -> ModelAdapter:
    """The adapter registered under the geometry's architecture, or the default one.

    Raises:
        PositionError: ``plugin_broken`` where the one registered cannot be used.
    """
    registered = geometry.architecture in model_adapters.names()
    return model_adapters.get(geometry.architecture if registered else "default")


class DefaultAdapter:
    """One key and one value per token, moved by rotation; chunked layers keep every token in its chunk."""

    name = "default"

    def check(self, geometry: ModelGeometry, layout: Layout) -> tuple[Refusal, ...]:
        refusals = []
        for index, group in enumerate(geometry.groups):
            if group.kv_kind != "full":
                message = f"must be 'full', one key and value per token, not {group.kv_kind!r}"
                refusals.append(Refusal("kv_kind_unsupported", f"groups[{index}].kv_kind", message))
        for chunk in dict.fromkeys(group.chunk for group in geometry.groups if group.chunk is not None):
            for index, segment in enumerate(layout.segments):
                if _crosses(segment, chunk):
                    message = f"{segment.delta} moves a token across a border of chunks of {chunk} positions"
                    refusals.append(Refusal("chunk_crossing", f"segments[{index}].delta", message))
        return tuple(refusals)


def _crosses(segment: Segment, chunk: int) -> bool:
    """Whether the stored and the view position of some token lie in different chunks.

    chunk border  |           |
    stored        | [..s..)   |       no token crosses exactly when the lower first position
    view          |    [..v..)|       and the upper last position are in one chunk
    """
    if segment.delta == 0:
        return False
    lower = min(segment.view_start, segment.view_start - segment.delta)
    upper = max(segment.view_start, segment.view_start - segment.delta) + segment.stop - segment.start - 1
    return lower // chunk != upper // chunk
