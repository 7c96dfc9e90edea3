"""What copies pages of one device, as a protocol, and its CPU half. Knows pages and marks; knows no tickets."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Literal, Protocol

import numpy as np
import torch

from dagengine_kvstore.extents import Numbers
from dagengine_kvstore.host_arena import HostArena
from dagengine_kvstore.torch_arena import TorchArena

Direction = Literal["store", "load"]


def page_rows(pages: Sequence[tuple[int, int]]) -> Numbers:
    """(device page, host page) pairs as `[2, num_pages]`: device pages, host pages; in the order of the host's."""
    rows = np.empty((2, len(pages)), np.int64)
    devices, hosts = (np.fromiter(map(itemgetter(side), pages), np.int64, len(pages)) for side in (0, 1))
    order = hosts.argsort()
    rows[0], rows[1] = devices.take(order), hosts.take(order)
    return rows


class Mark(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool:
        """Whether everything before it has ended."""
        ...


class Copies(Protocol):
    """What copies pages of one device."""

    def mark(self) -> Mark:
        """The end of everything that the compute stream was given so far."""
        ...

    def issue(self, kind: Direction, pages: Numbers, after: Sequence[Any]) -> Mark:
        """Start copies behind `after`; the mark of their end.

        Args:
            pages: int64 `[2, num_pages]`: device pages, and the host page of each, ascending; none twice.
        """
        ...

    def wait(self) -> None:
        """Block until everything issued has ended."""
        ...

    def close(self) -> None:
        """Wait, then give host memory up."""
        ...


class _Ended:
    def query(self) -> bool:
        return True


class CpuCopies:
    """Copies between the layers of `arena`, on a CPU, and `host`: each is done when `issue` returns."""

    def __init__(self, arena: TorchArena, host: HostArena) -> None:
        layers = [arena.layer(layer) for layer in range(arena.num_layers)]
        self._layers = [layer.view(torch.uint8).view(arena.num_pages, -1) for layer in layers]
        self._host = host

    def mark(self) -> Mark:
        return _Ended()

    def issue(self, kind: Direction, pages: Numbers, after: Sequence[Any]) -> Mark:
        for device, host in pages.T.tolist():
            rows = torch.frombuffer(self._host.page(host), dtype=torch.uint8).view(len(self._layers), -1)
            for layer, row in zip(self._layers, rows, strict=True):
                if kind == "store":
                    row.copy_(layer[device])
                else:
                    layer[device].copy_(row)
        return _Ended()

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass
