"""Makes the modules of this folder importable and registers their attention backends as a plug-in would."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

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
