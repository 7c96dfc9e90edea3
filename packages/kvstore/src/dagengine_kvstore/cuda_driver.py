"""The few calls of the CUDA driver that torch has no name for. Knows addresses and streams; needs no torch.

The calling thread must have a current context, which any call of torch.cuda on a device makes.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, addressof, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from dagengine_kvstore.errors import KVStoreError
from dagengine_kvstore.extents import Numbers

PORTABLE, DEVICEMAP = 1, 2
IN_STREAM_ORDER = 1
OVERLAP_WITH_COMPUTE = 1


class _Location(Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class _CopyAttributes(Structure):
    _fields_ = [
        ("source_access_order", c_int),
        ("source", _Location),
        ("destination", _Location),
        ("flags", c_uint),
    ]


class CudaDriver:
    """libcuda. Raises KVStoreError `device_error` where it cannot be loaded; every method does when a call fails."""

    def __init__(self) -> None:
        try:
            self._cuda: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise KVStoreError("device_error", f"the CUDA driver cannot be loaded: {error}") from error
        self._cuda.cuMemHostRegister_v2.argtypes = [c_void_p, c_size_t, c_uint]
        self._cuda.cuMemHostUnregister.argtypes = [c_void_p]
        self._cuda.cuMemHostGetDevicePointer_v2.argtypes = [POINTER(c_uint64), c_void_p, c_uint]
        self._cuda.cuMemcpyAsync.argtypes = [c_uint64, c_uint64, c_size_t, c_void_p]
        self._attributes = _CopyAttributes(IN_STREAM_ORDER, _Location(), _Location(), OVERLAP_WITH_COMPUTE)
        self._first = c_size_t(0)  # of the copies that have these attributes
        self._batch, self._tells_failure = None, False
        for name, tells_failure in (("cuMemcpyBatchAsync_v2", False), ("cuMemcpyBatchAsync", True)):
            if self._batch is None and hasattr(self._cuda, name):
                self._batch, self._tells_failure = getattr(self._cuda, name), tells_failure
                tail = [c_void_p, c_void_p] if tells_failure else [c_void_p]
                self._batch.argtypes = [
                    c_void_p,
                    c_void_p,
                    c_void_p,
                    c_size_t,
                    POINTER(_CopyAttributes),
                    c_void_p,
                    c_size_t,
                    *tail,
                ]

    @property
    def has_batches(self) -> bool:
        """Whether the driver copies many extents in one call (CUDA 12.8 and later)."""
        return self._batch is not None

    def pin(self, address: int, size: int) -> None:
        """Pin host memory for all contexts, mapped into the device's address space."""
        self._check(self._cuda.cuMemHostRegister_v2(address, size, PORTABLE | DEVICEMAP), "cuMemHostRegister")

    def unpin(self, address: int) -> None:
        self._check(self._cuda.cuMemHostUnregister(address), "cuMemHostUnregister")

    def device_address(self, address: int) -> int:
        """Where kernels find pinned memory."""
        found = c_uint64()
        done = self._cuda.cuMemHostGetDevicePointer_v2(byref(found), address, 0)
        self._check(done, "cuMemHostGetDevicePointer")
        return found.value

    def copy(self, targets: Numbers, sources: Numbers, sizes: Numbers, stream: int) -> None:
        """Queue one copy per extent, in this order. Addresses and bytes, `[num_extents]` each."""
        copy = self._cuda.cuMemcpyAsync
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            self._check(copy(target, source, size, stream), "cuMemcpyAsync")

    def copy_batch(self, targets: Numbers, sources: Numbers, sizes: Numbers, stream: int) -> None:
        """As `copy`, in one call, in any order among themselves; `stream` is not the default stream."""
        assert self._batch is not None and len(targets) == len(sources) == len(sizes)
        if not len(sizes):
            return
        assert all(array.flags.c_contiguous for array in (targets, sources, sizes))
        done = self._batch(
            targets.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            byref(self._attributes),
            addressof(self._first),
            1,
            *((byref(c_size_t()), stream) if self._tells_failure else (stream,)),
        )
        self._check(done, "cuMemcpyBatchAsync")

    def _check(self, result: int, call: str) -> None:
        if result:
            text = c_char_p()
            self._cuda.cuGetErrorString(c_int(result), byref(text))
            told = (text.value or b"unknown error").decode()
            raise KVStoreError("device_error", f"{call} fails with {result}: {told}")
