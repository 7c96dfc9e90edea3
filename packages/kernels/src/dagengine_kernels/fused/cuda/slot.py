"""PlanSlot: device memory at fixed addresses that plans are loaded into one after another.

Knows named lists of int32 and scratch for partial results; not what a plan is made of. Launches captured in a CUDA
graph hold addresses: they run whichever plan was loaded last.

    ints    | name 0 ····· | name 1 ·· | ········ | last name ·········· |       offsets are multiples of 16 bytes
            |<- capacity ->|                      |<- live ->|
            |<------------------ one copy ------------------>|
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dagengine_kernels.staging import Staging

LEAST = 4096
"""Elements that a list has room for from the start, and half the partial results that the scratch has: steps of many
readers have more of these than lists have elements, and every growth costs the graphs that were captured before."""

PADDING = -1
_NO_ROOM = (0, -1)

Listed = tuple[NDArray[np.int32], int]
"""The elements of a list, and the length up to which `PADDING` follows them."""


class PlanSlot:
    """What one plan at a time is in.

    Loading a plan makes the one before it stale: only launches that were queued before may still read it.

    Args:
        device: where the memory is.
        staging: what uploads go from; its own by default.
        least: room of every list from the start, in elements; the scratch has it for twice as many partial results. 0
            makes either just as large as the first plan is.

    Attributes:
        generation: changes when an address does, since something had to grow. Graphs captured before are then useless.
        loads: how many plans were loaded.
        kept: what was made of the addresses of this generation, by its user's keys.
    """

    def __init__(self, device: torch.device, *, staging: Staging | None = None, least: int = LEAST) -> None:
        self.device = device
        self.generation = 0
        self.loads = 0
        self.kept: dict[Any, Any] = {}
        self._staging = staging or Staging(device)
        self._least = least
        self._places: dict[str, tuple[int, int]] = {}
        self._ints = torch.empty(0, dtype=torch.int32, device=device)
        self._o_part = torch.empty(0, 1, 1, dtype=torch.float32, device=device)
        self._lse2_part = torch.empty(0, 1, dtype=torch.float32, device=device)
        self._scratch = (0, 1, 1)  # the shape of `_o_part`

    def load(self, lists: Mapping[str, Listed], parts: int, group: int, head_dim: int) -> None:
        """Queue the upload of a plan's lists on the current stream; the host does not wait.

        Args:
            lists: by name. What comes last is best the largest: unused room behind it is not copied.
            parts, group, head_dim: P, G and D of the scratch.
        """
        self._make_room(lists)
        if parts > self._scratch[0] or self._scratch[1:] != (group, head_dim):
            size = max(self._room(parts), 2 * self._least, 1)
            self._o_part = torch.empty(size, group, head_dim, dtype=torch.float32, device=self.device)
            self._lse2_part = torch.empty(size, group, dtype=torch.float32, device=self.device)
            self._scratch = (size, group, head_dim)
            self._renew()
        places = self._places
        placed = [(places[name][0], array, length) for name, (array, length) in lists.items() if length]
        end = max([at + length for at, _, length in placed], default=0)
        host = self._staging.take(end)
        for at, array, length in placed:
            behind = at + array.size
            host[at:behind] = array.reshape(-1)
            if behind < at + length:
                host[behind : at + length] = PADDING
        self._staging.send(self._ints[:end])
        self.loads += 1

    def address(self, name: str) -> int:
        """Device address of a list."""
        return self._ints.data_ptr() + 4 * self._places[name][0]

    def ints(self, name: str, length: int) -> Tensor:
        """int32 [length]: the first elements of a list, not a copy."""
        at = self._places[name][0]
        return self._ints[at : at + length]

    @property
    def o_part(self) -> Tensor:
        """float32 [at least P, G, D], uninitialised."""
        return self._o_part

    @property
    def lse2_part(self) -> Tensor:
        """float32 [at least P, G], uninitialised."""
        return self._lse2_part

    def _make_room(self, lists: Mapping[str, Listed]) -> None:
        if all(length <= self._places.get(name, _NO_ROOM)[1] for name, (_, length) in lists.items()):
            return
        have = {name: room for name, (_, room) in self._places.items()}
        wanted = dict(have)
        for name, (_, length) in lists.items():
            if length > have.get(name, -1):
                wanted[name] = self._room(length)
        at = 0
        for name in (*lists, *(name for name in have if name not in lists)):
            self._places[name] = (at, wanted[name])
            at += (wanted[name] + 3) // 4 * 4
        self._ints = torch.empty(max(at, 4), dtype=torch.int32, device=self.device)
        self._renew()

    def _room(self, length: int) -> int:
        if not self._least:
            return length
        return max(self._least, 1 << max(length - 1, 0).bit_length())

    def _renew(self) -> None:
        self.generation += 1
        self.kept.clear()
