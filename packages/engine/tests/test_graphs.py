"""What a capture leaves behind where it fails: nothing that runs beside what comes after."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from dagengine.graphs import CudaCapture


class FakeStream:
    def __init__(self, *_: object) -> None:
        self.waited: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.waited.append(other)


@pytest.mark.parametrize("fails", [False, True])
def test_what_follows_a_capture_waits_for_it_also_where_it_fails(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    current, streams = FakeStream(), list[FakeStream]()

    def make(*_: object) -> FakeStream:
        streams.append(FakeStream())
        return streams[-1]

    for name, double in {
        "Stream": make,
        "current_stream": lambda _: current,
        "stream": lambda _: nullcontext(),
        "graph": lambda *_, **__: nullcontext(),
        "CUDAGraph": object,
        "graph_pool_handle": lambda: 1,
    }.items():
        monkeypatch.setattr(torch.cuda, name, double)

    def warm_up() -> None:
        if fails:
            raise RuntimeError("planted")

    capture = CudaCapture(torch.device("cuda"))
    with pytest.raises(RuntimeError, match="planted") if fails else nullcontext():
        capture(warm_up, lambda: None)
    (side,) = streams
    assert side.waited == [current] and current.waited == [side]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_what_a_failed_warm_up_has_queued_is_over_before_what_follows() -> None:
    device = torch.device("cuda")
    page = torch.zeros(1 << 20, device=device)
    torch.cuda.synchronize()

    def warm_up() -> None:
        torch.cuda._sleep(100_000_000)
        page.fill_(1.0)
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        CudaCapture(device)(warm_up, lambda: None)
    page.fill_(2.0)
    torch.cuda.synchronize()
    assert bool((page == 2.0).all())
