"""A model's folder, in the file system or fetched from the Hub, and what its configuration says. Knows no weights."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dagengine_positions import ModelGeometry, geometry_from_config

from .errors import DagError, as_dag_error

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class ModelFiles:
    """What a folder says of its model."""

    folder: Path
    config: dict[str, Any]
    geometry: ModelGeometry
    eos_token_ids: tuple[int, ...]


def find_model(model: str | os.PathLike[str]) -> Path:
    """The folder of a model: the path itself, or a snapshot of the Hub repository of that id.

    Raises:
        DagError: `model_not_found`.
    """
    folder = Path(model)
    if (folder / "config.json").exists():
        return folder
    if folder.exists() or not HUB_ID.fullmatch(str(model)):
        raise DagError(
            "model_not_found", f"{str(model)!r} is no folder with a config.json, nor a Hub id", "model"
        )
    try:
        from huggingface_hub import constants, errors, snapshot_download
    except ImportError:
        hint = "install dagengine[hub] to load models by their Hub id"
        raise DagError("model_not_found", f"{str(model)!r} is no folder; {hint}", "model") from None
    try:
        return Path(snapshot_download(str(model), allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except errors.LocalEntryNotFoundError as error:
        cause = error.__cause__ or error
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{type(cause).__name__}: {cause}"
        message = f"{str(model)!r} was not fetched before, and the Hub could not be reached: {why}"
        raise DagError("model_not_found", message, "model") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        raise DagError(
            "model_not_found", f"the Hub has no {str(model)!r} for us: {error}", "model"
        ) from error
    except Exception as error:
        raise DagError(
            "model_not_found", f"{str(model)!r} could not be fetched from the Hub: {error}", "model"
        ) from error


def read_model(folder: Path) -> ModelFiles:
    """Read `config.json` and `generation_config.json`; refuse what the engine does not compute exactly."""
    try:
        config = json.loads((folder / "config.json").read_text())
        generation_path = folder / "generation_config.json"
        generation = json.loads(generation_path.read_text()) if generation_path.exists() else {}
    except ValueError as error:
        raise DagError(
            "invalid_weights", f"{folder} holds a config that is no JSON: {error}", "model"
        ) from None
    try:
        geometry = geometry_from_config(config)
    except Exception as error:
        raise as_dag_error(error, "model") from None
    eos = generation.get("eos_token_id") if isinstance(generation, dict) else None
    ids = [eos] if isinstance(eos, int) else list(eos or ())
    return ModelFiles(folder, config, geometry, tuple(dict.fromkeys([*ids, *geometry.eos_token_ids])))
