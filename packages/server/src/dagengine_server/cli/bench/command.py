"""`dagengine bench`: the benchmarks by name. Each is in a module of its own."""

from __future__ import annotations

from .. import options
from ..console import new_app
from . import branches, bulk, dag, make_model, needle, nested, offline, quality, rag, reposition, serve

app = new_app("Measure a model or a server, each figure beside its baseline.")


@app.callback()
def bench() -> None:
    """Measure a model or a server, each figure beside its baseline."""


for module, name in (
    (dag, "dag"),
    (rag, "rag"),
    (nested, "nested"),
    (branches, "branches"),
    (bulk, "bulk"),
    (needle, "needle"),
    (quality, "quality"),
    (reposition, "reposition"),
    (offline, "offline"),
    (serve, "serve"),
    (make_model, "make-model"),
):
    app.command(name, context_settings=options.SETTINGS)(module.command)
