"""Makes the kernels package importable and built where nothing was installed: standard library only.

Where pip has installed the package there is nothing to do. Elsewhere (a GPU machine without a network) the sources are
put on the path, with a record of the entry points as pip would have written it, and the C++ module is built in place.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "packages" / "kernels"
SOURCE = PACKAGE / "src"
CACHE = ROOT / ".cache" / "bench-kernels"


def environment() -> dict[str, str]:
    """The environment in which the worker finds the package and this tool's modules."""
    found = dict(os.environ)
    paths = [str(ROOT / "tools")]
    if not _works("import importlib.metadata as m; m.version('dagengine-kernels')"):
        paths += [str(SOURCE), str(record(CACHE / "site"))]
    found["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [found.get("PYTHONPATH")])])
    return found


def record(folder: Path) -> Path:
    """Write what pip records of the package (name, version, entry points) into `folder`; returns `folder`."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name, version = project["name"], project.get("version", "0")
    target = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    target.mkdir(parents=True, exist_ok=True)
    (target / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8"
    )
    lines = []
    for group, points in project.get("entry-points", {}).items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items()), ""]
    (target / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


def build(env: dict[str, str]) -> str | None:
    """Build `dagengine_kernels._native` in place unless it is there; why it could not be built, or None."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if (SOURCE / "dagengine_kernels" / f"_native{suffix}").exists():
        return None
    if _works("import dagengine_kernels._native", env):
        return None
    cmake = shutil.which("cmake")
    if cmake is None:
        return "cmake is not installed"
    where = subprocess.run(
        [sys.executable, "-m", "pybind11", "--cmakedir"], capture_output=True, text=True, env=env
    )
    if where.returncode:
        return "pybind11 is not installed"
    folder = CACHE / "build"
    configure = [cmake, "-S", str(PACKAGE), "-B", str(folder), "-DDAGENGINE_INPLACE=ON"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={where.stdout.strip()}"]
    if shutil.which("ninja"):
        configure += ["-G", "Ninja"]
    for command in (configure, [cmake, "--build", str(folder), "--parallel"]):
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        if done.returncode:
            return f"{' '.join(command[:3])} failed:\n{(done.stdout + done.stderr)[-2000:]}"
    return None if _works("import dagengine_kernels._native", env) else "it was built and does not import"


def call(env: dict[str, str], script: str, arguments: Sequence[str]) -> int:
    """Run a script with this Python; its status."""
    return subprocess.run([sys.executable, "-W", "ignore", script, *arguments], env=env).returncode


def _works(code: str, env: dict[str, str] | None = None) -> bool:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, env=env).returncode == 0
