"""tools/wheels: each package's wheel works alone.

Builds every wheel, then for each package: an empty environment, its wheel and what it declares (siblings of
ours from the wheels just built, by file, never from an index), pytest and hypothesis, and the package's tests
from a copy that cannot reach the sources. An undeclared dependency, a file left out of the wheel or an import
of torch where none is declared fails here.

A package that declares torch does not install it again: it sees the torch distribution of .venv, and the
distributions that torch itself requires, and nothing else of .venv.
"""

from __future__ import annotations

import argparse
import email
import email.message
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import environment
from environment import CACHE, ROOT, python, say

TEST_TOOLS = ("pytest>=9.2,<10", "hypothesis>=6.170,<7")
WHEELS = CACHE / "wheels"
PYTEST_INI = """[pytest]
addopts = --import-mode=importlib
markers =
    gpu: needs an NVIDIA GPU
    slow: takes long
"""


class CheckFailed(Exception):
    """A package does not work alone; the message says what failed."""


@dataclass(frozen=True)
class Wheel:
    """A built wheel: its distribution, the distributions that it requires (without extras), its extras."""

    file: Path
    name: str
    requires: tuple[str, ...]
    extras: tuple[str, ...]


LONGEST = ("server", "engine", "kernels", "kvstore")
"""Packages whose tests take longest; they begin first, so that none of them is alone at the end."""


def build(folders: Sequence[Path]) -> dict[str, Wheel]:
    """Builds the packages' wheels; returns them by package folder name."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    built = {}
    for folder in folders:
        destination = WHEELS / folder.name
        command = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(destination)]
        _pip([*command, str(folder)], f"{folder.name}: the wheel could not be built")
        (file,) = destination.glob("*.whl")
        built[folder.name] = read_wheel(file)
    return built


def read_wheel(file: Path) -> Wheel:
    with zipfile.ZipFile(file) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata: email.message.Message = email.message_from_bytes(archive.read(member))
    requirements = [str(line) for line in metadata.get_all("Requires-Dist", [])]
    plain = [line for line in requirements if "extra ==" not in line]
    names = tuple(normalised(re.split(r"[\s\[\](<>=!~;]", line, maxsplit=1)[0]) for line in plain)
    return Wheel(
        file, normalised(str(metadata["Name"])), names, tuple(metadata.get_all("Provides-Extra", []))
    )


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def siblings(wheel: Wheel, by_name: Mapping[str, Wheel]) -> list[Wheel]:
    """The wheels of ours that `wheel` requires, directly or through another."""
    found: list[Wheel] = []
    for name in wheel.requires:
        if name in by_name and by_name[name] not in found:
            new = [by_name[name], *siblings(by_name[name], by_name)]
            found += [one for one in new if one not in found]
    return found


def test_alone(folder: Path, wheel: Wheel, by_name: Mapping[str, Wheel]) -> str:
    """Installs one wheel into an empty environment and runs its tests there. Returns how that went."""
    started = time.monotonic()
    needed = [wheel, *siblings(wheel, by_name)]
    with_torch = any("torch" in one.requires for one in needed)
    with tempfile.TemporaryDirectory(prefix=f"dagengine-{folder.name}-") as name:
        venv = Path(name) / "venv"
        _run([sys.executable, "-m", "venv", "--without-pip", str(venv)], "no environment could be made")
        if with_torch:
            show_torch(Path(name) / "torch", venv)
        extra = "[test]" if "test" in wheel.extras else ""
        files = [f"{wheel.file}{extra}", *(str(one.file) for one in needed[1:])]
        install = ["--python", str(python(venv)), "install", "--quiet", *files, *TEST_TOOLS]
        _pip(install, f"{wheel.name} could not be installed alone")
        expect_torch(venv, with_torch, wheel)
        work = Path(name) / "package"
        shutil.copytree(
            folder, work, ignore=shutil.ignore_patterns("src", "__pycache__", ".*", "build", "dist")
        )
        if "[tool.pytest.ini_options]" not in (work / "pyproject.toml").read_text(encoding="utf-8"):
            (work / "pytest.ini").write_text(PYTEST_INI, encoding="utf-8")
        options = ["-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
        command = [str(python(venv)), "-m", "pytest", *options, "tests"]
        done = subprocess.run(command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            raise CheckFailed(f"its tests fail against the installed wheel:\n{done.stdout[-8000:]}")
        return f"{done.stdout.strip().splitlines()[-1]}; {time.monotonic() - started:.0f} s with set-up"


def show_torch(links: Path, venv: Path) -> None:
    """Makes torch and what it requires importable in `venv`: links to .venv's files, named by a .pth file."""
    links.mkdir()
    listing = subprocess.run(
        [str(python()), str(Path(__file__).with_name("torch_files.py"))], stdout=subprocess.PIPE, check=True
    )
    for path in map(Path, json.loads(listing.stdout)):
        (links / path.name).symlink_to(path)
    (site_packages,) = venv.glob("lib/python*/site-packages")
    (site_packages / "torch.pth").write_text(f"{links}\n", encoding="utf-8")


def expect_torch(venv: Path, wanted: bool, wheel: Wheel) -> None:
    found = _importable(venv, "torch")
    if found != wanted:
        raise CheckFailed(f"{wheel.name} {'lacks' if wanted else 'brought'} torch in its environment")
    if _importable(venv, "transformers"):
        raise CheckFailed(f"{wheel.name} brought transformers")


def _as_they_end(running: Mapping[Future[str], str]) -> Iterator[tuple[Future[str], str]]:
    yield from ((done, running[done]) for done in as_completed(running))


def _told(name: str, done: Future[str]) -> bool:
    """Prints how a package fared; whether it passed."""
    try:
        print(f"{name}: {done.result()}", flush=True)
    except CheckFailed as error:
        print(f"{name}: {error}", flush=True)
        return False
    return True


def _importable(venv: Path, module: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([str(python(venv)), "-c", code]).returncode == 0


def _pip(arguments: Sequence[str], failure: str) -> None:
    _run([str(python()), "-m", "pip", "--disable-pip-version-check", *arguments], failure)


def _run(command: Sequence[str], failure: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    if done.returncode != 0:
        raise CheckFailed(f"{failure}:\n{done.stdout[-4000:]}")


def main(arguments: Sequence[str] | None = None) -> int:
    folders = [file.parent for file in sorted(ROOT.glob("packages/*/pyproject.toml"))]
    names = [folder.name for folder in folders]
    parser = argparse.ArgumentParser(prog="tools/wheels", description="Build each wheel and test it alone.")
    parser.add_argument("package", nargs="*", help=f"only these: {', '.join(names)}")
    parser.add_argument("--jobs", type=int, default=2, help="packages tested at the same time (default: 2)")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error("--jobs must be 1 or more")
    unknown = set(options.package) - set(names)
    if unknown:
        parser.error(f"no such package: {', '.join(sorted(unknown))}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.pop("PYTHONPATH", None)
    try:
        environment.ensure("test")
        say("building wheels")
        wheels = build(folders)
    except (environment.SetupFailed, CheckFailed) as error:
        print(error, file=sys.stderr)
        return 1
    by_name = {wheel.name: wheel for wheel in wheels.values()}
    chosen = [folder for folder in folders if not options.package or folder.name in options.package]
    chosen.sort(key=lambda folder: LONGEST.index(folder.name) if folder.name in LONGEST else len(LONGEST))
    print(
        f"installing alone and testing, {options.jobs} at a time: {', '.join(one.name for one in chosen)}",
        flush=True,
    )
    with ThreadPoolExecutor(options.jobs) as pool:
        running = {pool.submit(test_alone, one, wheels[one.name], by_name): one.name for one in chosen}
        failed = [name for done, name in _as_they_end(running) if not _told(name, done)]
    if failed:
        print(f"these packages do not work alone: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
