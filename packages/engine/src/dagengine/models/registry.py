"""Model classes by architecture name, found through the entry points `dagengine.models`.

Built-ins register the same way as plug-ins. Nothing is imported before it is asked for, and a plug-in that
cannot be imported hinders nobody else.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Protocol, TypeGuard

from torch import Tensor

from dagengine_positions import ModelGeometry

from ..errors import DagError
from ..weights import WeightSource
from .layers import Attend

GROUP = "dagengine.models"


class Model(Protocol):
    """What the engine asks of a model. Attention goes through `attend`, which writes and reads the KV pages."""

    def forward(self, input_ids: Tensor, attend: Attend) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class RowsModel(Model, Protocol):
    """A model that is asked for the rows that are wanted, where these are known, and so can leave out the others behind
    its last layer's keys and values. Who replaces its `forward` in a subclass replaces both, or is asked for all rows.
    """

    def forward_rows(self, input_ids: Tensor, attend: Attend, rows: Tensor) -> Tensor: ...


def gives_rows(model: Model) -> TypeGuard[RowsModel]:
    """Whether a model's `forward_rows` is about its `forward`, and not about one that a subclass has replaced."""
    for holder in (model, *type(model).__mro__):
        found = getattr(holder, "__dict__", {}).keys() & {"forward", "forward_rows"}
        if found:
            return "forward_rows" in found
    return False


class ModelClass(Protocol):
    """A class that promises the same bits in any batch takes `batch_invariant=True` beside these, which is passed only
    where it is asked for, and gives models with a true attribute `batch_invariant`.
    """

    def load(self, geometry: ModelGeometry, source: WeightSource) -> Model: ...


def model_class(architecture: str) -> ModelClass:
    """The class registered for `architecture`; `unsupported` names what is there when there is none."""
    found = {point.name: point for point in entry_points(group=GROUP)}
    if architecture not in found:
        known = ", ".join(sorted(found))
        raise DagError("unsupported", f"no model is registered for {architecture!r}; known: {known}", "model")
    try:
        loaded: ModelClass = found[architecture].load()
    except Exception as error:
        raise DagError(
            "unsupported", f"the model plug-in for {architecture!r} fails: {error}", "model"
        ) from error
    return loaded
