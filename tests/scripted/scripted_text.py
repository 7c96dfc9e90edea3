"""The scripted model with a tokenizer of its own, so that it can be asked in messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from scripted_model import ScriptedModel, geometry

from dagengine import LLM, EngineConfig
from dagengine.build import assemble
from dagengine.core import EngineCore
from dagengine.tokenizer import Chat, ChatPrompt

PAGES = 512


class Words:
    """A tokenizer: three tokens a message, two for the generation prompt; a text is its ids."""

    vocab_size = 4096
    template_source = None

    def chat(self, messages: Sequence[Mapping[str, Any]], *, generate: bool, has_context: bool) -> ChatPrompt:
        ids: list[int] = []
        for message in messages:
            said = f"{message['role']} {message['content'].rpartition('|')[2]}".encode()
            ids += [7, *(int.from_bytes(said[part::2], "little") % 4000 for part in (0, 1))]
        return ChatPrompt((*ids, *((8, 9) if generate else ())), len(ids) if generate else None)

    def chats(self, chats: Sequence[Chat]) -> list[ChatPrompt]:
        return [
            self.chat(messages, generate=generate, has_context=has_context)
            for messages, generate, has_context in chats
        ]

    def read_clock(self) -> tuple[str, ...]:
        return ()

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(f"<{token}>" for token in ids)


def text_core() -> EngineCore:
    """A core of the scripted model that takes messages."""
    config = EngineConfig(
        max_num_batched_tokens=64, kv_pages=PAGES, page_size=4, attention_backend="scripted", overlap=False
    )
    core = assemble(
        ScriptedModel(),
        geometry(),
        config,
        identity="scripted",
        dtype=torch.float64,
        tokenizer=Words(),  # type: ignore[arg-type]
    )
    for layer in range(2):
        core._runner.arena.layer(layer).fill_(torch.nan)
    return core


def text_engine() -> LLM:
    """An engine around such a core."""
    return LLM(core=text_core())
