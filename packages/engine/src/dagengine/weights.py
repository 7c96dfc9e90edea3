"""Weights from a Hugging Face folder, by safetensors alone.

The index, where there is one, is the authority: it says which file holds which tensor, and a tensor that is missing,
that appears in a file which the index does not give it to, or that nothing asks for is an error with its name.
Without an index the one `model.safetensors` is read. Nothing is globbed, unpickled or executed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from .errors import DagError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
COMPUTED_SUFFIXES = ("rotary_emb.inv_freq",)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class WeightSource(Protocol):
    """Where a model takes its tensors from; every tensor is taken exactly once."""

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor: ...

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
        assert name not in self._taken, f"{name} was already taken"
        if name not in self._where:
            raise _invalid(f"the weights lack {name!r}, which the model needs", name)
        tensor: torch.Tensor = self._files[self._where[name]].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise _invalid(f"{name!r} has shape {tuple(tensor.shape)}; config.json asks for {shape}", name)
        if tensor.dtype not in DTYPES:
            raise _invalid(f"{name!r} has dtype {tensor.dtype}; quantised weights are not supported", name)
        self._taken.add(name)
        return tensor.to(self._device, self._dtype)

    def finish(self) -> None:
        """Every tensor of the folder must have been taken, apart from those that models compute themselves."""
        left = [n for n in self._where if n not in self._taken and not n.endswith(COMPUTED_SUFFIXES)]
        if left:
            raise _invalid(
                f"{len(left)} tensors belong to no part of the model, the first is {left[0]!r}", left[0]
            )
        self._files.clear()


class DummySource:
    """Seeded random tensors of the right shapes, for speed runs of a model whose weights are not at hand."""

    def __init__(self, seed: int, *, dtype: torch.dtype, device: torch.device, tied: bool) -> None:
        self._generator = torch.Generator(device="cpu").manual_seed(seed)
        self._dtype, self._device, self._tied = dtype, device, tied

    def has(self, name: str) -> bool:
        return not (self._tied and name == "lm_head.weight")

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1 and "norm" in name:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        values = torch.empty(shape, dtype=torch.float32).normal_(0.0, 0.02, generator=self._generator)
        return values.to(self._device, self._dtype)

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
