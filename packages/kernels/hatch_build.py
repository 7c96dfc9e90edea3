"""Builds dagengine_kernels._native when pip builds the package: into the wheel, or beside the sources if editable.

A machine without a C++ compiler still gets the package: the reason goes to _native_missing.txt, which
dagengine_kernels.fused.native reads. DAGENGINE_NATIVE=required makes that an error, DAGENGINE_NATIVE=off does not try.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "src/dagengine_kernels"
MISSING = "_native_missing.txt"
COMPILERS = ("c++", "g++", "clang++")
MODES = ("auto", "required", "off")


class NotBuilt(Exception):
    """The module could not be built; the message is for the user."""


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    def dependencies(self) -> list[str]:
        if self.target_name != "wheel" or mode() == "off" or compiler() is None:
            return []
        needed = ["pybind11>=3.0,<4"]
        if find("cmake") is None:
            needed.append("cmake>=3.19,<5")
        if find("ninja") is None and find("make") is None:
            needed.append("ninja>=1.11")
        return needed

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        self.folder = Path(tempfile.mkdtemp(prefix="dagengine-native-"))
        try:
            made = build(Path(self.root), self.folder)
        except NotBuilt as error:
            if mode() == "required":
                shutil.rmtree(self.folder)
                raise
            self.app.display_warning(f"dagengine-kernels is installed without its compiled part: {error}")
            made = self.folder / MISSING
            made.write_text(f"{error}\n", encoding="utf-8")
        else:
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
        package = Path(self.root) / PACKAGE
        if version == "editable":
            for stale in (package / MISSING, package / module_name()):
                stale.unlink(missing_ok=True)
            shutil.copy2(made, package / made.name)
        else:
            build_data["force_include"][str(made)] = f"dagengine_kernels/{made.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self.target_name == "wheel":
            shutil.rmtree(self.folder, ignore_errors=True)


def mode() -> str:
    asked = os.environ.get("DAGENGINE_NATIVE", "auto")
    if asked not in MODES:
        raise SystemExit(f"DAGENGINE_NATIVE must be one of {', '.join(MODES)}, not {asked!r}")
    return asked


@cache
def find(program: str) -> str | None:
    """A program of this Python's environment, or else of PATH, that runs.

    In pip's isolated builds the environment's own scripts are there but not the packages that they import.
    """
    folders = (sysconfig.get_path("scripts"), *os.environ.get("PATH", os.defpath).split(os.pathsep))
    for folder in folders:
        found = shutil.which(program, path=folder)
        if found and subprocess.run([found, "--version"], capture_output=True).returncode == 0:
            return found
    return None


def compiler() -> str | None:
    """The C++ compiler that $CXX names, or else the first usual one."""
    named = shlex.split(os.environ.get("CXX", ""))
    return next((found for found in map(find, named[:1] or COMPILERS) if found), None)


def module_name() -> str:
    return f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"


def build(root: Path, folder: Path) -> Path:
    """Compiles the module in `folder`; returns its file. Raises NotBuilt."""
    if mode() == "off":
        raise NotBuilt("DAGENGINE_NATIVE=off was set when it was installed")
    if compiler() is None:
        asked = os.environ.get("CXX") or ", ".join(COMPILERS)
        raise NotBuilt(f"no C++ compiler was found when it was installed (looked for {asked})")
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if not headers.exists():
        raise NotBuilt(f"Python's C headers were not found when it was installed (looked for {headers})")
    cmake = find("cmake")
    if cmake is None:
        raise NotBuilt("CMake was not found when it was installed")
    output, tree = folder / "output", folder / "tree"
    generator = ["-G", "Ninja"] if find("ninja") else []
    run(cmake, "-S", root, "-B", tree, *generator, f"-DPython_EXECUTABLE={sys.executable}")
    run(cmake, "--build", tree, "--parallel", str(os.cpu_count() or 1))
    run(cmake, "--install", tree, "--prefix", output)
    return output / module_name()


def run(*command: str | Path) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-40:])
        raise NotBuilt(f"`{shlex.join(map(str, command))}` failed when it was installed:\n{last}")
