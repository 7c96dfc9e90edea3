"""A host tier of lists under a real engine: its pages as cells that a FakeTransfer copies, and costs by coin."""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import dataclass
from typing import Any

import torch

from dagengine_kvstore import NodeRecord
from dagengine_kvstore.fake_transfer import TORN, FakeTransfer
from dagengine_kvstore.torch_arena import TorchArena


class ArenaPages(MutableSequence[object]):
    """An arena's pages as a list: a cell is a copy of the page in all layers. What is torn is NaN."""

    def __init__(self, arena: TorchArena) -> None:
        self._arena = arena
        self._layers = [arena.layer(layer) for layer in range(arena.num_layers)]

    def __len__(self) -> int:
        return self._arena.num_pages

    def __getitem__(self, page: Any) -> object:
        return tuple(layer[page].clone() for layer in self._layers)

    def __setitem__(self, page: Any, value: Any) -> None:
        for index, layer in enumerate(self._layers):
            layer[page] = torch.nan if value is TORN else value[index]

    def __delitem__(self, page: Any) -> None:
        raise TypeError("an arena keeps its pages")

    def insert(self, index: int, value: object) -> None:
        raise TypeError("an arena keeps its pages")


@dataclass(frozen=True)
class Host:
    """A host tier; the rates are FakeTransfer's."""

    pages: int
    delay: tuple[int, int] = (1, 3)
    lose: float = 0.0
    fail: float = 0.0
    duplicate: float = 0.0
    refuse: float = 0.0
    confirm: float = 0.5

    def transfer(self, arena: TorchArena, seed: int = 0) -> FakeTransfer:
        return FakeTransfer(
            ArenaPages(arena),
            self.pages,
            seed=seed,
            delay=self.delay,
            lose=self.lose,
            fail=self.fail,
            duplicate=self.duplicate,
            refuse=self.refuse,
            confirm=self.confirm,
        )


class CoinCosts:
    """Loading is cheaper for a share of the nodes, by their numbers; what is measured is only counted."""

    def __init__(self, share: float = 0.8) -> None:
        self._share = share
        self.steps = self.loads = 0

    def recompute(self, node: NodeRecord) -> int:
        return 2000 if node.uid * 2654435761 % 1000 < 1000 * self._share else 0

    def reload(self, num_pages: int) -> int:
        return num_pages

    def observe_step(self, tokens: int, pairs: int, seconds: float) -> None:
        self.steps += 1

    def observe_load(self, num_pages: int, seconds: float) -> None:
        self.loads += 1
