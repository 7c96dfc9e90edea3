"""One Triton kernel that copies pages between the device's layers and any other memory it can reach. Knows addresses.

Work is cut into blocks of a page's bytes in one layer, and programs take blocks in turns, so that few programs, on few
multiprocessors, move any number of pages.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_BYTES = 16384
NUM_WARPS = 8


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
    LAYER_BYTES: tl.constexpr,
    STORE: tl.constexpr,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`layers[l]` is the address of a layer's page 0; `others[i]` that of page i on the other side, all its layers."""
    words: tl.constexpr = LAYER_BYTES // WORD
    blocks: tl.constexpr = (words + BLOCK - 1) // BLOCK
    kind: tl.constexpr = tl.pointer_type(tl.int64) if WORD == 8 else tl.pointer_type(tl.int8)
    lanes = tl.arange(0, BLOCK)
    piece = tl.program_id(0)
    while piece < num_pieces:
        block = piece % blocks
        layer = (piece // blocks) % num_layers
        page = piece // (blocks * num_layers)
        device = tl.load(layers + layer) + tl.load(devices + page) * LAYER_BYTES
        other = tl.load(others + page) + layer.to(tl.int64) * LAYER_BYTES
        source = (device if STORE else other).to(kind)
        target = (other if STORE else device).to(kind)
        if LAYER_BYTES % 16 == 0:
            source = tl.multiple_of(source, 16)
            target = tl.multiple_of(target, 16)
        at = tl.multiple_of(block * BLOCK, BLOCK) + lanes
        if words % BLOCK == 0:
            tl.store(target + at, tl.load(source + at))
        else:
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
    """
    settings = _settings(layer_bytes, store)
    pieces = len(devices) * len(layers) * -(-layer_bytes // (settings["WORD"] * settings["BLOCK"]))
    grid = (min(num_programs, pieces),)
    _copy_pages[grid](layers, devices, others, len(layers), pieces, **settings)


def prepare(layers: torch.Tensor, layer_bytes: int) -> None:
    """Compile and load both directions, so that no copy waits for it: a launch that has nothing to copy."""
    for store in (True, False):
        _copy_pages[(1,)](layers, layers, layers, len(layers), 0, **_settings(layer_bytes, store))


def _settings(layer_bytes: int, store: bool) -> dict[str, int]:
    word = 8 if layer_bytes % 16 == 0 else 1
    block = min(BLOCK_BYTES // word, triton.next_power_of_2(layer_bytes // word))
    return {
        "LAYER_BYTES": layer_bytes,
        "STORE": store,
        "WORD": word,
        "BLOCK": block,
        "num_warps": NUM_WARPS,
    }
