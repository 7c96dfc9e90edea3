"""Answers of an earlier query as parts of the next one: read as they were computed, under their own prompt.

`HeldAnswer` is a `g` that has been answered. Planning and lowering treat it as any `g`; its node becomes a reference to
the state that it holds, and its placeholder of an input becomes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagengine_core_graph.query import Generate, GenerateParams, Message

if TYPE_CHECKING:
    from .state import State


@dataclass(frozen=True)
class HeldInput(Message):
    """Stands where the prompt of an answer stood; `text` is the answer's state id, so no two are equal."""


@dataclass(frozen=True)
class HeldParams(GenerateParams):
    """Parameters of a call that has been answered.

    Attributes:
        state: holds the answer.
        text: what it says.
    """

    state: State = field(kw_only=True, compare=False)
    name: str = field(kw_only=True)
    text: str = field(kw_only=True)


def held_answer(state: State, text: str) -> Generate:
    """A `g` that stands for the answer in a state. It is read while the state is held."""
    params = HeldParams(None, state=state, name=state.id, text=text)
    return Generate(params, HeldInput("user", state.id))
