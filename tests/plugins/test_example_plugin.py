"""A third party's wheel: built, installed beside the project, found by its entry point, and conforming."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).with_name("example_plugin")
LIST = """
import dataclasses, json
from dagengine_positions import position_policies
print(json.dumps([dataclasses.asdict(plugin) for plugin in position_policies.plugins()]))
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("plugin") / "example_plugin"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    return copy


@pytest.fixture(scope="module")
def installed(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the installed wheel and nothing else."""
    wheels, site = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(wheels),
        str(sources),
    ]
    subprocess.run([*pip, *build], check=True)
    (wheel,) = wheels.glob("*.whl")
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)], check=True)
    return site


def test_the_example_is_not_installed_already() -> None:
    assert "spaced" not in _policies()


def test_the_installed_plugin_is_found_by_its_entry_point(installed: Path) -> None:
    policies = _policies(installed)
    assert policies["spaced"] == {
        "name": "spaced",
        "value": "dagengine_example_plugin:SpacedPolicy",
        "distribution": "dagengine-example-plugin",
        "error": None,
    }
    assert {"linear", "native", "explicit"} < set(policies)


def test_the_installed_plugin_passes_the_conformance_kit(installed: Path, sources: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=sources,
        env=_environment(installed),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_a_broken_plugin_is_listed_with_its_error_and_harms_no_other(installed: Path, tmp_path: Path) -> None:
    information = tmp_path / "broken_plugin-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[dagengine.position_policies]\nbroken = no_such_module:Policy\n"
    )
    policies = _policies(installed, tmp_path)
    assert "no_such_module" in policies["broken"]["error"]
    assert policies["broken"]["distribution"] == "broken-plugin"
    assert [name for name, policy in policies.items() if policy["error"]] == ["broken"]


def _environment(*folders: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(folder) for folder in folders)}


def _policies(*folders: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", LIST],
        env=_environment(*folders),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {plugin["name"]: plugin for plugin in json.loads(done.stdout)}
