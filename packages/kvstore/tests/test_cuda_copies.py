"""CudaCopies on a stand-in for a GPU, whose streams run in any order that events allow. The GPU's own tests are in
test_torch_transfer.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvstore_streams import Device, Event, Stream  # noqa: E402

from dagengine_kvstore import Copy  # noqa: E402
from dagengine_kvstore.cuda_copies import CudaCopies  # noqa: E402
from dagengine_kvstore.extents import Method  # noqa: E402
from dagengine_kvstore.torch_arena import TorchArena  # noqa: E402
from dagengine_kvstore.torch_transfer import TorchTransfer  # noqa: E402

NUM_PAGES, NUM_HOST = 10, 8


def run(device: Device, monkeypatch: pytest.MonkeyPatch, method: Method | None) -> bool:
    """Random stores, loads and writes; whether all bytes are as if each had ended before the next began."""
    device.stand_in(monkeypatch)
    rng = device.rng
    layers = rng.choice((1, 3))
    arena = TorchArena(layers, NUM_PAGES, 1, 1, 8, torch.int8)
    transfer = TorchTransfer(
        arena,
        NUM_HOST,
        chunk_bytes=3 * arena.page_bytes,
        store_bytes_per_s=rng.choice((None, arena.page_bytes)),
        clock=iter(range(10**9)).__next__,
        copies=partial(
            CudaCopies, method=method, staging_bytes=2 * arena.page_bytes, batch=rng.random() < 0.5
        ),
    )
    near, far = [0] * NUM_PAGES, [0] * NUM_HOST
    open_tickets: dict[int, Copy] = {}

    def write(page: int, value: int) -> None:
        for layer in range(layers):
            arena.layer(layer)[page].fill_(value)

    def poll() -> None:
        for completion in transfer.poll():
            assert completion.error is None, completion.error
            del open_tickets[completion.ticket]

    for value in range(1, 50):
        for _ in range(rng.choice((0, 0, 10, 100))):
            device.step()
        poll()
        busy = {page for copy in open_tickets.values() for page, _ in copy.pages}
        kind = rng.choice(("store", "load", "write", "write"))
        if kind == "write":
            for page in {rng.randrange(NUM_PAGES) for _ in range(3)} - busy:
                device.compute.queue(partial(write, page, value))
                near[page] = value
            continue
        if kind == "load":
            device.compute.synchronize()
        count = rng.randint(1, 7)
        pairs = tuple(
            zip(rng.sample(range(NUM_PAGES), count), rng.sample(range(NUM_HOST), count), strict=True)
        )
        open_tickets[transfer.submit(Copy(kind, pairs))] = Copy(kind, pairs)  # type: ignore[arg-type]
        for page, host in pairs:
            if kind == "store":
                far[host] = near[page]
            else:
                near[page] = far[host]
    while open_tickets:
        device.step()
        poll()
    device.compute.synchronize()
    found = [
        {int(x) for layer in range(layers) for x in arena.layer(layer)[page].flatten()}
        for page in range(NUM_PAGES)
    ]
    transfer.close()
    return found == [{value} for value in near] and [
        set(transfer.host.page(page)) for page in range(NUM_HOST)
    ] == [{value} for value in far]


@pytest.mark.parametrize("method", [None, *Method])
@pytest.mark.parametrize("seed", range(15))
def test_streams_in_any_order_give_what_the_order_of_submits_gives(
    monkeypatch: pytest.MonkeyPatch, method: Method | None, seed: int
) -> None:
    assert run(Device(seed), monkeypatch, method)


@pytest.mark.parametrize("missing", ["wait for the compute stream", "wait for a buffer", "wait for a kernel"])
def test_every_edge_is_needed(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Without one kind of edge some schedule differs."""

    def without(stream: Stream, event: Event) -> None:
        buffer = any(event in lane.free for copies in made for lane in copies._lanes.values())
        compute = event.stream is stream.device.compute
        what = "compute stream" if compute else "buffer" if buffer else "kernel"
        if not missing.endswith(what) and event.last is not None:
            stream.queue(lambda: None, event.last)

    made: list[Any] = []
    init = CudaCopies.__init__

    def remember(copies: CudaCopies, *arguments: Any, **options: Any) -> None:
        init(copies, *arguments, **options)
        made.append(copies)

    monkeypatch.setattr(CudaCopies, "__init__", remember)
    monkeypatch.setattr(Stream, "wait_event", without)
    results = []
    for seed in range(30):
        made.clear()
        with pytest.MonkeyPatch.context() as patch:
            results.append(run(Device(seed), patch, Method.STAGED))
    assert not all(results)
