"""What the driver is called with, against a stand-in for libcuda. The GPU's tests are in test_torch_transfer.py."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
from kvstore_helpers import refused

np = pytest.importorskip("numpy")

from dagengine_kvstore import KVStoreError, cuda_driver  # noqa: E402
from dagengine_kvstore.cuda_driver import CudaDriver  # noqa: E402

STREAM = 77


def words(address: int, count: int) -> list[int]:
    return list((ctypes.c_uint64 * count).from_address(address))


class Libcuda(SimpleNamespace):
    """Copies host memory at once. `fail` is the result of the next call."""

    def __init__(self, batch: str | None) -> None:
        self.fail, self.calls = 0, []

        def plain(*_: Any) -> int:
            return self.fail

        def describe(_: Any, text: Any) -> int:
            text._obj.value = b"out of something"
            return 0

        def copy(target: int, source: int, size: int, stream: int) -> int:
            assert stream == STREAM
            ctypes.memmove(target, source, size)
            self.calls.append(1)
            return self.fail

        def copy_batch(*arguments: Any) -> int:
            targets, sources, sizes, count, attributes, indices, number, *rest = arguments
            assert rest[-1] == STREAM and len(rest) == (2 if batch == "cuMemcpyBatchAsync" else 1)
            assert number == 1 and words(indices, 1) == [0]
            assert attributes._obj.source_access_order == 1
            for target, source, size in zip(
                *(words(a, count) for a in (targets, sources, sizes)), strict=True
            ):
                ctypes.memmove(target, source, size)
            self.calls.append(count)
            return self.fail

        def named(function: Any) -> Any:
            return lambda *arguments: function(*arguments)  # has attributes of its own

        super().__init__(
            cuMemHostRegister_v2=named(plain),
            cuMemHostUnregister=named(plain),
            cuMemHostGetDevicePointer_v2=named(plain),
            cuMemcpyAsync=named(copy),
            cuGetErrorString=named(describe),
        )
        if batch:
            setattr(self, batch, named(copy_batch))


def driver(monkeypatch: pytest.MonkeyPatch, batch: str | None) -> tuple[CudaDriver, Libcuda]:
    library = Libcuda(batch)
    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda name: library)
    return CudaDriver(), library


@pytest.mark.parametrize("batch", ["cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync", None])
def test_extents_go_to_the_driver_in_one_call_where_it_takes_them(
    monkeypatch: pytest.MonkeyPatch, batch: str | None
) -> None:
    cuda, library = driver(monkeypatch, batch)
    assert cuda.has_batches == (batch is not None)
    source = ctypes.create_string_buffer(b"abcdefgh", 8)
    target = ctypes.create_string_buffer(8)
    begin, end = ctypes.addressof(source), ctypes.addressof(target)
    copy = cuda.copy_batch if batch else cuda.copy
    copy(np.array([end + 5, end]), np.array([begin, begin + 4]), np.array([3, 2]), STREAM)
    assert target.raw == b"ef\0\0\0abc"
    assert library.calls == ([2] if batch else [1, 1])
    copy(*np.zeros((3, 0), np.int64), STREAM)
    assert len(library.calls) == (1 if batch else 2)


def test_a_failed_call_is_a_typed_error_in_the_drivers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, library = driver(monkeypatch, "cuMemcpyBatchAsync_v2")
    cuda.pin(4096, 4096)
    library.fail = 2
    nothing = np.zeros(1, np.int64)
    calls = (
        lambda: cuda.copy(nothing, nothing, nothing, STREAM),
        lambda: cuda.copy_batch(nothing, nothing, nothing, STREAM),
        lambda: cuda.pin(4096, 4096),
        lambda: cuda.unpin(4096),
        lambda: cuda.device_address(4096),
    )
    for call in calls:
        with pytest.raises(KVStoreError, match="fails with 2: out of something") as caught:
            call()
        assert caught.value.code == "device_error"


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", missing)
    with refused("device_error"):
        CudaDriver()
