"""Requests of the scripted model, for tests of what becomes of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from scripted_model import MODES

from dagengine import ContextRef, DagError, Keep, SamplingParams
from dagengine.request import Request

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
EVERY_MODE = pytest.mark.parametrize("step_mode", MODES, indirect=True)


def tokens(count: int, first: int = 100) -> tuple[int, ...]:
    return tuple(range(first, first + count))


def document(name: str, count: int, first: int = 100, **options: object) -> Request:
    return Request(name, tokens(count, first), None, keep=Keep(), **options)  # type: ignore[arg-type]


def question(name: str, *refs: ContextRef, sampling: SamplingParams = GREEDY, **options: object) -> Request:
    return Request(name, (7, 8, 9), sampling, refs, **options)  # type: ignore[arg-type]


def refused(submit: Callable[[], object]) -> DagError:
    with pytest.raises(DagError) as error:
        submit()
    return error.value
