"""Kernels from source: compiled for the device by NVRTC (or nvcc), cached on disk, launched on torch's streams.

Knows source files, macros and bytes of parameters; not what a kernel computes. The native half (csrc/driver.cpp)
opens libcuda and NVRTC at run time.

    kernel("merge", "merge_parts", {"HEAD_DIM": 128})      csrc/cuda/merge.cu, extern "C" __global__ merge_parts
        memory cache     (source, name, macros, device)
        disk cache       content of the source, options, compiler version -> cubin
        compiler         NVRTC of torch's installation, else nvcc on PATH
    launch(grid, block, smem_bytes, stream, params)         neither allocates nor waits: it can be captured

Every kernel takes one struct by value; `bytes(struct)` of a ctypes.Structure (or the structure itself) is its
`params`. What is launched again and again is a `Launch`, whose layout stays. A device of compute capability 9.0 gets
code for sm_90a.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from dagengine_kernels.errors import BACKEND_BROKEN, INVALID_ARGUMENT, UNSUPPORTED, KernelError

SOURCES = Path(__file__).parent.parent / "csrc" / "cuda"

Macros = Mapping[str, int | str]
Dim = tuple[int, int, int]

_TENSOR_MAP_TYPES = {
    torch.uint8: 0,
    torch.int32: 3,
    torch.float16: 6,
    torch.float32: 7,
    torch.bfloat16: 9,
}
_L2_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
_SWIZZLE_128B = 3
_INCLUDE = re.compile(r'#include "([\w.]+)"\s*')


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel that the compile gate builds.

    Attributes:
        source: file in csrc/cuda, without ``.cu``.
        name: the kernel.
        macros: NAME and value each.
        hot: whether a register spill fails the gate.
    """

    source: str
    name: str
    macros: tuple[tuple[str, int | str], ...]
    hot: bool = True


class Compiler(Protocol):
    """Turns CUDA C++ into a cubin."""

    @property
    def version(self) -> str:
        """Name and version: part of the disk cache's key."""

    def compile(self, text: str, file_name: str, options: Sequence[str]) -> bytes:
        """The cubin. Raises: KernelError (backend_not_loadable) with the compiler's log."""


class Nvrtc:
    """NVIDIA's run-time compiler.

    Args:
        path: of libnvrtc.
    """

    def __init__(self, path: str) -> None:
        native = _native()
        self._error = native.CudaError
        try:
            self._library = native.Nvrtc(path)
        except self._error as e:
            raise KernelError(BACKEND_BROKEN, str(e), "nvrtc") from e
        self.version = "nvrtc {}.{}".format(*self._library.version)

    def compile(self, text: str, file_name: str, options: Sequence[str]) -> bytes:
        try:
            return bytes(self._library.compile(text, file_name, list(options)))
        except self._error as e:
            raise KernelError(BACKEND_BROKEN, str(e), file_name) from e


class Nvcc:
    """The CUDA toolkit's compiler.

    Args:
        path: of nvcc.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        told = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        releases = [line.strip() for line in told.stdout.splitlines() if "release" in line]
        if told.returncode != 0 or not releases:
            raise KernelError(BACKEND_BROKEN, f"{path} --version fails: {told.stderr.strip()}", "nvcc")
        self.version = f"nvcc {releases[0]}"

    def compile(self, text: str, file_name: str, options: Sequence[str]) -> bytes:
        with tempfile.TemporaryDirectory(prefix="dagengine-") as folder:
            source, cubin = Path(folder, file_name), Path(folder, "kernel.cubin")
            source.write_text(text)
            command = [self._path, "-cubin", *options, "-o", str(cubin), str(source)]
            told = subprocess.run(command, capture_output=True, text=True, check=False)
            if told.returncode != 0:
                raise KernelError(BACKEND_BROKEN, f"nvcc fails:\n{told.stdout}{told.stderr}", file_name)
            return cubin.read_bytes()


class Kernel:
    """A kernel on one device; made by `kernel`."""

    __slots__ = ("_error", "_function", "name")

    def __init__(self, function: Any, error: type[Exception]) -> None:
        self._function, self._error = function, error
        self.name: str = function.name

    def launch(
        self,
        grid: Dim,
        block: Dim,
        smem_bytes: int,
        stream: int,
        params: bytes | ctypes.Structure,
        *,
        pdl: bool = False,
        cluster: Dim = (1, 1, 1),
    ) -> None:
        """Queue one launch.

        Args:
            grid, block: blocks and threads (x, y, z).
            smem_bytes: dynamic shared memory per block.
            stream: a CUDA stream handle, `current_stream`.
            params: the kernel's struct; it is copied before this returns.
            pdl: may start while the kernel before it in the stream still runs (programmatic stream serialization);
                the kernel must then wait (griddepcontrol.wait) before it touches what that one writes.
            cluster: blocks per cluster; divides `grid`.
        Raises: KernelError (invalid_argument) with the driver's words.
        """
        try:
            self._function.launch(grid, block, smem_bytes, stream, params, pdl, cluster)
        except self._error as e:
            raise KernelError(INVALID_ARGUMENT, str(e), "launch") from e

    def prepare(
        self, grid: Dim, block: Dim, smem_bytes: int, *, pdl: bool = True, cluster: Dim = (1, 1, 1)
    ) -> Launch:
        """Launches of this layout; see `launch`."""
        return Launch(self._function.launch, self._error, (grid, block, smem_bytes), (pdl, cluster))

    def blocks_per_sm(self, threads: int, smem_bytes: int) -> int:
        """How many blocks of this size an SM holds at once."""
        try:
            return int(self._function.blocks_per_sm(threads, smem_bytes))
        except self._error as e:
            raise KernelError(INVALID_ARGUMENT, str(e), "smem_bytes") from e

    @property
    def registers(self) -> int:
        """Registers per thread."""
        return int(self._function.registers)

    @property
    def local_bytes(self) -> int:
        """Bytes of local memory per thread: spills, and arrays indexed at run time."""
        return int(self._function.local_bytes)

    @property
    def shared_bytes(self) -> int:
        """Bytes of static shared memory per block."""
        return int(self._function.shared_bytes)

    @property
    def params_bytes(self) -> int:
        """Size of its struct; 0 where the driver cannot tell."""
        return int(self._function.params_bytes)


class Launch:
    """A kernel with the layout of its launches; made by `Kernel.prepare`."""

    __slots__ = ("_error", "_launch", "after", "before")

    def __init__(
        self,
        launch: Any,
        error: type[Exception],
        before: tuple[Dim, Dim, int],
        after: tuple[bool, Dim],
    ) -> None:
        self._launch, self._error = launch, error
        self.before, self.after = before, after

    def __call__(self, stream: int, params: bytes | ctypes.Structure) -> None:
        """As `Kernel.launch`."""
        try:
            self._launch(*self.before, stream, params, *self.after)
        except self._error as e:
            raise KernelError(INVALID_ARGUMENT, str(e), "launch") from e


def current_stream(device: int) -> int:
    """The handle of the stream that torch launches on now."""
    return int(torch._C._cuda_getCurrentRawStream(device))


_kernels: dict[tuple[str, str, tuple[tuple[str, int | str], ...], int], Kernel] = {}
_modules: dict[tuple[str, tuple[tuple[str, int | str], ...], int], Any] = {}
_lock = threading.Lock()


def kernel(source: str, name: str, macros: Macros, device: int | None = None) -> Kernel:
    """A kernel on the current device (or `device`), compiled if no cache holds it.

    Args:
        source: file in csrc/cuda, without ``.cu``.
        name: an ``extern "C" __global__`` function of it.
        macros: what to define.
    Raises: KernelError (backend_not_loadable: no compiler, no driver, or the code does not compile).
    """
    ordinal = torch.cuda.current_device() if device is None else device
    listed = tuple(sorted(macros.items()))
    found = _kernels.get((source, name, listed, ordinal))
    if found is not None:
        return found
    with _lock:
        native = _native()
        module = _modules.get((source, listed, ordinal))
        try:
            if module is None:
                arch = architecture(torch.cuda.get_device_capability(ordinal))
                module = native.Module(cubin(source, dict(listed), arch), ordinal)
                _modules[source, listed, ordinal] = module
            made = Kernel(module.function(name), native.CudaError)
        except native.CudaError as e:
            raise KernelError(BACKEND_BROKEN, f"{name} does not load: {e}", source) from e
        return _kernels.setdefault((source, name, listed, ordinal), made)


def cubin(source: str, macros: Macros, arch: str) -> bytes:
    """The compiled file, from the disk cache or the compiler; needs no GPU.

    Raises: KernelError (backend_not_loadable).
    """
    text = read_source(source)
    options = compile_options(macros, arch)
    built_by = compiler()
    key = hashlib.sha256("\0".join((built_by.version, *options, text)).encode()).hexdigest()
    path = cache_folder() / f"{source}-{key[:40]}.cubin"
    try:
        return path.read_bytes()
    except FileNotFoundError:
        pass
    built = built_by.compile(text, f"{source}.cu", options)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(built)
        os.replace(file.name, path)
    except OSError as e:
        warnings.warn(f"compiled kernels are not kept, they are built again next time: {e}", stacklevel=2)
    return built


def read_source(source: str) -> str:
    """The text of csrc/cuda/SOURCE.cu with its own headers in place of ``#include "..."``, each once.

    Raises: KernelError (backend_not_loadable).
    """
    seen: set[str] = set()

    def expand(name: str) -> str:
        try:
            text = (SOURCES / name).read_text()
        except OSError as e:
            raise KernelError(BACKEND_BROKEN, f"its source cannot be read: {e}", source) from e
        lines = []
        for number, line in enumerate(text.splitlines(), 1):
            included = _INCLUDE.fullmatch(line)
            if included is None:
                lines.append("" if line == "#pragma once" else line)
            elif included[1] not in seen:
                seen.add(included[1])
                lines += [f'#line 1 "{included[1]}"', expand(included[1]), f'#line {number + 1} "{name}"']
        return "\n".join(lines) + "\n"

    return expand(f"{source}.cu")


def compile_options(macros: Macros, arch: str) -> list[str]:
    """Options that NVRTC and nvcc both take."""
    defines = [f"-D{name}={value}" for name, value in sorted(macros.items())]
    return [f"--gpu-architecture={arch}", "--std=c++17", *defines]


def architecture(capability: tuple[int, int]) -> str:
    """``sm_90a`` for compute capability 9.0, else the plain one. Raises: KernelError (capability_missing)."""
    if capability < (8, 0):
        message = "kernels need compute capability 8.0, this device has {}.{}".format(*capability)
        raise KernelError(UNSUPPORTED, message, "device")
    return "sm_90a" if capability == (9, 0) else "sm_{}{}".format(*capability)


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/dagengine/kernels``, by default below ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "dagengine" / "kernels"


@functools.cache
def compiler() -> Compiler:
    """NVRTC where one is found, else nvcc.

    Raises: KernelError (backend_not_loadable) that says what to install.
    """
    path = find_nvrtc()
    if path is not None:
        return Nvrtc(path)
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        return Nvcc(nvcc)
    message = (
        "needs NVRTC or nvcc to compile its kernels: install nvidia-cuda-nvrtc (as torch's CUDA builds do)"
    )
    raise KernelError(BACKEND_BROKEN, message, "nvrtc")


def find_nvrtc() -> str | None:
    """Path of libnvrtc: what this process has loaded, else what pip installed, else what the system's loader finds."""
    try:
        with open("/proc/self/maps") as maps:
            loaded = [line.split()[-1] for line in maps if "libnvrtc.so" in line]
    except OSError:
        loaded = []
    if loaded:
        return loaded[0]
    major = (torch.version.cuda or "13").split(".")[0]
    installed: list[str] = []
    for name in ("nvidia-cuda-nvrtc", f"nvidia-cuda-nvrtc-cu{major}", "torch"):
        try:
            files = importlib.metadata.files(name) or ()
        except importlib.metadata.PackageNotFoundError:
            continue
        installed += [
            str(f.locate()) for f in files if f.name.startswith("libnvrtc.so") and "alt" not in f.name
        ]
    for path in sorted(installed, key=lambda p: f".so.{major}" not in p):
        if os.path.exists(path):
            return path
    for name in dict.fromkeys((f"libnvrtc.so.{major}", "libnvrtc.so.13", "libnvrtc.so.12")):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    return None


def tensor_map(
    pointer: int,
    dtype: torch.dtype,
    dims: Sequence[int],
    strides_bytes: Sequence[int],
    box: Sequence[int],
    swizzle_128b: bool,
    *,
    l2_bytes: int = 256,
) -> bytes:
    """A CUtensorMap for TMA, 128 bytes; it goes into a kernel's struct at a multiple of 64.

    Args:
        pointer: device address, a multiple of 16.
        dims: elements per axis, innermost first, up to 5 axes.
        strides_bytes: of the axes after the innermost, multiples of 16.
        box: elements per axis that one copy brings; what lies outside `dims` is filled with 0.
        swizzle_128b: swizzle rows of 128 bytes in shared memory; else none.
        l2_bytes: granularity of promotion into L2: 0, 64, 128 or 256.
    Raises: KernelError (invalid_argument).
    """
    if dtype not in _TENSOR_MAP_TYPES:
        raise KernelError(INVALID_ARGUMENT, f"no tensor map of {dtype}", "dtype")
    if l2_bytes not in _L2_PROMOTIONS:
        raise KernelError(INVALID_ARGUMENT, f"must be 0, 64, 128 or 256, not {l2_bytes}", "l2_bytes")
    native = _native()
    swizzle = _SWIZZLE_128B if swizzle_128b else 0
    kind, l2 = _TENSOR_MAP_TYPES[dtype], _L2_PROMOTIONS[l2_bytes]
    try:
        return bytes(
            native.tensor_map(pointer, kind, list(dims), list(strides_bytes), list(box), swizzle, l2)
        )
    except native.CudaError as e:
        raise KernelError(INVALID_ARGUMENT, str(e), "tensor_map") from e


@functools.cache
def unavailable() -> str | None:
    """Why no kernel can be compiled and loaded here, None if that is not known before trying."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        _native().driver_version()
        compiler()
    except (KernelError, RuntimeError) as e:
        return str(e)
    return None


def _native() -> Any:
    from dagengine_kernels.fused import native

    return native.load().cuda
