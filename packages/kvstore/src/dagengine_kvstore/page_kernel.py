"""One Triton kernel that copies pages between the device's layers and any other memory it can reach. Knows addresses.

Work is cut into blocks of a page's bytes in one layer, and programs take blocks in turns, so that few programs, on few
multiprocessors, move any number of pages.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_BYTES = 16384
BYTES_PER_WARP = 2048


@triton.jit(
    do_not_specialize=["num_layers", "num_pieces"],
    do_not_specialize_on_alignment=["layers", "devices", "others"],
)
def _copy_pages(
    layers,
    devices,
    others,
    num_layers,
    num_pieces,
    words,
    STORE: tl.constexpr,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`layers[l]` is the address of a layer's page 0; `others[i]` that of page i on the other side, all its layers.
    A page has `words` words of WORD bytes in one layer; if WORD is 8, addresses are multiples of 16.
    """
    kind: tl.constexpr = tl.pointer_type(tl.int64) if WORD == 8 else tl.pointer_type(tl.int8)
    lanes = tl.arange(0, BLOCK)
    blocks = (words + BLOCK - 1) // BLOCK
    layer_bytes = words.to(tl.int64) * WORD
    piece = tl.program_id(0)
    while piece < num_pieces:
        block = piece % blocks
        layer = (piece // blocks) % num_layers
        page = piece // (blocks * num_layers)
        device = tl.load(layers + layer) + tl.load(devices + page) * layer_bytes
        other = tl.load(others + page) + layer * layer_bytes
        source = (device if STORE else other).to(kind)
        target = (other if STORE else device).to(kind)
        if WORD == 8:
            source = tl.multiple_of(source, 16)
            target = tl.multiple_of(target, 16)
        at = tl.multiple_of(block * BLOCK, BLOCK) + lanes
        tl.store(target + at, tl.load(source + at, mask=at < words), mask=at < words)
        piece += tl.num_programs(0)


def copy_pages(
    layers: torch.Tensor,
    devices: torch.Tensor,
    others: torch.Tensor,
    layer_bytes: int,
    *,
    store: bool,
    num_programs: int,
) -> None:
    """Queue a copy on the current stream: `store` from the layers to the other side, else back.

    Args:
        layers: int64 [num_layers], addresses of page 0 of each layer; multiples of 16.
        devices, others: int64 [num_pages], device page numbers, and addresses of the pages on the other side. These
            are multiples of 16 if `layer_bytes` is.
        layer_bytes: what a page has in one layer.
        num_programs: at most so many, of blocks of 16 KiB; more where blocks are smaller.
    """
    word, block, words = _split(layer_bytes)
    pieces = len(devices) * len(layers) * -(-words // block)
    grid = (min(num_programs * (BLOCK_BYTES // (word * block)), pieces),)
    _copy_pages[grid](
        layers,
        devices,
        others,
        len(layers),
        pieces,
        words,
        STORE=store,
        WORD=word,
        BLOCK=block,
        num_warps=_num_warps(word * block),
    )


def prepare(layers: torch.Tensor, layer_bytes: int) -> None:
    """Compile and load both directions, so that no copy waits for it: a launch that has nothing to copy."""
    word, block, words = _split(layer_bytes)
    for store in (True, False):
        _copy_pages[(1,)](
            layers,
            layers,
            layers,
            len(layers),
            0,
            words,
            STORE=store,
            WORD=word,
            BLOCK=block,
            num_warps=_num_warps(word * block),
        )


def _num_warps(block_bytes: int) -> int:
    return max(1, block_bytes // BYTES_PER_WARP)


def _split(layer_bytes: int) -> tuple[int, int, int]:
    """Bytes of a word, words of a block, words of a page in one layer."""
    word = 8 if layer_bytes % 16 == 0 else 1
    words = layer_bytes // word
    return word, min(BLOCK_BYTES // 8, triton.next_power_of_2(words)), words
