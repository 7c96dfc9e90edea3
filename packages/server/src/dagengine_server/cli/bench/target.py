"""`--endpoint`: the server that a benchmark of span queries drives, one of its own or one that runs already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..console import CommandError, say
from .arguments import COMMON, Common, ended_in_order

if TYPE_CHECKING:
    from .endpoint import Endpoint

LOCAL = "local"
ANSWER_TOKENS = 16
MARKS = 32
"""Tokens that a chat template may write around a message, for the size of the pool."""

EndpointOption = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        metavar="{local,URL}",
        help="send span queries through a server: one that is started here, or one that runs",
    ),
]
ApiKey = Annotated[str | None, typer.Option(help="of the server that --endpoint names")]
Answer = Annotated[
    int | None, typer.Option(min=1, help="tokens of an answer through the endpoint  [default: 16]")
]


@dataclass(frozen=True)
class Target:
    """The server. `label` is its model for people; `device` in words, with versions, where it was started here."""

    endpoint: Endpoint
    label: str
    device: tuple[str, dict[str, str]]


def is_url(target: str) -> bool:
    """Whether it names a server that runs. Raises CommandError for what is neither that nor `local`."""
    if target == LOCAL:
        return False
    if not target.startswith(("http://", "https://")):
        raise CommandError(f"{LOCAL}, or the address of a server such as http://127.0.0.1:8000", "endpoint")
    return True


@contextmanager
def open_target(
    common: Common, target: str, api_key: str | None, *, tokens: int, sequences: int
) -> Iterator[Target]:
    """A server that answers, until the block ends.

    Args:
        tokens, sequences: what a server of our own must hold at once.

    Raises:
        CommandError: it does not answer; options of an engine beside one that runs already.
    """
    from .endpoint import Endpoint

    if is_url(target):
        refuse_engine_options(common)
        with ended_in_order(), Endpoint(target, api_key) as endpoint:
            yield Target(endpoint, Path(endpoint.model).name, ("", {}))
        return
    if api_key is not None:
        raise CommandError("a server that is started here asks for no key; leave it out", "api_key")
    from dagengine.shapes import shape_config

    from .local_server import local_server
    from .words import write_tokenizer

    say(str(common.threads))
    with common.folder() as model:
        if common.shape is not None:
            write_tokenizer(Path(model), shape_config(common.shape))
        say(f"loading {common.label}")
        engine = common.engine(tokens=tokens, sequences=sequences)
        with local_server(model, engine) as (url, device), Endpoint(url) as endpoint:
            yield Target(endpoint, common.label, device)


def refuse_engine_options(common: Common) -> None:
    """Raises CommandError for an option that says how an engine is built, where none is."""
    given: dict[str, Any] = {"model": common.model, "shape": common.shape, **common.given}
    if common.threads.asked:
        given["threads"] = common.threads.count
    for name, value in given.items():
        if value != COMMON[name][1]:
            raise CommandError("the server runs already; leave it out", name)


def refuse_without_endpoint(**values: Any) -> None:
    """Raises CommandError for an option that only `--endpoint` has a use for."""
    for name, value in values.items():
        if value is not None:
            raise CommandError("needs --endpoint", name)
