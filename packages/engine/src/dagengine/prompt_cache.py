"""Messages that were encoded before, so that what comes again, in one query or a later one, costs no tokenizing.

Kept by tenant, since a quick answer would tell one that another has sent the same text; and by what the chat template
reads from the clock. Equal messages give one object of ids, so that finding a fragment by its ids compares no tokens.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from .errors import DagError
from .tokenizer import Chat, ChatPrompt, Tokenizer

DEFAULT_MOST_CHARACTERS = 2**25


class Ids(tuple[int, ...]):
    """Token ids whose hash and digest are computed once."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that tell ids apart."""
        return hashlib.blake2b(struct.pack(f"<{len(self)}q", *self), digest_size=16).digest()


class PromptCache:
    """A tokenizer for messages that remembers what it gave. Used by several threads.

    Args:
        tokenizer: None where the model has none.
        most_characters: of remembered texts; those used longest ago are forgotten.
    """

    def __init__(self, tokenizer: Tokenizer | None, most_characters: int = DEFAULT_MOST_CHARACTERS) -> None:
        self._tokenizer, self._most = tokenizer, most_characters
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[Any, ...], ChatPrompt] = OrderedDict()
        self._characters = 0

    def __len__(self) -> int:
        return len(self._known)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, generate: bool, has_context: bool, salt: str
    ) -> ChatPrompt:
        """What `Tokenizer.chat` gives, with `Ids`. Raises DagError as it, and `unsupported` without a tokenizer."""
        (found,) = self.chats([Chat(messages, generate, has_context)], salt=salt)
        if isinstance(found, DagError):
            raise found
        return found

    def chats(self, chats: Sequence[Chat], *, salt: str) -> list[ChatPrompt | DagError]:
        """What `chat` gives for each, or raises; what was not encoded before is encoded together, equal ones once.

        Raises: DagError `unsupported` without a tokenizer.
        """
        if self._tokenizer is None:
            raise DagError(
                "unsupported", "this model has no tokenizer; queries are made of messages", "query"
            )
        clock = self._tokenizer.read_clock()
        if clock is None:
            return [_hashed(found) for found in self._tokenizer.chats(chats)]
        keys = [_key(chat, salt, clock) for chat in chats]
        found: dict[tuple[Any, ...], ChatPrompt | DagError] = {}
        with self._lock:
            for key in keys:
                known = self._known.get(key)
                if known is not None:
                    self._known.move_to_end(key)
                    found[key] = known
        new = {key: chat for key, chat in zip(keys, chats, strict=True) if key not in found}
        if new:
            encoded = map(_hashed, self._tokenizer.chats(list(new.values())))
            found.update(zip(new, encoded, strict=True))
            if self._tokenizer.read_clock() == clock:
                with self._lock:
                    for key in new:
                        found[key] = self._remember(key, found[key])
        return [found[key] for key in keys]

    def _remember(self, key: tuple[Any, ...], prompt: ChatPrompt | DagError) -> ChatPrompt | DagError:
        """Returns the prompt, or an equal one that another thread remembered meanwhile. Refusals are not."""
        if isinstance(prompt, DagError) or key in self._known:
            return self._known.get(key, prompt)
        self._known[key] = prompt
        self._characters += _length(key)
        while self._characters > self._most:
            forgotten, _ = self._known.popitem(last=False)
            self._characters -= _length(forgotten)
        return prompt


def _key(chat: Chat, salt: str, clock: tuple[str, ...]) -> tuple[Any, ...]:
    said = tuple((message["role"], message["content"]) for message in chat.messages)
    return salt, chat.generate, chat.has_context, clock, said


def _hashed(prompt: ChatPrompt | DagError) -> ChatPrompt | DagError:
    return prompt if isinstance(prompt, DagError) else ChatPrompt(Ids(prompt.input_ids), prompt.turn_start)


def _length(key: tuple[Any, ...]) -> int:
    return sum(len(text) for _, text in key[-1])
