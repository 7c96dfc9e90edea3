"""Frequencies equal transformers', signatures tell specs apart exactly where they rotate differently."""

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from dagengine_positions import ConfigError, RopeSpec, geometry_from_config

HERE = Path(__file__).parent
GOLDENS = json.loads((HERE / "data" / "rope_goldens.json").read_text())

DEFAULT = RopeSpec("default", 10000.0, 64, 64)
LINEAR = RopeSpec("linear", 10000.0, 64, 64, factor=2.0)
LLAMA3 = RopeSpec(
    "llama3",
    500000.0,
    64,
    64,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_positions=8192,
)
YARN = RopeSpec("yarn", 10000.0, 64, 64, factor=4.0, original_max_positions=4096)


def assert_close(spec, inv_freq, attention_scaling):
    # transformers computes the powers in float32
    assert spec.inv_freq() == pytest.approx(inv_freq, rel=2e-6, abs=0)
    assert spec.attention_scaling == pytest.approx(attention_scaling, rel=1e-12)


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden["name"])
def test_frequencies_and_multiplier_are_those_of_transformers(golden):
    spec = geometry_from_config(golden["config"]).groups[0].rope
    assert_close(spec, golden["inv_freq"], golden["attention_scaling"])


def test_goldens_are_what_the_installed_transformers_computes():
    pytest.importorskip("torch")
    pytest.importorskip("transformers", minversion="5.0")
    path = HERE / "make_rope_goldens.py"
    found = importlib.util.spec_from_file_location("make_rope_goldens", path)
    script = importlib.util.module_from_spec(found)
    found.loader.exec_module(script)
    assert [golden["name"] for golden in GOLDENS] == list(script.CASES)
    for golden in GOLDENS:
        assert golden["config"] == script.config(golden["name"])
        spec = geometry_from_config(golden["config"]).groups[0].rope
        assert_close(spec, *script.computed(golden["config"]))


def test_partial_rotation_has_the_frequencies_of_its_own_width():
    partial = RopeSpec("default", 10000.0, 128, 32)
    assert partial.inv_freq() == RopeSpec("default", 10000.0, 32, 32).inv_freq()
    assert len(partial.inv_freq()) == 16


def test_frequencies_are_float64():
    assert DEFAULT.inv_freq()[1] == 10000.0 ** (-1 / 32)
    assert all(type(freq) is float for freq in RopeSpec("default", 10000, 8, 8).inv_freq())


@pytest.mark.parametrize("spec", [DEFAULT, LINEAR, LLAMA3], ids=lambda spec: spec.kind)
def test_only_yarn_scales(spec):
    assert spec.attention_scaling == 1.0


@pytest.mark.parametrize(("factor", "scaling"), [(4, 1.139), (8, 1.208), (32, 1.347)])
def test_yarn_multiplier_of_the_paper(factor, scaling):
    assert replace(YARN, factor=factor).attention_scaling == pytest.approx(scaling, abs=5e-4)


@pytest.mark.parametrize(
    "spec",
    [
        replace(DEFAULT, theta=10000),
        replace(LINEAR, factor=2),
        replace(YARN, beta_fast=32, beta_slow=1.0, truncate=True),
        replace(YARN, attention_factor=0.1 * math.log(4) + 1),
        replace(YARN, mscale=1.0, mscale_all_dim=0.0),
    ],
)
def test_spelling_out_a_default_keeps_the_signature(spec):
    plain = {"default": DEFAULT, "linear": LINEAR, "yarn": YARN}[spec.kind]
    assert spec.signature() == plain.signature()


def test_signatures_differ_where_rotations_do():
    specs = [
        DEFAULT,
        replace(DEFAULT, theta=10001.0),
        replace(DEFAULT, head_dim=128),
        replace(DEFAULT, rotary_dim=32),
        replace(DEFAULT, pairing="interleaved"),
        LINEAR,
        replace(LINEAR, factor=2.5),
        LLAMA3,
        replace(LLAMA3, factor=9.0),
        replace(LLAMA3, low_freq_factor=1.5),
        replace(LLAMA3, high_freq_factor=5.0),
        replace(LLAMA3, original_max_positions=4096),
        YARN,
        replace(YARN, beta_fast=33.0),
        replace(YARN, beta_slow=2.0),
        replace(YARN, truncate=False),
        replace(YARN, attention_factor=1.0),
        replace(YARN, mscale=1.0, mscale_all_dim=0.5),
        replace(YARN, original_max_positions=2048),
    ]
    assert len({spec.signature() for spec in specs}) == len(specs)


def test_signature_is_stable():
    assert DEFAULT.signature() == "rope/default(theta=10000.0,head_dim=64,rotary_dim=64,pairing='half')"
    assert YARN.signature() == (
        "rope/yarn(theta=10000.0,head_dim=64,rotary_dim=64,pairing='half',factor=4.0,"
        "original_max_positions=4096,beta_fast=32.0,beta_slow=1.0,truncate=True,"
        "attention_scaling=1.138629436111989)"
    )


HUGE = 10**400
BAD_REALS = (math.nan, math.inf, -math.inf, HUGE, True, "2", [2], -1.0, 0)
BAD_WHOLES = (math.nan, 1.0, HUGE, True, "2", -1, 0)


@pytest.mark.parametrize(
    ("spec", "field", "value"),
    [(DEFAULT, "theta", value) for value in (*BAD_REALS, 1.0, 0.5)]
    + [(DEFAULT, "head_dim", value) for value in (*BAD_WHOLES, None, 1)]
    + [(DEFAULT, "rotary_dim", value) for value in (*BAD_WHOLES, None, 3, 66)]
    + [(LINEAR, "factor", value) for value in (*BAD_REALS, 0.5, None)]
    + [(LLAMA3, "low_freq_factor", value) for value in (*BAD_REALS, None)]
    + [(LLAMA3, "high_freq_factor", value) for value in (*BAD_REALS, None, 1.0)]
    + [(LLAMA3, "original_max_positions", value) for value in (*BAD_WHOLES, None)]
    + [(YARN, "factor", value) for value in (*BAD_REALS, None)]
    + [(YARN, "original_max_positions", value) for value in (*BAD_WHOLES, None)]
    + [(YARN, "beta_fast", value) for value in (*BAD_REALS, 0.5)]
    + [(YARN, "beta_slow", value) for value in BAD_REALS]
    + [(YARN, "attention_factor", value) for value in BAD_REALS]
    + [(YARN, "mscale", value) for value in BAD_REALS[:-1]]
    + [(YARN, "mscale_all_dim", value) for value in BAD_REALS[:-1]]
    + [(YARN, "truncate", value) for value in (0, 1, "yes", math.nan)]
    + [(DEFAULT, "pairing", value) for value in ("neox", None, True)]
    + [(DEFAULT, "factor", 2.0), (LINEAR, "beta_fast", 32.0), (LLAMA3, "truncate", True)],
)
def test_bad_values_are_refused_by_name(spec, field, value):
    with pytest.raises(ConfigError) as caught:
        replace(spec, **{field: value})
    assert caught.value.code == "invalid_config"
    assert caught.value.field == field


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "yarm", None, True, ["yarn"]])
def test_unknown_kinds_are_refused(kind):
    with pytest.raises(ConfigError) as caught:
        RopeSpec(kind, 10000.0, 64, 64)
    assert (caught.value.code, caught.value.field) == ("unsupported_model", "kind")


def test_unknown_kind_suggests_the_close_one():
    with pytest.raises(ConfigError, match="did you mean 'yarn'"):
        RopeSpec("yarm", 10000.0, 64, 64)
