"""The checkout's own virtual environment, .venv: made once, made anew when what it is made from changes.

Standard library only: this runs on a machine that has nothing but Python. Two levels: "serve" holds what
requirements.txt names, "test" what requirements-dev.txt names as well.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
CACHE = ROOT / ".cache"
BUILT_FROM = ("pyproject.toml", "hatch_build.py", "CMakeLists.txt", "src/**/*.cpp", "src/**/*.h")
"""What an editable installation compiles: it is installed anew when one of these changes."""
LEVELS = {"serve": ("requirements.txt",), "test": ("requirements.txt", "requirements-dev.txt")}


class SetupFailed(Exception):
    """A step of the set-up failed; the message says which and what to do."""


def say(message: str) -> None:
    print(f"\n── {message}", flush=True)


def python(venv: Path = VENV) -> Path:
    return venv / "bin" / "python"


def ensure(level: str) -> None:
    """Makes .venv hold `level`. Returns at once if it does. Raises SetupFailed."""
    CACHE.mkdir(exist_ok=True)
    with _lock(CACHE / "environment.lock"):
        wanted = {name: fingerprint(name) for name in LEVELS}
        have = _stamp().read_text(encoding="utf-8").split() if _stamp().exists() and _works() else []
        if wanted[level] in have or wanted["test"] in have:
            return
        if not _works():
            say(f"making the environment {VENV} with Python {sys.version.split()[0]}")
            run(
                [sys.executable, "-m", "venv", "--clear", str(VENV)],
                "install Python's venv module and run it again",
            )
        say("installing (the first time takes a few minutes and about 1.2 GB, mostly PyTorch)")
        started = time.monotonic()
        files = [part for name in LEVELS[level] for part in ("-r", name)]
        quiet = [] if sys.stdout.isatty() else ["-qq"]
        run(
            [str(python()), "-m", "pip", "install", "--disable-pip-version-check", *quiet, *files],
            "look at pip's message above; it needs a package index that it can reach. "
            f"To begin anew: rm -r {VENV}",
        )
        _stamp().write_text(wanted[level] + "\n", encoding="utf-8")
        print(f"installed in {time.monotonic() - started:.0f} s", flush=True)


def fingerprint(level: str) -> str:
    """Changes with what decides what is installed: requirements, how packages are built, compilers, the Python."""
    digest = hashlib.sha256(sys.version.encode())
    built_from = (file for pattern in BUILT_FROM for file in sorted(ROOT.glob(f"packages/*/{pattern}")))
    for file in (*(ROOT / name for name in LEVELS[level]), *built_from):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(ROOT)} {len(content)}\n".encode() + content)
    compilers = [os.environ.get("CXX"), *map(shutil.which, ("c++", "g++", "clang++"))]
    digest.update(repr((compilers, os.environ.get("DAGENGINE_NATIVE"))).encode())
    return f"{level}-{digest.hexdigest()}"


def run(command: Sequence[str], advice: str) -> None:
    """Runs a command in the checkout; raises SetupFailed with the advice if it fails."""
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        raise SetupFailed(f"failed: {' '.join(command)}\n{advice}")


def _stamp() -> Path:
    return VENV / "dagengine-installed"


def _works() -> bool:
    return python().exists() and subprocess.run([str(python()), "-c", ""]).returncode == 0


@contextmanager
def _lock(file: Path) -> Iterator[None]:
    with file.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another command is setting the environment up; waiting", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
