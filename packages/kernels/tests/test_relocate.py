"""Relocation: batches of rows between pages of many layers, against float64: torch on the CPU, kernels on a GPU."""

import math

import numpy as np
import pytest
import torch

from dagengine_kernels import KernelError, build_table
from dagengine_kernels.conformance_cases import frequencies
from dagengine_kernels.relocate import Relocation, page_offsets
from dagengine_kernels.rotary import rotate_by_delta

gpu = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"))
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
PAGES, HEADS, SIZE, DIM = 12, 2, 16, 64

# page, lo, hi, to_page, to_row, delta: copies; turns in place; a batch that reads what the first one wrote
MOVES = np.array(
    [
        (0, 0, 16, 7, 0, 31),
        (1, 3, 9, 8, 10, -17),
        (2, 0, 16, 9, 0, 0),
        (3, 0, 16, 3, 0, 5),
        (4, 2, 7, 4, 2, -900),
        (7, 0, 16, 0, 0, 0),
    ]
)
BATCHES = ((0, 3, True), (3, 5, False), (5, 6, True))


def layers_of(count, dtype, device, *, apart):
    """Layers of one allocation, or with `apart` a few bytes beside whole pages."""
    generator = torch.Generator().manual_seed(1)
    elements = PAGES * 2 * HEADS * SIZE * DIM
    gap = 64 if apart else 0
    memory = torch.randn(count * (elements + gap), generator=generator).to(device, dtype)
    return [memory[i * (elements + gap) :][:elements].view(PAGES, 2, HEADS, SIZE, DIM) for i in range(count)]


def expected(layer, rotary):
    """K and V of the rows written, in float64, one batch after another."""
    layer = layer.double().clone()
    for start, stop, with_v in BATCHES:
        before = layer.clone()
        for page, lo, hi, to_page, to_row, delta in MOVES[start:stop].tolist():
            k = before[page, 0, :, lo:hi].transpose(0, 1)
            if rotary is not None and delta:
                k = rotate_by_delta(k, torch.full((hi - lo,), delta, device=k.device), rotary)
            layer[to_page, 0, :, to_row : to_row + hi - lo] = k.transpose(0, 1)
            if with_v:
                layer[to_page, 1, :, to_row : to_row + hi - lo] = before[page, 1, :, lo:hi]
    return layer


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("apart", [False, True], ids=["one allocation", "apart"])
@pytest.mark.parametrize("turning", [True, False], ids=["rotary", "no positions"])
def test_batches_move_rows_in_every_layer_and_touch_nothing_else(device, dtype, apart, turning):
    rotary = build_table(frequencies(DIM), 1.3, 8, device=device) if turning else None
    layers = layers_of(3, dtype, device, apart=apart)
    want = [expected(layer, rotary) for layer in layers]
    kept = [layer.clone() for layer in layers]
    relocation = Relocation(MOVES, layers, rotary)
    if device == "cuda":
        assert relocation.implementation == ("cuda" if apart else "cuda, layers concatenated")
    for start, stop, with_v in BATCHES:
        relocation.run(start, stop, with_v=with_v)
    for layer, wanted, before in zip(layers, want, kept, strict=True):
        same = wanted == before.double()
        assert torch.equal(layer[same], before[same]), (
            "what is not turned keeps its bits, and so do neighbours"
        )
        assert torch.equal(layer[:, 1].double(), wanted[:, 1]), "V is never turned"
        error = (layer.double() - wanted).norm() / wanted.norm()
        assert error <= TOLERANCE[dtype] and not math.isnan(error)


@pytest.mark.parametrize("device", DEVICES)
def test_layers_lie_whole_pages_apart_or_are_moved_one_by_one(device):
    one = layers_of(3, torch.bfloat16, device, apart=False)
    assert page_offsets(one) == [0, PAGES, 2 * PAGES]
    assert page_offsets(one[::-1]) == [0, -PAGES, -2 * PAGES]
    assert page_offsets(layers_of(2, torch.bfloat16, device, apart=True)) is None


@pytest.mark.parametrize(
    ("moves", "field"),
    [
        ([(0, 0, 16, 12, 0, 0)], "moves[0]"),
        ([(0, 0, 16, 1, 0, 0), (0, 0, 16, 2, 1, 0)], "moves[1]"),
        ([(0, 4, 4, 1, 0, 0)], "moves[0]"),
        ([(-1, 0, 4, 1, 0, 0)], "moves[0]"),
        ([(0, 0, 4, 1, 0)], "moves"),
    ],
)
def test_moves_that_leave_their_pages_are_refused(moves, field):
    with pytest.raises(KernelError) as refused:
        Relocation(np.array(moves), layers_of(2, torch.float32, "cpu", apart=False), None)
    assert refused.value.field == field


def test_layers_of_different_shapes_are_refused():
    one, other = layers_of(2, torch.float32, "cpu", apart=False)
    for layers, field in (
        ([], "layers"),
        ([one, other.double()], "layers[1]"),
        ([one, other[:, :, :1]], "layers[1]"),
    ):
        with pytest.raises(KernelError) as refused:
            Relocation(MOVES, layers, None)
        assert refused.value.field == field
