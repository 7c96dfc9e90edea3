"""Texts of exactly so many tokens, no two alike, for any tokenizer that has words of one token."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Protocol

from ..console import CommandError
from .words import COMMON

TRIES = 100
ENOUGH = 128
"""Words that texts are made of, if the tokenizer has as many."""


class CountChat(Protocol):
    """Counts the tokens of messages as a prompt, with or without what asks for an answer."""

    def __call__(self, messages: Sequence[Mapping[str, str]], *, generate: bool) -> int: ...


class Texts:
    """Random words of one token each.

    Args:
        count: the tokens of a text, without special ones.
        count_chat: the tokens of messages as a prompt, with or without what asks for an answer.

    Raises:
        CommandError: the tokenizer has not two such words.
    """

    def __init__(self, count: Callable[[str], int], count_chat: CountChat, seed: int) -> None:
        self._count_chat = count_chat
        self._count, self._random = count, random.Random(seed)
        good = (word for word in COMMON if count(f"{word} {word}") == 2)
        self._words = list(islice(good, ENOUGH))
        if len(self._words) < 2:
            raise CommandError("the model's tokenizer has no words of one token each", "model")
        self._given: set[str] = set()
        self._checked: set[int] = set()

    def text(self, tokens: int) -> str:
        """A text that was not given before. Raises CommandError where so few tokens have no more texts."""
        for _ in range(TRIES):
            text = " ".join(self._random.choices(self._words, k=tokens))
            if text not in self._given:
                self._given.add(text)
                self._check(text, tokens)
                return text
        raise CommandError(f"there are too few different texts of {tokens} tokens", "tokens")

    def question(self, tokens: int) -> str:
        """A text that is `tokens` tokens as a user's message behind others, with what asks for its answer.

        Raises: CommandError where so few are no text.
        """
        marks = self._marks_of_a_question
        if tokens <= marks:
            raise CommandError(f"must be over {marks}, which a message has besides its text", "question")
        return self.text(tokens - marks)

    @cached_property
    def _marks_of_a_question(self) -> int:
        system, user = ({"role": role, "content": self._words[0]} for role in ("system", "user"))
        behind = self._count_chat([system], generate=False)
        return self._count_chat([system, user], generate=True) - behind - 1

    def _check(self, text: str, tokens: int) -> None:
        """Once for each length: the words make no other tokens together."""
        if tokens not in self._checked:
            found = self._count(text)
            if found != tokens:
                raise CommandError(f"a text of {tokens} words is {found} tokens here", "model")
            self._checked.add(tokens)
