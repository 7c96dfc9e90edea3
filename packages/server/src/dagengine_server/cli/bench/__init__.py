"""`dagengine bench`: measurements on this machine, each beside its baseline."""

from .command import app

__all__ = ["app"]
