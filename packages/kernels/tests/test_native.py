"""The compiled part is there where it can be built, and an installation without it says why."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from dagengine_kernels import KernelError
from dagengine_kernels.fused import native

PACKAGE = Path(__file__).resolve().parent.parent
COMPILERS = ("c++", "g++", "clang++")


@pytest.fixture
def absent(monkeypatch, tmp_path):
    """Looks for a module that is not there; returns where the reason would be."""
    monkeypatch.setattr(native, "MODULE", "dagengine_kernels._absent")
    monkeypatch.setattr(native, "REASON", tmp_path / "_native_missing.txt")
    native._find.cache_clear()
    yield tmp_path / "_native_missing.txt"
    native._find.cache_clear()


def test_where_there_is_a_compiler_the_module_was_built():
    if not any(map(shutil.which, COMPILERS)) or os.environ.get("DAGENGINE_NATIVE") == "off":
        pytest.skip("no C++ compiler here")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        pytest.skip("no headers of Python here")
    assert native.why_missing() is None
    assert native.load().planner.plan_spans


def test_the_reason_that_the_installation_left_is_told(absent):
    absent.write_text("no C++ compiler was found\n", encoding="utf-8")
    assert native.why_missing() == "no C++ compiler was found"
    with pytest.raises(KernelError, match="no C++ compiler was found".replace("+", r"\+")) as refused:
        native.load()
    assert (refused.value.code, refused.value.field) == ("capability_missing", "native")


def test_a_module_of_another_python_is_told(absent):
    assert f"Python {sys.version_info[0]}.{sys.version_info[1]}" in native.why_missing()


def test_a_module_that_does_not_load_is_told(absent, monkeypatch, tmp_path):
    (tmp_path / "broken_native.py").write_text("raise ImportError('undefined symbol: x')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(native, "MODULE", "broken_native")
    assert native.why_missing() == "it cannot be loaded: undefined symbol: x"


@pytest.fixture
def hook(monkeypatch):
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", PACKAGE / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delenv("DAGENGINE_NATIVE", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    return module


def test_without_a_compiler_the_hook_says_what_it_looked_for(hook, monkeypatch, tmp_path):
    monkeypatch.setattr(hook, "find", lambda program: None)
    with pytest.raises(hook.NotBuilt, match="no C"):
        hook.build(PACKAGE, tmp_path)
    monkeypatch.setenv("CXX", "/opt/none/c++ -O1")
    with pytest.raises(hook.NotBuilt, match="/opt/none"):
        hook.build(PACKAGE, tmp_path)


def test_a_compiler_that_fails_is_told_with_its_last_words(hook, monkeypatch, tmp_path):
    monkeypatch.setattr(hook, "find", lambda program: shutil.which("true") if program in COMPILERS else None)
    with pytest.raises(hook.NotBuilt, match="CMake was not found"):
        hook.build(PACKAGE, tmp_path)
    with pytest.raises(hook.NotBuilt, match=r"failed when it was installed:\nout of memory"):
        hook.run("sh", "-c", "echo out of memory; exit 3")


def test_a_program_that_does_not_run_is_passed_over(hook, monkeypatch, tmp_path):
    """As a script of an environment whose packages an isolated build does not see."""
    for folder, status in (("first", 1), ("second", 0)):
        program = tmp_path / folder / "dagengine-tool"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\nexit {status}\n", encoding="utf-8")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'first'}{os.pathsep}{tmp_path / 'second'}")
    assert hook.find("dagengine-tool") == str(tmp_path / "second" / "dagengine-tool")


def test_an_unknown_mode_is_refused(hook, monkeypatch):
    monkeypatch.setenv("DAGENGINE_NATIVE", "maybe")
    with pytest.raises(SystemExit, match="auto, required, off"):
        hook.mode()


def build_wheel(tmp_path: Path, mode: str) -> subprocess.CompletedProcess[str]:
    """Builds the package's wheel in a PATH without compilers."""
    code = f"import hatchling.build; hatchling.build.build_wheel({str(tmp_path)!r})"
    environ = {**os.environ, "PATH": str(tmp_path / "none"), "DAGENGINE_NATIVE": mode}
    environ.pop("CXX", None)
    scripts = [Path(sysconfig.get_path("scripts")) / name for name in COMPILERS]
    assert not any(map(Path.exists, scripts))
    return subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE, env=environ, stderr=subprocess.PIPE, text=True
    )


needs_sources = pytest.mark.skipif(not (PACKAGE / "src").exists(), reason="no sources beside these tests")


@needs_sources
def test_without_a_compiler_the_wheel_has_the_sources_and_the_reason(hook, tmp_path):
    done = build_wheel(tmp_path, "auto")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        reason = archive.read("dagengine_kernels/_native_missing.txt").decode()
    assert "no C++ compiler was found" in reason
    assert not [name for name in names if name.endswith(".so")]
    sources = {
        path.name for path in (PACKAGE / "src/dagengine_kernels/fused/csrc").rglob("*") if path.is_file()
    }
    assert sources <= {Path(name).name for name in names}


@needs_sources
def test_where_the_module_is_required_its_absence_is_an_error(hook, tmp_path):
    done = build_wheel(tmp_path, "required")
    assert done.returncode != 0
    assert "no C++ compiler was found" in done.stderr
