"""A kernel's struct as bytes, made in one call. Knows how a ctypes.Structure lies; not what its fields mean.

Bytes are the caller's own: a launch that is prepared once holds nothing that two threads could write at the same time.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

_CODES: dict[Any, str] = {
    ctypes.c_void_p: "P",
    ctypes.c_uint64: "Q",
    ctypes.c_int64: "q",
    ctypes.c_int32: "i",
    ctypes.c_float: "f",
}

PADDING = "padding"
"""A field of this name is zeros, and takes no argument."""


def packer(structure: type[ctypes.Structure]) -> struct.Struct:
    """`pack` takes the fields in order, and gives what `bytes(structure(..))` is.

    Addresses are integers, 0 for none; arrays and nested structures are bytes of their size.
    """
    codes, at = "@", 0
    for name, kind in structure._fields_:  # type: ignore[misc]
        offset = getattr(structure, name).offset
        size = ctypes.sizeof(kind)
        codes += f"{offset - at}x"
        codes += f"{size}x" if name == PADDING else _CODES.get(kind, f"{size}s")
        at = offset + size
    made = struct.Struct(f"{codes}{ctypes.sizeof(structure) - at}x")
    assert made.size == ctypes.sizeof(structure)
    return made


def address(tensor: Any | None) -> int:
    """Of a tensor's first element; 0 of none."""
    return 0 if tensor is None else int(tensor.data_ptr())
