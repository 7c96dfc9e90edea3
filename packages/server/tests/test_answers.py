"""Answers are JSON whatever the numbers and texts in them."""

from __future__ import annotations

import json
import math

import pytest

from dagengine.request import TokenLogprob
from dagengine_server.answers import chat_logprobs, finite, text_logprobs, to_json
from dagengine_server.service import Tenant


@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan, -1e6])
def test_log_probabilities_are_cut(value: float) -> None:
    assert finite(value) == -9999.0
    item = TokenLogprob(1, value, ((2, value),))
    for shown in (chat_logprobs([item], None), text_logprobs([item], None, 0)):
        assert "-9999.0" in to_json(shown).decode()


def test_text_that_is_no_unicode_is_escaped() -> None:
    assert json.loads(to_json({"a": "x\ud800", "b": "é"})) == {"a": "x\ud800", "b": "é"}
    assert to_json("é") == '"é"'.encode()


def test_infinities_are_never_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        to_json({"a": math.inf})


def test_no_salt_poses_as_another() -> None:
    a, b = Tenant.of_key("a"), Tenant.of_key("b")
    salts = {
        tenant.salt(salt)
        for tenant in (Tenant(), a, b)
        for salt in (None, "x", a.identity, f"key:32:{a.identity};salt:0:", ";salt:1:x")
    }
    assert len(salts) == 15
    assert Tenant().salt(None) == ""
