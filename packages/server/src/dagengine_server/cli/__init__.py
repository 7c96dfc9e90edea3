"""The command line: `dagengine COMMAND`. A command is an entry point, imported when it is asked for."""

from .main import main

__all__ = ["main"]
