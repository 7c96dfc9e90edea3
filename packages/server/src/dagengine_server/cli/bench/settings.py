"""The sizes of one benchmark run. Every figure's case names those it depends on."""

from __future__ import annotations

from dataclasses import dataclass

WARM_UPS = 2
"""Repeats not counted where steps are small: a GPU captures such a step when its kind comes the second time."""


@dataclass(frozen=True)
class Settings:
    """Sizes in tokens, counts of repeats.

    Attributes:
        fragments, fragment_length: cached states that a request reads, in a new order every time.
        question: own tokens of such a request.
        decode: tokens sampled after the first where later decode is measured over the fragments.
        prompt, answer: of the runs without a context: single stream, and several at once.
        streams: requests at once. readers, shared: requests that read one state of `shared` tokens.
        repeats: of what is quick. baseline_repeats: of plain prefills, which are slow.
    """

    fragments: int = 16
    fragment_length: int = 256
    question: int = 64
    decode: int = 32
    prompt: int = 128
    answer: int = 64
    streams: int = 16
    readers: int = 32
    shared: int = 4096
    repeats: int = 10
    baseline_repeats: int = 3

    @property
    def visible(self) -> int:
        return self.fragments * self.fragment_length

    @property
    def merge_case(self) -> str:
        return f"{self.fragments} fragments x {self.fragment_length}, question {self.question}"
