"""Integers on their way from the host to a device: pinned buffers that are filled in turn.

Knows buffers and the copies that read them; not what the integers mean.

    take ─► the caller fills it ─► send: a copy on the current stream, and an event behind it
      ▲                                                                     │
      └────────────── `buffers` uploads later, once the event is done ◄─────┘
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from dagengine_kernels.errors import INVALID_ARGUMENT, KernelError

LEAST = 4096
"""Elements of the smallest buffer."""


class Event(Protocol):
    """The part of torch.cuda.Event that is needed."""

    def record(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...


class Staging:
    """Uploads that the host does not wait for.

    The host waits in `take` only where it is `buffers` uploads ahead of the device.

    Args:
        device: where the uploads go. On a CPU a copy is done when `send` returns.
        dtype: of the elements, torch.int32 or torch.int64.
        buffers: how many uploads may be under way.
        make_event: how an event is made; by default torch.cuda.Event, none on a CPU.
    Raises: KernelError (invalid_argument).
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype = torch.int32,
        *,
        buffers: int = 4,
        make_event: Callable[[], Event] | None = None,
    ) -> None:
        if dtype not in (torch.int32, torch.int64):
            raise KernelError(INVALID_ARGUMENT, f"must be torch.int32 or torch.int64, not {dtype}", "dtype")
        if buffers < 1:
            raise KernelError(INVALID_ARGUMENT, f"must be at least 1, not {buffers}", "buffers")
        self.device, self.dtype = device, dtype
        self._on_gpu = device.type == "cuda"
        if make_event is None and self._on_gpu:
            make_event = torch.cuda.Event
        self._make_event = make_event
        self._buffers: list[tuple[Tensor, NDArray[Any]] | None] = [None] * buffers
        self._events: list[Event | None] = [None] * buffers
        self._at = -1
        self._taken = 0

    def take(self, length: int) -> NDArray[Any]:
        """The next buffer's first `length` elements, uninitialised; the caller fills them and then calls `send`."""
        self._at = (self._at + 1) % len(self._buffers)
        event, pair = self._events[self._at], self._buffers[self._at]
        if event is not None:
            event.synchronize()
        if pair is None or len(pair[1]) < length:
            size = max(LEAST, 1 << max(length - 1, 0).bit_length())
            buffer = torch.empty(size, dtype=self.dtype, pin_memory=self._on_gpu)
            pair = self._buffers[self._at] = buffer, buffer.numpy()
        self._taken = length
        return pair[1][:length]

    def send(self, to: Tensor) -> None:
        """Queue the copy of what `take` gave to `to`, a contiguous tensor of as many elements, on the current stream.

        Raises: KernelError (invalid_argument) where `to` does not fit; it can be tried again then.
        """
        pair = self._buffers[self._at]
        if pair is None or to.numel() != self._taken or to.dtype != self.dtype or not to.is_contiguous():
            message = (
                f"must be {self._taken} contiguous elements of {self.dtype}, is {list(to.shape)} {to.dtype}"
            )
            raise KernelError(INVALID_ARGUMENT, message, "to")
        to.view(-1).copy_(pair[0][: self._taken], non_blocking=True)
        if self._make_event is not None:
            event = self._events[self._at]
            if event is None:
                event = self._events[self._at] = self._make_event()
            event.record(torch.cuda.current_stream(self.device) if self._on_gpu else None)
