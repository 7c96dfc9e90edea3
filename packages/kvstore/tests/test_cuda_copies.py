"""CudaCopies on a stand-in for a GPU, whose streams run in any order that events allow. The GPU's own tests are in
test_torch_transfer.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvstore_streams import Device, Event, Stream  # noqa: E402

from dagengine_kvstore import Copy, extents  # noqa: E402
from dagengine_kvstore.cuda_copies import CudaCopies  # noqa: E402
from dagengine_kvstore.extents import Method  # noqa: E402
from dagengine_kvstore.host_arena import HostArena  # noqa: E402
from dagengine_kvstore.torch_arena import TorchArena  # noqa: E402
from dagengine_kvstore.torch_copies import Direction, page_rows  # noqa: E402
from dagengine_kvstore.torch_transfer import TorchTransfer  # noqa: E402

NUM_PAGES, NUM_HOST = 10, 8


def run(device: Device, monkeypatch: pytest.MonkeyPatch, method: Method | None) -> bool:
    """Random stores, loads and writes; whether all bytes are as if each had ended before the next began."""
    device.stand_in(monkeypatch)
    monkeypatch.setattr(extents, "FIRST_PART_BYTES", 8)
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


@pytest.mark.parametrize("kind", ["store", "load"])
@pytest.mark.parametrize("layers", [1, 2])
def test_direct_copies_are_queued_in_growing_parts_in_the_order_of_the_host(
    monkeypatch: pytest.MonkeyPatch, kind: Direction, layers: int
) -> None:
    device = Device(0)
    device.stand_in(monkeypatch)
    size = 16
    monkeypatch.setattr(extents, "FIRST_PART_BYTES", 2 * layers * size)
    arena = TorchArena(layers, 20, 1, 1, size // 2, torch.int8)
    host = HostArena(30, arena.page_bytes, chunk_bytes=11 * arena.page_bytes)
    copies = CudaCopies(arena, host, method=Method.DIRECT, staging_bytes=1)
    calls: list[tuple[list[int], list[int], list[int]]] = []

    def record(targets: Any, sources: Any, sizes: Any, stream: int) -> None:
        assert all(array.flags.c_contiguous and array.dtype == "int64" for array in (targets, sources, sizes))
        near, far = (sources, targets) if kind == "store" else (targets, sources)
        calls.append((near.tolist(), far.tolist(), sizes.tolist()))

    copies._copy = record  # type: ignore[method-assign]
    pages = [(3, 25), (7, 1), (8, 2), (0, 10), (1, 11), (15, 20), (12, 22)]  # 10 and 11 are in two chunks
    copies.issue(kind, page_rows(pages), [])
    bases = [arena.layer(layer).data_ptr() for layer in range(layers)]
    wanted = [
        (bases[layer] + page * size, host.address(at) + layer * size)
        for page, at in sorted(pages, key=lambda pair: pair[1])
        for layer in range(layers)
    ]
    found = [pair for near, far, _ in calls for pair in zip(near, far, strict=True)]
    if layers == 1:  # 7 and 8 go as one
        assert found == [wanted[0], *wanted[2:]]
        assert [sizes for _, _, sizes in calls] == [[2 * size], [size] * 4, [size]]
    else:
        assert found == wanted
        assert [sizes for _, _, sizes in calls] == [[size] * 4, [size] * 8, [size] * 2]


@pytest.mark.parametrize(("kind", "first"), [("store", "table"), ("load", "copy")])
def test_staged_copies_begin_as_early_as_they_can(
    monkeypatch: pytest.MonkeyPatch, kind: Direction, first: str
) -> None:
    device = Device(0)
    device.stand_in(monkeypatch)
    arena = TorchArena(2, 8, 1, 1, 8, torch.int8)
    copies = CudaCopies(
        arena,
        HostArena(8, arena.page_bytes),
        method=Method.STAGED,
        staging_bytes=2 * arena.page_bytes,
    )
    seen: list[str] = []
    for name, word in (("_table", "table"), ("_copy", "copy"), ("_run_kernel", "kernel")):

        def note(call: Any, word: str, *arguments: Any) -> Any:
            seen.append(word)
            return call(*arguments)

        monkeypatch.setattr(copies, name, partial(note, getattr(copies, name), word))
    copies.issue(kind, page_rows([(page, 2 * page) for page in range(4)]), [])
    turn = ["kernel", "copy"] if kind == "store" else ["copy", "kernel"]
    assert [word for word in seen if word != "table"] == turn * 2
    assert seen.count("table") == 1 and seen[0] == first


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
