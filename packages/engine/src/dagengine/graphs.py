"""CUDA graphs of steps: captured on first or second use, kept by what they depend on, to be replayed afterwards.

Knows launches as functions; not what a step computes. All graphs share one pool of memory, since they run one after
another on one stream: what one leaves there is gone when the next runs.

    find(key)   kept? ── yes ─────────────────────────────► the graph, to be replayed on the current stream
                  └───── no ── warm up ── capture ── keep ───┘
                               on a stream of their own
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Protocol

import torch

MOST_GRAPHS = 64
"""Kept at once; the one used longest ago is dropped."""

MOST_ONCE = 1024
"""Keys that are remembered as asked for once."""

FINE_FROM = 16
"""From this capacity on there is one halfway to the next power of two."""


class Graph(Protocol):
    """Launches that can be queued again."""

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], None], Callable[[], None]], Graph]
"""capture(warm_up, body): run warm_up, then record body without running it."""


def capacities(most: int) -> tuple[int, ...]:
    """Numbers of rows that decode steps are padded to, ascending: 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, .., `most`."""
    listed, size = [], 1
    while size < most:
        listed.append(size)
        if size >= FINE_FROM and size * 3 // 2 < most:
            listed.append(size * 3 // 2)
        size *= 2
    return (*listed, most)


class GraphCache:
    """Graphs by key.

    Args:
        capture: makes a graph.
        most: how many are kept.
    """

    def __init__(self, capture: Capture, most: int = MOST_GRAPHS) -> None:
        self._capture, self._most = capture, most
        self._kept: OrderedDict[Hashable, Graph] = OrderedDict()
        self._once: OrderedDict[Hashable, None] = OrderedDict()
        self.num_captured = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: Hashable, warm_up: Callable[[], None], body: Callable[[], None]) -> Graph:
        """The graph of a key; what is not there is captured.

        Args:
            warm_up: does once what `body` will do and may be done twice: compiles, allocates, chooses algorithms.
            body: the launches. What tensors they use must be at these addresses whenever the key is asked for.
        """
        found = self._kept.get(key)
        if found is None:
            found = self._capture(warm_up, body)
            self.num_captured += 1
            self._kept[key] = found
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        return found

    def find_again(
        self, key: Hashable, warm_up: Callable[[], None], body: Callable[[], None]
    ) -> Graph | None:
        """As `find` for a key that was asked for before; None, and nothing is captured, for one that was not."""
        if key not in self._kept and key not in self._once:
            self._once[key] = None
            if len(self._once) > MOST_ONCE:
                self._once.popitem(last=False)
            return None
        self._once.pop(key, None)
        return self.find(key, warm_up, body)


class CudaCapture:
    """Captures on a side stream of a device, into one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, warm_up: Callable[[], None], body: Callable[[], None]) -> Graph:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                warm_up()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                body()
        finally:  # what was queued before a failure writes pages, too
            current.wait_stream(self._stream)
        return graph
