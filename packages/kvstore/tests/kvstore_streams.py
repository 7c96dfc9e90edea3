"""A stand-in for a GPU's streams: what is queued runs later, in any order that streams and events allow."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest


class Mark:
    """A point in a stream."""

    done = False


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.last: Mark | None = None
        self.stream: Stream | None = None  # of the last record

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or self.device.current
        mark = self.last = Mark()
        self.stream.queue(lambda: setattr(mark, "done", True))

    def query(self) -> bool:
        return self.last is None or self.last.done


class Stream:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.work: deque[tuple[Mark | None, Callable[[], None]]] = deque()
        self.cuda_stream = len(device.streams)
        device.streams.append(self)

    def queue(self, run: Callable[[], None], behind: Mark | None = None) -> None:
        self.work.append((behind, run))

    def wait_event(self, event: Event) -> None:
        if event.last is not None:
            self.queue(lambda: None, event.last)

    def record_event(self) -> Event:
        event = Event(self.device)
        event.record(self)
        return event

    def synchronize(self) -> None:
        while self.work:
            self.device.step()


class Device:
    """Streams whose heads run one at a time, chosen at random."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.streams: list[Stream] = []
        self.current = self.compute = Stream(self)

    def step(self) -> bool:
        """Run one piece of work; whether there was one that may run."""
        ready = [s for s in self.streams if s.work and (s.work[0][0] is None or s.work[0][0].done)]
        if not ready:
            assert not any(stream.work for stream in self.streams), "streams wait for each other for ever"
            return False
        _, run = self.rng.choice(ready).work.popleft()
        run()
        return True

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def copy(self, targets: Any, sources: Any, sizes: Any, stream: int) -> None:
        """The driver's copies: in the order of their stream, each at once."""
        for pair in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            self.streams[stream].queue(lambda pair=pair: ctypes.memmove(*pair))  # type: ignore[misc]

    def copy_pages(
        self, layers: Any, devices: Any, others: Any, layer_bytes: int, *, store: bool, num_programs: int
    ) -> None:
        def run() -> None:
            for device, other in zip(devices.tolist(), others.tolist(), strict=True):
                for layer, address in enumerate(layers.tolist()):
                    near, far = address + device * layer_bytes, other + layer * layer_bytes
                    ctypes.memmove(*((far, near) if store else (near, far)), layer_bytes)

        assert num_programs > 0
        self.current.queue(run)

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the GPU's place in cuda_copies."""
        import torch

        from dagengine_kvstore import cuda_copies

        class Driver:
            has_batches = True
            copy = copy_batch = staticmethod(self.copy)
            pin = unpin = staticmethod(lambda *_: None)
            device_address = staticmethod(lambda address: address)

        def table(copies: Any, *rows: Any) -> Any:
            return torch.stack([torch.from_numpy(row.copy()) for row in rows])

        for name, value in {
            "Stream": lambda *_, **__: Stream(self),
            "Event": lambda: Event(self),
            "device": lambda *_: nullcontext(),
            "stream": self.on,
            "synchronize": lambda: None,
            "current_stream": lambda *_: self.current,
        }.items():
            monkeypatch.setattr(cuda_copies.torch.cuda, name, value)
        monkeypatch.setattr(cuda_copies, "CudaDriver", Driver)
        monkeypatch.setattr(cuda_copies.CudaCopies, "_table", table)
        monkeypatch.setattr(cuda_copies.page_kernel, "copy_pages", self.copy_pages)
        monkeypatch.setattr(cuda_copies.page_kernel, "prepare", lambda *_: None)
