"""Rotations: tables from float64, turning the query instead of the key, YaRN's factor applied once."""

import math

import pytest
import torch

from dagengine_kernels import KernelError, build_table, rotate, rotate_by_delta
from dagengine_kernels.conformance_cases import frequencies

PAIRINGS = ("half", "interleaved")


def test_tables_are_float64_rounded_once():
    table = build_table(frequencies(64), 1.0, 16384)
    angle = torch.arange(16384, dtype=torch.float64)[:, None] * torch.tensor(
        frequencies(64), dtype=torch.float64
    )
    assert table.cos.dtype == torch.float32
    assert table.cos.shape == (16384, 32)
    assert torch.equal(table.cos, angle.cos().float())
    assert torch.equal(table.sin, angle.sin().float())


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("rotary_dim", [16, 10])
def test_rotation_is_that_of_complex_numbers(pairing, rotary_dim):
    table = build_table(frequencies(rotary_dim), 1.25, 50, pairing=pairing)
    x = torch.randn(7, 2, 16, dtype=torch.float64)
    positions = torch.tensor([0, 1, 2, 7, 30, 49, 3])
    half = rotary_dim // 2
    first, second = (
        (x[..., :half], x[..., half:rotary_dim])
        if pairing == "half"
        else (x[..., 0:rotary_dim:2], x[..., 1:rotary_dim:2])
    )
    z = torch.complex(first, second) * torch.polar(
        torch.full((7, 1, half), 1.25, dtype=torch.float64),
        (positions[:, None] * table.inv_freq)[:, None],
    )
    turned = rotate(x, positions, table)
    want = x.clone()
    if pairing == "half":
        want[..., :half], want[..., half:rotary_dim] = z.real, z.imag
    else:
        want[..., 0:rotary_dim:2], want[..., 1:rotary_dim:2] = z.real, z.imag
    assert torch.allclose(turned, want, atol=1e-12)
    assert torch.allclose(rotate(x.float(), positions, table).double(), want, atol=1e-5)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("delta", [-300, -1, 0, 5, 90])
def test_turning_the_query_equals_moving_the_key(pairing, delta):
    table = build_table(frequencies(12), 1.139, 2000, pairing=pairing)
    q, k = torch.randn(1, 1, 16, dtype=torch.float64), torch.randn(1, 1, 16, dtype=torch.float64)
    stored, query = torch.tensor([400]), torch.tensor([700])
    cached = rotate(k, stored, table)
    moved = rotate_by_delta(cached, torch.tensor([delta]), table)
    assert torch.allclose(moved, rotate(k, stored + delta, table), atol=1e-12)
    by_key = (rotate(q, query, table) * moved).sum()
    by_query = (rotate(q, query - delta, table) * cached).sum()
    assert math.isclose(by_key, by_query, rel_tol=0, abs_tol=1e-11)


def test_bf16_is_rotated_in_float32_and_rounded_once():
    table = build_table(frequencies(64), 1.0, 9000)
    x, positions = torch.randn(20, 3, 64).bfloat16(), torch.arange(8000, 8020)
    assert torch.equal(rotate(x, positions, table), rotate(x.float(), positions, table).bfloat16())
    assert rotate(x, positions, table, dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (((), 1.0, 10), "inv_freq"),
        (([1.0], 1.0, 0), "length"),
    ],
)
def test_bad_tables_are_refused(arguments, field):
    with pytest.raises(KernelError) as refused:
        build_table(*arguments)
    assert refused.value.field == field


def test_an_unknown_pairing_is_refused():
    with pytest.raises(KernelError) as refused:
        build_table([1.0], 1.0, 10, pairing="neox")
    assert refused.value.field == "pairing"


def test_a_head_narrower_than_the_table_is_refused():
    table = build_table(frequencies(32), 1.0, 10)
    with pytest.raises(KernelError) as refused:
        rotate(torch.zeros(1, 1, 16), torch.tensor([0]), table)
    assert refused.value.field == "rotary_dim"
