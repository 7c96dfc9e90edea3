"""Decoders by themselves: what they leave out where only some rows are wanted."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from dagengine.models.registry import gives_rows
from dagengine.runner import Runner
from dagengine_kernels.reference import ReferenceBackend

from .stepping import Stepper, geometry_of, runner_of


def attend(layer, q, k, v, *, q_norm=None, k_norm=None):
    """Of each row the mean of all rows' values up to it, so that every row depends on those before."""
    mean = v.cumsum(0) / torch.arange(1, len(v) + 1)[:, None, None]
    return mean.repeat_interleave(q.shape[1] // v.shape[1], dim=1) + q


@pytest.mark.parametrize("wanted", [[], [6], [2, 0], list(range(7))])
def test_wanted_rows_are_those_of_all(wanted):
    model = runner_of(Runner, geometry_of(), page_size=4).model
    assert gives_rows(model)
    seen = []

    def seeing(layer, q, k, v, **norms):
        seen.append((layer, len(k), len(v)))
        return attend(layer, q, k, v, **norms)

    ids, rows = torch.arange(7) * 11, torch.tensor(wanted, dtype=torch.int64)
    expected = model.forward(ids, attend)[rows]
    found = model.forward_rows(ids, seeing, rows)
    assert found.shape == (len(wanted), 256)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert seen == [(0, 7, 7), (1, 7, 7)], "keys and values of all rows, in every layer"


def test_a_model_that_gives_all_rows_is_taken():
    class Whole:
        def __init__(self, model):
            self.forward, self.logits = model.forward, model.logits

    def whole(model, *args, **options):
        return Runner(Whole(model), *args, **options)

    stepper = Stepper(page_size=4)
    chunks = stepper.chunks([stepper.work(5), stepper.work(9)], [5, 7])
    found = [
        runner_of(make, geometry_of(), page_size=4).launch(chunks, ReferenceBackend(), None)
        for make in (Runner, whole)
    ]
    assert found[0].shape == (1, 320)
    assert torch.allclose(*found, rtol=1e-4, atol=1e-4)


def test_a_forward_that_a_subclass_replaces_is_asked_for_all_rows():
    asked = []

    def scaled(model, *args, **options):
        class Scaled(type(model)):
            def forward(self, input_ids, attend):
                asked.append(len(input_ids))
                return 2 * super().forward(input_ids, attend)

        class Both(Scaled):
            def forward_rows(self, input_ids, attend, rows):
                return self.forward(input_ids, attend)[rows]

        made = {field.name: getattr(model, field.name) for field in fields(model)}
        assert not gives_rows(Scaled(**made)) and gives_rows(Both(**made))
        return Runner(Scaled(**made), *args, **options)

    stepper = Stepper(page_size=4)
    chunks = stepper.chunks([stepper.work(5), stepper.work(9)], [5, 7])
    assert runner_of(scaled, geometry_of(), page_size=4).launch(chunks, ReferenceBackend(), None).shape == (
        1,
        320,
    )
    assert asked == [12]
