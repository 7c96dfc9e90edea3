"""A kernel's struct as bytes is what ctypes makes of it."""

from __future__ import annotations

import ctypes
import random

import pytest

from dagengine_kernels.fused.cuda import append, attend, gate, merge, norm, products, streamed
from dagengine_kernels.fused.cuda.params import PADDING, packer

STRUCTURES = [
    append._Params,
    attend.AttendParams,
    gate._Params,
    merge._Params,
    norm._Params,
    products.Params,
    streamed.Launch,
]


def value_of(kind: type, rng: random.Random) -> object:
    """A value as ctypes takes it, and as bytes are packed from it."""
    size = ctypes.sizeof(kind)
    if kind is ctypes.c_float:
        return rng.uniform(-1e6, 1e6)
    if kind in (ctypes.c_void_p, ctypes.c_uint64):
        return rng.choice((0, rng.randrange(2**64)))
    if kind in (ctypes.c_int64, ctypes.c_int):
        return rng.randrange(-(2 ** (8 * size - 1)), 2 ** (8 * size - 1))
    return rng.randbytes(size)


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda s: f"{s.__module__.rpartition('.')[2]}")
def test_packed_fields_are_the_structure(structure: type[ctypes.Structure]) -> None:
    rng = random.Random(structure.__module__)
    for _ in range(50):
        want, given = structure(), []
        for name, kind in structure._fields_:  # type: ignore[misc]
            if name == PADDING:
                continue
            value = value_of(kind, rng)
            given.append(value)
            setattr(want, name, kind.from_buffer_copy(value) if isinstance(value, bytes) else value)
        assert packer(structure).pack(*given) == bytes(want)


class Uneven(ctypes.Structure):
    _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_void_p), ("c", ctypes.c_float))


def test_gaps_between_fields_and_behind_them_are_zeros() -> None:
    assert packer(Uneven).pack(7, 9, 0.5) == bytes(Uneven(7, 9, 0.5))
    assert packer(Uneven).size == ctypes.sizeof(Uneven) == 24
