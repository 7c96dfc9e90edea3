"""What the CUDA executor asks the planner for: tile heights and keys per tile, by the batch and the shape."""

from types import SimpleNamespace

import pytest
import torch

from dagengine_kernels import AttentionShape, SegmentTable, SequenceSegments
from dagengine_kernels.fused.cuda.attend import CudaExecutor
from dagengine_kernels.graph_cases import graph_case

LLAMA = AttentionShape(32, 8, 128, 128**-0.5)
DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def sms(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132)
    )


def chosen(table, shape=LLAMA, keys=None):
    """Tile heights and keys per KV tile."""
    parameters = CudaExecutor(keys).parameters(table, shape, DEVICE)
    return parameters.rows_per_tile, parameters.boxes * table.page_size


def unshared(sequences, rows=1):
    listed = [SequenceSegments(0, rows, [(i, 0, rows, 0, 0)], i) for i in range(sequences)]
    return SegmentTable.from_sequences(listed, page_size=64, num_pages=max(sequences, 1))


@pytest.mark.parametrize(
    ("case", "keys"),
    [("own-order", 128), ("same-order", 128), ("artifacts", 128), ("judges", 64)],
)
@pytest.mark.parametrize("page_size", [16, 64])
def test_tiles_are_long_where_most_pages_have_many_readers(case, keys, page_size):
    table = graph_case(case, page_size=page_size).to_segments()
    assert chosen(table) == ((128,) if keys == 128 else (64, 128), keys)
    assert chosen(table, keys=64) == ((64, 128), 64)


@pytest.mark.parametrize("sequences", [0, 1, 16, 17, 256])
def test_tiles_are_short_where_nothing_is_shared(sequences):
    assert chosen(unshared(sequences)) == ((64, 128), 64)


def test_long_sequences_take_long_and_high_tiles():
    assert chosen(unshared(2, rows=16)) == ((64, 128), 64)
    assert chosen(unshared(2, rows=17)) == ((128,), 128)


@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(15, 3, 128, 0.1),
        AttentionShape(8, 2, 64, 0.1),
        AttentionShape(8, 2, 128, 0.1, window=100),
        AttentionShape(8, 2, 128, 0.1, softcap=30.0),
    ],
    ids=["group of 5", "head dimension 64", "window", "soft cap"],
)
def test_shapes_that_would_spill_with_long_tiles_take_short_ones(shape):
    assert chosen(graph_case("own-order").to_segments(), shape)[1] == 64
    assert chosen(unshared(1, rows=60), shape) == ((128,), 64)
