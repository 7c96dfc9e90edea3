"""Backends by name: built-ins like plug-ins, a broken one listed and harmless."""

from importlib.metadata import EntryPoint

import pytest
import torch

import dagengine_kernels.registry as registry
from dagengine_kernels import AttentionShape, KernelError, backends, get_backend


def test_the_built_in_backends_are_registered_and_load():
    listed = {entry.name: entry for entry in backends()}
    for name in ("reference", "packed", "naive", "segmented", "fused"):
        assert listed[name].error is None
        assert listed[name].distribution == "dagengine-kernels"
        assert get_backend(name).name == name


def test_instances_are_not_shared():
    assert get_backend("packed") is not get_backend("packed")


def test_an_unknown_name_is_refused_with_a_suggestion():
    with pytest.raises(KernelError, match="did you mean 'segmented'") as refused:
        get_backend("segmentd")
    assert refused.value.code == "backend_not_found"


def test_an_unknown_option_is_refused():
    with pytest.raises(KernelError) as refused:
        get_backend("segmented", page_size=3)
    assert refused.value.field == "options"
    with pytest.raises(KernelError) as refused:
        get_backend("reference", compute_dtype=torch.bfloat16)
    assert refused.value.field == "compute_dtype"
    with pytest.raises(KernelError) as refused:
        get_backend("segmented", in_place_tokens=0)
    assert refused.value.field == "in_place_tokens"


@pytest.mark.parametrize("target", ["no_such_module:Backend", "math:pi"])
def test_a_broken_plug_in_is_listed_and_breaks_nothing_else(monkeypatch, target):
    real = registry.entry_points
    broken = EntryPoint("broken", target, registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [*real(group=group), broken])
    listed = {entry.name: entry for entry in backends()}
    assert listed["broken"].error
    assert listed["segmented"].error is None
    with pytest.raises(KernelError) as refused:
        get_backend("broken")
    assert refused.value.code == "backend_not_loadable"
    assert get_backend("segmented").name == "segmented"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((3, 2, 8, 1.0), "num_heads"),
        ((0, 1, 8, 1.0), "num_heads"),
        ((2, 1, 8, 1.0, 0), "window"),
        ((2, 1, 8, 1.0, None, -1.0), "softcap"),
        ((2, 1, 8, float("nan"), None, None), "scale"),
        ((2, 1, 8, float("inf"), None, None), "scale"),
    ],
)
def test_shapes_that_make_no_sense_are_refused(arguments, field):
    with pytest.raises(KernelError) as refused:
        AttentionShape(*arguments)
    assert refused.value.field == field
