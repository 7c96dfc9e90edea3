"""An engine core that only lays out: a model's configuration and tokenizer without its weights."""

from __future__ import annotations

from typing import Any

from dagengine import EngineConfig
from dagengine.build import assemble
from dagengine.core import EngineCore
from dagengine.model_files import find_model, read_model
from dagengine.tokenizer import Tokenizer


class _NoWeights:
    """Stands for the model; nothing that is only laid out runs one."""

    def forward(self, input_ids: Any, attend: Any) -> Any:
        raise AssertionError("this engine has no weights")

    def logits(self, hidden: Any) -> Any:
        raise AssertionError("this engine has no weights")


def planning_core(model: str, config: EngineConfig) -> EngineCore:
    """A core for `dagengine.explain`. Raises DagError as loading the model would, apart from its weights."""
    files = read_model(find_model(model))
    has_tokenizer = (files.folder / "tokenizer.json").exists()
    return assemble(
        _NoWeights(),
        files.geometry,
        config,
        identity="weights not loaded",
        eos_token_ids=files.eos_token_ids,
        tokenizer=Tokenizer(files.folder) if has_tokenizer else None,
    )
