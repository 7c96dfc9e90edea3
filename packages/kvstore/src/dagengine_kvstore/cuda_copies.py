"""Pages between a CUDA device and pinned host memory. Knows streams, events, buffers; knows no tickets.

Two streams per direction, of the lowest priority, so that a kernel prepares one buffer while the copy engine moves
the other:

    store   compute ──► kernels: gather ──► copies: buffer to host        end: copies
    load                copies: host to buffer ──► kernels: scatter       end: kernels

A buffer is written again when what read it last has ended. Copies that take no buffer run on the stream at the end.
What is queued begins before the rest was prepared: the host's work is hidden behind the first part's copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dagengine_kvstore import page_kernel
from dagengine_kvstore.cuda_driver import CudaDriver
from dagengine_kvstore.errors import KVStoreError
from dagengine_kvstore.extents import Method, Numbers, choose, parts, stretches
from dagengine_kvstore.host_arena import HostArena
from dagengine_kvstore.torch_arena import TorchArena
from dagengine_kvstore.torch_copies import Direction

STAGING_BYTES = 32 << 20
GATHER_PROGRAMS = 64
HOST_PROGRAMS: dict[Direction, int] = {"store": 8, "load": 16}  # enough for the link; more cost steps more


class _Lane:
    """One direction: its streams, two buffers of `num_slots` pages, and what must end before each is written again."""

    def __init__(self, device: torch.device, num_slots: int, page_bytes: int) -> None:
        self.kernels = torch.cuda.Stream(device, priority=0)
        self.copies = torch.cuda.Stream(device, priority=0)
        self.buffers = [
            torch.empty(num_slots * page_bytes, dtype=torch.uint8, device=device) for _ in range(2)
        ]
        slots = [buffer.data_ptr() + page_bytes * np.arange(num_slots) for buffer in self.buffers]
        self.slots = torch.from_numpy(np.stack(slots)).to(device)
        self.free = [torch.cuda.Event(), torch.cuda.Event()]
        self.turn = 0


class CudaCopies:
    """Copies between the layers of `arena` and `host`, whose chunks it pins as they are mapped.

    Args:
        compute: the stream that writes the device's pages; None: the current one of each call of `mark`.
        method: how everything is copied; None: `extents.choose` for each call of `issue`.
        staging_bytes: of one of the four buffers on the device, or one page if that is more.
        gather_programs: of a kernel between layers and a buffer.
        host_programs: of a kernel between layers and the host; None: HOST_PROGRAMS of each direction.
        batch: whether extents are given to the driver in one call, where it can take them so.

    Raises KVStoreError `device_error` without a CUDA driver.
    """

    def __init__(
        self,
        arena: TorchArena,
        host: HostArena,
        *,
        compute: torch.cuda.Stream | None = None,
        method: Method | None = None,
        staging_bytes: int = STAGING_BYTES,
        gather_programs: int = GATHER_PROGRAMS,
        host_programs: int | None = None,
        batch: bool = True,
    ) -> None:
        self._host, self._compute, self._method = host, compute, method
        self._driver = driver = CudaDriver()
        self._pinned: list[int] = []
        host.pin = self._pin
        self._device = arena.layer(0).device
        addresses = [arena.layer(layer).data_ptr() for layer in range(arena.num_layers)]
        self._addresses = np.array(addresses, np.int64)
        self._hosts = np.zeros(host.num_pages, np.int64)  # addresses; 0: not asked for yet
        self._layer_bytes = arena.page_bytes // arena.num_layers
        self._layer_offsets = np.arange(arena.num_layers) * self._layer_bytes
        self._page_bytes = arena.page_bytes
        self._copy = driver.copy_batch if batch and driver.has_batches else driver.copy
        self._gather_programs, self._host_programs = gather_programs, host_programs
        self._num_slots = max(1, staging_bytes // self._page_bytes)
        with torch.cuda.device(self._device):
            self._layers = torch.tensor(addresses, dtype=torch.int64, device=self._device)
            self._lanes: dict[Direction, _Lane] = {
                "store": _Lane(self._device, self._num_slots, self._page_bytes),
                "load": _Lane(self._device, self._num_slots, self._page_bytes),
            }
            page_kernel.prepare(self._layers, self._layer_bytes)
            torch.cuda.synchronize()

    def mark(self) -> torch.cuda.Event:
        """The end of everything queued on the compute stream so far."""
        event = torch.cuda.Event()
        event.record(self._compute or torch.cuda.current_stream(self._device))
        return event

    def issue(self, kind: Direction, pages: Numbers, after: Sequence[torch.cuda.Event]) -> torch.cuda.Event:
        """Queue copies of `[2, num_pages]` device and host pages behind `after`; the event of their end."""
        lane = self._lanes[kind]
        first, last = (lane.kernels, lane.copies) if kind == "store" else (lane.copies, lane.kernels)
        devices, hosts = pages
        addresses = self._host_addresses(hosts)
        method = self._method or choose(devices, addresses, len(self._addresses), self._layer_bytes)
        staged = method is Method.STAGED and len(devices) > 0
        with torch.cuda.device(self._device):
            for event in after:
                (first if staged else last).wait_event(event)
            if staged:  # what runs on the last stream waits for the first
                self._queue_staged(kind, devices, addresses, lane)
            elif method is not Method.KERNEL:
                self._queue_direct(kind, devices, addresses, last)
            elif len(devices):
                with torch.cuda.stream(last):
                    table = self._table(devices, addresses)
                    programs = self._host_programs or HOST_PROGRAMS[kind]
                    self._run_kernel(kind, table[0], table[1], programs)
            return last.record_event()

    def wait(self) -> None:
        """Block until everything issued has ended."""
        for lane in self._lanes.values():
            lane.kernels.synchronize()
            lane.copies.synchronize()

    def close(self) -> None:
        """Wait, then unpin. The host pages stay readable."""
        self.wait()
        with torch.cuda.device(self._device):
            while self._pinned:
                self._driver.unpin(self._pinned.pop())

    def _pin(self, address: int, size: int) -> None:
        with torch.cuda.device(self._device):
            self._driver.pin(address, size)
            self._pinned.append(address)
            if self._driver.device_address(address) != address:
                raise KVStoreError("device_error", "the device finds pinned memory at other addresses")

    def _host_addresses(self, hosts: Numbers) -> Numbers:
        """Where host pages begin; their memory is mapped and pinned then."""
        found: Numbers = self._hosts[hosts]
        if np.count_nonzero(found) < len(found):
            size = self._host.chunk_pages
            for chunk in np.unique(hosts[found == 0] // size).tolist():
                pages = self._hosts[chunk * size : (chunk + 1) * size]
                pages[:] = self._host.address(chunk * size) + self._page_bytes * np.arange(len(pages))
            found = self._hosts[hosts]
        return found

    def _queue_direct(
        self, kind: Direction, devices: Numbers, hosts: Numbers, stream: torch.cuda.Stream
    ) -> None:
        size = self._layer_bytes
        if len(self._addresses) == 1 and np.count_nonzero(hosts[1:] - hosts[:-1] == size):
            firsts, counts = stretches(hosts, size, devices)
            near, far, sizes = self._addresses + devices[firsts] * size, hosts[firsts], counts * size
        else:  # no two pages are one extent, which is quickly seen
            near = (self._addresses + devices[:, None] * size).ravel()
            far = (self._layer_offsets + hosts[:, None]).ravel()
            sizes = np.full(len(near), size)
        for part in parts(sizes):
            self._move(kind, near[part], far[part], sizes[part], stream)

    def _queue_staged(self, kind: Direction, devices: Numbers, hosts: Numbers, lane: _Lane) -> None:
        table: torch.Tensor | None = None
        with torch.cuda.stream(lane.kernels):
            for begin in range(0, len(devices), self._num_slots):
                turn, lane.turn = lane.turn, 1 - lane.turn
                part = slice(begin, begin + self._num_slots)
                if kind == "load":
                    lane.copies.wait_event(lane.free[turn])
                    self._move_buffer(kind, lane, turn, hosts[part])
                    lane.kernels.wait_event(lane.copies.record_event())
                else:
                    lane.kernels.wait_event(lane.free[turn])
                if table is None:  # a load's first copies are under way
                    (table,) = self._table(devices)
                pages = table[part]
                self._run_kernel(kind, pages, lane.slots[turn, : len(pages)], self._gather_programs)
                if kind == "store":
                    lane.copies.wait_event(lane.kernels.record_event())
                    self._move_buffer(kind, lane, turn, hosts[part])
                    lane.free[turn].record(lane.copies)
                else:
                    lane.free[turn].record(lane.kernels)

    def _move_buffer(self, kind: Direction, lane: _Lane, turn: int, hosts: Numbers) -> None:
        """Between a buffer and host pages at `hosts`, of which the first is in slot 0."""
        firsts, counts = stretches(hosts, self._page_bytes)
        size = self._page_bytes
        near = lane.buffers[turn].data_ptr() + firsts * size
        self._move(kind, near, hosts[firsts], counts * size, lane.copies)

    def _move(
        self, kind: Direction, near: Numbers, far: Numbers, sizes: Numbers, stream: torch.cuda.Stream
    ) -> None:
        targets, sources = (far, near) if kind == "store" else (near, far)
        self._copy(targets, sources, sizes, stream.cuda_stream)

    def _run_kernel(
        self, kind: Direction, devices: torch.Tensor, others: torch.Tensor, num_programs: int
    ) -> None:
        store = kind == "store"
        page_kernel.copy_pages(
            self._layers, devices, others, self._layer_bytes, store=store, num_programs=num_programs
        )

    def _table(self, *rows: Numbers) -> torch.Tensor:
        """Rows of int64 on the device, queued on the current stream."""
        host = torch.empty((len(rows), len(rows[0])), dtype=torch.int64, pin_memory=True)
        for target, row in zip(host.numpy(), rows, strict=True):
            target[:] = row
        return host.to(self._device, non_blocking=True)
