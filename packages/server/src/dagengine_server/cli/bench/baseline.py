"""The baseline that everybody has: transformers, on the same weights, dtype and threads, in the same process.

It runs on the thread that the engine runs on. Every thread that multiplies gets OpenMP workers of its own, and on a
machine with no cores to spare a second set of them slows whoever runs, so both would be measured at their worst.

Optional: transformers is no dependency. It is looked up by name when a benchmark asks for it, and everything
it needs from torch it gets through its own functions.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any


def transformers_available() -> bool:
    return find_spec("transformers") is not None


class Transformers:
    """`AutoModelForCausalLM` and its `generate`, greedy, with its own cache.

    Args:
        device: where the engine runs, as torch names it.
        on_thread: runs a function on the thread to measure on, and waits for it.
    """

    def __init__(
        self, folder: str, dtype: str, device: str, on_thread: Callable[[Callable[[], Any]], Any]
    ) -> None:
        self._on_thread, self._device = on_thread, device
        on_thread(lambda: self._load(folder, dtype))

    def _load(self, folder: str, dtype: str) -> None:
        library = importlib.import_module("transformers")
        library.logging.set_verbosity_error()
        library.logging.disable_progress_bar()
        self._library = library
        model: Any = library.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self._model = model if self._device == "cpu" else model.to(self._device)
        self._model.generation_config.eos_token_id = None

    def generate(self, ids: Sequence[int], tokens: int) -> tuple[list[float], list[int]]:
        """Greedily sample exactly `tokens` tokens.

        Returns:
            Seconds from the call to each token, and the tokens.
        """
        result: tuple[list[float], list[int]] = self._on_thread(lambda: self._generate(ids, tokens))
        return result

    def _generate(self, ids: Sequence[int], tokens: int) -> tuple[list[float], list[int]]:
        batch = self._library.BatchEncoding({"input_ids": [list(ids)]}, tensor_type="pt")
        if self._device != "cpu":
            batch = batch.to(self._device)
        batch["attention_mask"] = batch["input_ids"].new_ones(batch["input_ids"].shape)
        clock = _Clock()
        begin = time.perf_counter()
        output = self._model.generate(
            **batch,
            max_new_tokens=tokens,
            do_sample=False,
            streamer=clock,
            pad_token_id=0,
        )
        sampled = output[0, len(ids) :].tolist()
        return [at - begin for at in clock.tokens[1:]], sampled


class _Clock:
    """A streamer of transformers: told the prompt first, then every token."""

    def __init__(self) -> None:
        self.tokens: list[float] = []

    def put(self, value: Any) -> None:
        self.tokens.append(time.perf_counter())

    def end(self) -> None:
        pass
