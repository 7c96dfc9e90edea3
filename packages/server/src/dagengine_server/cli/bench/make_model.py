"""`dagengine bench make-model`: a model folder of a known shape with seeded random weights, as the Hub has them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import options
from ..console import CommandError, say


def command(
    context: typer.Context,
    shape: Annotated[str, typer.Argument(metavar="{llama-3.1-8b,qwen3-0.6b,tiny}")],
    folder: Annotated[Path, typer.Argument(help="where to write; it is made", file_okay=False)],
    seed: Annotated[int, typer.Option(help="of the weights")] = 0,
    words: Annotated[
        bool, typer.Option("--words", help="with a tokenizer of words and a chat template, to be sent text")
    ] = False,
    device: options.Device = "auto",
    config: options.Config = None,
) -> None:
    """Write a model folder of a known shape with seeded random weights: for speed, not for text.

    It has a config, a generation config and sharded safetensors. Without --words there is no tokenizer: send token ids.
    The same seed gives the same weights on every device of a type.
    """
    from dagengine import EngineConfig
    from dagengine.shapes import shape_config, write_model

    from .words import write_tokenizer

    chosen = EngineConfig(device=device, seed=seed).device
    found = shape_config(shape)
    say(f"drawing {shape}, device {chosen}, seed {seed}")
    try:
        written = write_model(folder, found, seed=seed, device=chosen)
        if words:
            write_tokenizer(written, found)
    except OSError as error:
        raise CommandError(f"{folder} cannot be written: {error}", "folder") from None
    print(written)
