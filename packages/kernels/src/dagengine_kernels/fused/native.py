"""The compiled part of this package, dagengine_kernels._native, or why it is not there. Knows nothing that is in it.

It is built when the package is installed (hatch_build.py); an installation without a compiler lacks it and says so.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from dagengine_kernels.errors import UNSUPPORTED, KernelError

MODULE = "dagengine_kernels._native"
REASON = Path(__file__).resolve().parent.parent / "_native_missing.txt"


def load() -> ModuleType:
    """The module. Raises: KernelError (capability_missing, field ``native``) where it is not there."""
    found = _find()
    if isinstance(found, str):
        raise KernelError(
            UNSUPPORTED, f"the compiled part of this installation is missing: {found}", "native"
        )
    return found


def why_missing() -> str | None:
    """Why there is no compiled part, in a sentence for the user; None if there is one."""
    found = _find()
    return found if isinstance(found, str) else None


@cache
def _find() -> ModuleType | str:
    try:
        return importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        if error.name != MODULE:
            return str(error)
    except ImportError as error:
        return f"it cannot be loaded: {error}"
    if REASON.exists():
        return REASON.read_text(encoding="utf-8").strip()
    version = ".".join(map(str, sys.version_info[:2]))
    return f"it was not built for Python {version}; install dagengine-kernels again"
