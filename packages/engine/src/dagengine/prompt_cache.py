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
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .errors import DagError
from .tokenizer import Chat, ChatPrompt, Tokenizer

DEFAULT_MOST_CHARACTERS = 2**25
ENTRY_CHARACTERS = 64
"""What a remembered prompt takes besides its texts, in the memory of so many of their characters."""


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


_Key = tuple[Any, ...]


@dataclass(frozen=True)
class Lookup:
    """Chats that a cache was asked for.

    Attributes:
        known: the prompts of those that were encoded before, None for the others; in the order of the chats.
        new: the others, equal ones once, each with its places in that order.
        clock: what the chat template would have read from the clock.
    """

    clock: tuple[str, ...] | None
    known: Sequence[ChatPrompt | None]
    new: Mapping[_Key, tuple[Chat, list[int]]]

    @property
    def characters(self) -> int:
        """Of the messages that are yet to be encoded."""
        return sum(len(message["content"]) for chat, _ in self.new.values() for message in chat.messages)


class PromptCache:
    """A tokenizer for messages that remembers what it gave. Used by several threads.

    Args:
        tokenizer: None where the model has none.
        most_characters: of remembered texts and their salts, and `ENTRY_CHARACTERS` for each prompt; those used
            longest ago are forgotten.
    """

    def __init__(self, tokenizer: Tokenizer | None, most_characters: int = DEFAULT_MOST_CHARACTERS) -> None:
        self._tokenizer, self._most = tokenizer, most_characters
        self._lock = threading.Lock()
        self._known: OrderedDict[_Key, tuple[_Key, ChatPrompt]] = OrderedDict()
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
        return self.encode(self.look_up(chats, salt=salt))

    def look_up(self, chats: Sequence[Chat], *, salt: str) -> Lookup:
        """What is known of chats, for `encode`; takes no longer than hashing them does. Raises as `chats`."""
        if self._tokenizer is None:
            raise DagError(
                "unsupported", "this model has no tokenizer; queries are made of messages", "query"
            )
        clock = self._tokenizer.read_clock()
        new: dict[_Key, tuple[Chat, list[int]]] = {}
        if clock is None:
            return Lookup(clock, [None] * len(chats), {(i,): (chat, [i]) for i, chat in enumerate(chats)})
        keys = [_key(chat, salt, clock) for chat in chats]
        known: list[ChatPrompt | None] = []
        with self._lock:
            remembered = self._known
            for index, key in enumerate(keys):
                found = remembered.get(key)
                if found is None:
                    new.setdefault(key, (chats[index], []))[1].append(index)
                    known.append(None)
                else:
                    remembered.move_to_end(found[0])  # that very key: its texts are not compared again
                    known.append(found[1])
        return Lookup(clock, known, new)

    def encode(self, lookup: Lookup) -> list[ChatPrompt | DagError]:
        """What `chats` gives."""
        return self.encode_together([lookup])[0]

    def encode_together(self, lookups: Sequence[Lookup]) -> list[list[ChatPrompt | DagError]]:
        """What `encode` gives for each, in one call of the tokenizer, which works on many texts at once."""
        found = [list[ChatPrompt | DagError | None](lookup.known) for lookup in lookups]
        chats: dict[_Key, tuple[Chat, tuple[str, ...] | None]] = {}  # with the clock of its lookup
        places: dict[_Key, list[tuple[int, int]]] = {}
        for number, lookup in enumerate(lookups):
            for key, (chat, own) in lookup.new.items():
                whole = key if lookup.clock is not None else (number, *key)
                chats[whole] = chat, lookup.clock
                places.setdefault(whole, []).extend([(number, place) for place in own])
        if not chats:
            return found  # type: ignore[return-value]
        assert self._tokenizer is not None
        encoded = [_hashed(one) for one in self._tokenizer.chats([chat for chat, _ in chats.values()])]
        now = self._tokenizer.read_clock()
        if now is not None:
            with self._lock:
                encoded = [
                    self._remember(key, one) if clock == now else one
                    for (key, (_, clock)), one in zip(chats.items(), encoded, strict=True)
                ]
        for listed, one in zip(places.values(), encoded, strict=True):
            for number, place in listed:
                found[number][place] = one
        return found  # type: ignore[return-value]

    def _remember(self, key: _Key, prompt: ChatPrompt | DagError) -> ChatPrompt | DagError:
        """Returns the prompt, or an equal one that another thread remembered meanwhile. Refusals are not."""
        known = self._known.get(key)
        if known is not None:
            return known[1]
        if isinstance(prompt, DagError):
            return prompt
        self._known[key] = key, prompt
        self._characters += _length(key)
        while self._characters > self._most:
            forgotten, _ = self._known.popitem(last=False)
            self._characters -= _length(forgotten)
        return prompt


def _key(chat: Chat, salt: str, clock: tuple[str, ...]) -> _Key:
    said = tuple([(message["role"], message["content"]) for message in chat.messages])
    return salt, chat.generate, chat.has_context, clock, said


def _hashed(prompt: ChatPrompt | DagError) -> ChatPrompt | DagError:
    return prompt if isinstance(prompt, DagError) else ChatPrompt(Ids(prompt.input_ids), prompt.turn_start)


def _length(key: _Key) -> int:
    return ENTRY_CHARACTERS + len(key[0]) + sum(len(text) for _, text in key[-1])
