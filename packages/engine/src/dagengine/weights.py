"""Weights from a Hugging Face folder, by safetensors alone.

The index, where there is one, is the authority: it says which file holds which tensor, and a tensor that is missing,
that appears in a file which the index does not give it to, or that nothing asks for is an error with its name.
Without an index the one `model.safetensors` is read. Nothing is globbed, unpickled or executed.

Files are mapped, not read into memory. On the way to a GPU every tensor goes through two small pinned buffers in turns:
one is filled while the other is copied, and what arrives is the tensor's last place. So the host never holds more
than the buffers, and the GPU never more than the weights and one tensor that is being put together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from .errors import DagError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
COMPUTED_SUFFIXES = ("rotary_emb.inv_freq",)
STAGING_BYTES = 32 << 20
STORED = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class WeightSource(Protocol):
    """Where a model takes its tensors from; every tensor is taken exactly once."""

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor: ...

    def take_fused(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Tensors below each other, in one that is allocated once: their first axes add up, the others are equal."""
        ...

    def has(self, name: str) -> bool: ...

    def finish(self) -> None: ...


def _invalid(message: str, field: str | None = None) -> DagError:
    return DagError("invalid_weights", message, field)


class SafetensorsSource:
    """The tensors of a folder, cast once to `dtype` on `device`.

    Raises:
        DagError: `invalid_weights`, naming the tensor or file at fault.
    """

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._staging = Staging(device) if device.type == "cuda" else None
        self._taken: set[str] = set()
        self._files: dict[str, safe_open] = {}
        self._where = self._locate(folder)

    def _locate(self, folder: Path) -> dict[str, str]:
        index_path = folder / INDEX
        if not index_path.exists():
            if not (folder / SINGLE).exists():
                raise _invalid(f"{folder} holds neither {INDEX} nor {SINGLE}", "model")
            self._open(folder, SINGLE)
            return dict.fromkeys(self._files[SINGLE].keys(), SINGLE)
        try:
            weight_map = json.loads(index_path.read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise _invalid(f"{INDEX} has no readable weight_map: {error}", INDEX) from None
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise _invalid(f"{INDEX}: weight_map must map tensor names to file names", INDEX)
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise _invalid(f"{INDEX} puts {name!r} into {file!r}, which is no file of this folder", INDEX)
        for file in dict.fromkeys(weight_map.values()):
            self._open(folder, file)
            here = set(self._files[file].keys())
            listed = {name for name, owner in weight_map.items() if owner == file}
            if missing := sorted(listed - here):
                raise _invalid(f"{file} lacks {missing[0]!r}, which {INDEX} puts there", missing[0])
            if extra := sorted(here - listed):
                raise _invalid(f"{file} holds {extra[0]!r}, which {INDEX} does not put there", extra[0])
        return dict(weight_map)

    def _open(self, folder: Path, file: str) -> None:
        try:
            self._files[file] = safe_open(str(folder / file), framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            raise _invalid(f"{file} cannot be read: {error}", file) from None

    def has(self, name: str) -> bool:
        return name in self._where

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name`, which must have `shape`; asking twice for one is a fault of the caller."""
        found = self._find(name, shape)
        if self._staging is None:
            return found.to(self._device, self._dtype)
        return self._place(found, torch.empty(shape, dtype=self._dtype, device=self._device))

    def take_fused(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """The tensors below each other; each must have its shape."""
        if len(names) == 1:
            return self.take(names[0], shapes[0])
        fused = torch.empty(fused_shape(shapes), dtype=self._dtype, device=self._device)
        begin = 0
        for name, shape in zip(names, shapes, strict=True):
            self._place(self._find(name, shape), fused[begin : begin + shape[0]])
            begin += shape[0]
        return fused

    def _place(self, found: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Copy a tensor of a file to its place, which is contiguous; returns the place."""
        if self._staging is None:
            return out.copy_(found)
        with torch.cuda.device(self._device):
            self._staging.copy(found, out)
        return out

    def _find(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor as it lies in its file."""
        assert name not in self._taken, f"{name} was already taken"
        if name not in self._where:
            raise _invalid(f"the weights lack {name!r}, which the model needs", name)
        tensor: torch.Tensor = self._files[self._where[name]].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise _invalid(f"{name!r} has shape {tuple(tensor.shape)}; config.json asks for {shape}", name)
        if tensor.dtype not in DTYPES:
            raise _invalid(f"{name!r} has dtype {tensor.dtype}; quantised weights are not supported", name)
        self._taken.add(name)
        return tensor

    def finish(self) -> None:
        """Every tensor of the folder must have been taken, apart from those that models compute themselves."""
        left = [n for n in self._where if n not in self._taken and not n.endswith(COMPUTED_SUFFIXES)]
        if left:
            raise _invalid(
                f"{len(left)} tensors belong to no part of the model, the first is {left[0]!r}", left[0]
            )
        if self._staging is not None:
            self._staging.finish()
        self._files.clear()


def stored_dtype(folder: Path) -> str | None:
    """The dtype of the first tensor of a folder's weights, or None where it is none that is supported.

    Raises:
        DagError: `invalid_weights`.
    """
    source = SafetensorsSource(folder, dtype=torch.float32, device=torch.device("cpu"))
    name, file = next(iter(source._where.items()))
    return STORED.get(source._files[file].get_slice(name).get_dtype())


class Staging:
    """Two pinned buffers between the host's memory and a GPU, filled and copied in turns on the current stream."""

    def __init__(self, device: torch.device, num_bytes: int = STAGING_BYTES) -> None:
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)]
        self._device, self._turn = device, 0

    def copy(self, source: torch.Tensor, out: torch.Tensor) -> None:
        """Copy `source`, on the host, to the contiguous `out` on the device, which has its shape but maybe not its
        dtype. The device is the current one; what is still in flight on return is in the order of its stream."""
        flat, target = source.reshape(-1), out.view(-1)
        step = self._buffers[0].numel() // source.element_size()
        for begin in range(0, flat.numel(), step):
            part = flat[begin : begin + step]
            buffer, event = self._buffers[self._turn], self._events[self._turn]
            event.synchronize()
            staged = buffer[: part.numel() * part.element_size()].view(part.dtype).copy_(part)
            place = target[begin : begin + step]
            if staged.dtype == place.dtype:
                place.copy_(staged, non_blocking=True)
            else:
                place.copy_(staged.to(self._device, non_blocking=True))
            event.record()
            self._turn = 1 - self._turn

    def finish(self) -> None:
        """Wait for what is in flight, and let go of the buffers."""
        for event in self._events:
            event.synchronize()
        self._buffers.clear()


def fused_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of tensors below each other."""
    assert len({shape[1:] for shape in shapes}) == 1, f"{shapes} do not fit below each other"
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


class DummySource:
    """Seeded random tensors of the right shapes, for speed runs of a model whose weights are not at hand.

    They are drawn where they are used, so that billions take seconds on a GPU. A seed gives the same bits on every
    device of a type (`cpu`, `cuda`), and others on the other type; on a GPU each dtype has its own, on a CPU all are
    roundings of the same numbers.
    """

    def __init__(self, seed: int, *, dtype: torch.dtype, device: torch.device, tied: bool) -> None:
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._dtype, self._device, self._tied = dtype, device, tied

    def has(self, name: str) -> bool:
        return not (self._tied and name == "lm_head.weight")

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._fill(torch.empty(shape, dtype=self._dtype, device=self._device), name)

    def take_fused(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """The tensors below each other; the same bits as taken one by one."""
        fused = torch.empty(fused_shape(shapes), dtype=self._dtype, device=self._device)
        begin = 0
        for name, shape in zip(names, shapes, strict=True):
            self._fill(fused[begin : begin + shape[0]], name)
            begin += shape[0]
        return fused

    def _fill(self, out: torch.Tensor, name: str) -> torch.Tensor:
        """Ones for a norm; else drawn, on a CPU in float32 and rounded: a seed gives the same model in any dtype."""
        if out.dim() == 1 and "norm" in name:
            return out.fill_(1.0)
        if out.device.type != "cpu" or out.dtype == torch.float32:
            return out.normal_(0.0, 0.02, generator=self._generator)
        return out.copy_(torch.empty(out.shape).normal_(0.0, 0.02, generator=self._generator))

    def finish(self) -> None:
        """Nothing is left over: tensors are made when asked for."""


def take_head(source: WeightSource, embedding: torch.Tensor, *, tied: bool) -> torch.Tensor:
    """The output matrix [vocab, hidden].

    A tied model uses its embedding; if the folder ships `lm_head.weight` all the same it must be the same bytes.
    """
    name = "lm_head.weight"
    shape = (embedding.shape[0], embedding.shape[1])
    if not tied:
        return source.take(name, shape)
    if source.has(name):
        shipped = source.take(name, shape)
        if not torch.equal(shipped, embedding):
            raise _invalid(
                "config.json ties the output matrix to the embedding, but lm_head.weight differs", name
            )
    return embedding


class Closing:
    """Runs `finish` when the block ends without an error."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def __enter__(self) -> WeightSource:
        return self._source

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._source.finish()
