"""Makes the modules of this folder importable and registers their attention backends as a plug-in would."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from dagengine.runner import Chunk
from dagengine.scheduler import Scheduler

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(params=["at once", "late"])
def step_mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the steps of every engine of this test follow each other; see `scripted_model.MODES`."""
    monkeypatch.setattr("scripted_model.default_mode", request.param)
    return str(request.param)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest keeps log records, and a record of a failed step keeps its frames and their nodes."""
    monkeypatch.setattr(logging.getLogger("dagengine"), "disabled", True)


@pytest.fixture(scope="session", autouse=True)
def scripted_backends(tmp_path_factory: pytest.TempPathFactory) -> None:
    from scripted_model import register_backend

    names = {
        "scripted": "scripted_model:ScriptedBackend",
        "scripted-twin": "scripted_model:TwinBackend",
        "scripted-device": "scripted_device:DeviceBackend",
    }
    register_backend(tmp_path_factory.mktemp("plugin"), names)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, tuple[int, bool]]]:
    """Of every step that was chosen: tokens by request, and whether it joins."""
    from scripted_joins import name_of

    seen: list[dict[str, tuple[int, bool]]] = []
    schedule = Scheduler.schedule

    def watched(self: Scheduler, **options: Any) -> list[Chunk] | None:
        chunks = schedule(self, **options)
        if chunks:
            seen.append({name_of(chunk.work): (chunk.count, chunk.joins) for chunk in chunks})
            joins = [chunk.joins for chunk in chunks]
            assert joins == sorted(joins), "who joins stands behind the others"
        return chunks

    monkeypatch.setattr(Scheduler, "schedule", watched)
    return seen


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Of every step that somebody joined: whose last tokens nobody knew when it was chosen."""
    from scripted_joins import name_of

    seen: list[set[str]] = []
    schedule = Scheduler.schedule

    def watched(self: Scheduler, **options: Any) -> list[Chunk] | None:
        chunks = schedule(self, **options)
        if chunks and chunks[-1].joins:
            seen.append({name_of(chunk.work) for chunk in chunks if chunk.pending is not None})
        return chunks

    monkeypatch.setattr(Scheduler, "schedule", watched)
    return seen
