"""The scripted model's hash in torch: what `scripted_model` defines over words, over int64 of the same bits."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def signed(word: int) -> int:
    """The int64 of the same 64 bits."""
    return word - (word >> 63 << 64)


def shifted(words: Tensor, bits: int) -> Tensor:
    """Words without sign, moved down."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def mix(*values: Tensor) -> Tensor:
    """`scripted_model.mix`, int64 for its words."""
    state: Any = signed(0x243F6A8885A308D3)
    for value in values:
        state = (value + state) * signed(0x9E3779B97F4A7C15)
        state = (state ^ shifted(state, 30)) * signed(0xBF58476D1CE4E5B9)
        state = (state ^ shifted(state, 27)) * signed(0x94D049BB133111EB)
        state = state ^ shifted(state, 31)
    assert isinstance(state, Tensor)
    return state


def fold(words: Tensor) -> Tensor:
    """`scripted_model.fold`."""
    return shifted(words.sum(-1), 33)


def pick(h1: Tensor, position: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """`scripted_model.pick`; `vocab` is a power of two."""
    assert vocab & (vocab - 1) == 0
    word = mix(h1, position)
    first = word & (vocab - 1)
    return first, (first + 1 + shifted(word, 32) % (vocab - 1)) & (vocab - 1)
