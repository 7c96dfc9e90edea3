"""Other engines, measured in their own process memory the way ours is. None is a dependency: each is looked up by name.

They get token ids, are told to decode greedily and to the full length, and make no text. Prefix caching is on, as it is
by default; all prompts are fresh.
"""

from __future__ import annotations

import importlib
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Protocol

from ..console import CommandError
from .arguments import COMMON, Common
from .lengths import LOWEST_ID

Job = tuple[list[int], int]
"""The ids of a prompt, and how many tokens to sample."""


class Peer(Protocol):
    """An engine that takes a list of jobs."""

    @property
    def name(self) -> str:
        """As it stands in the column `backend`."""
        ...

    @property
    def device(self) -> tuple[str, dict[str, str]]:
        """The device in words, and versions beyond the installed distributions."""
        ...

    def ids(self, count: int) -> list[int]:
        """Fresh random ids."""
        ...

    def run(self, jobs: Sequence[Job], streams: int) -> None:
        """Run all jobs, at most `streams` at once, and wait for the last."""
        ...


class _Peer(ABC):
    """What the other engines have in common: their own random ids, and a library that must be there."""

    name = ""

    def __init__(self, model: str, common: Common, longest: int, *, dummy: bool) -> None:
        if find_spec(self.name) is None:
            message = f"{self.name} is not installed in this environment; install it, or measure dagengine"
            raise CommandError(message, "engine", "unsupported")
        for name, value in common.given.items():
            if name not in self.options() and value != COMMON[name][1]:
                raise CommandError(f"this command does not tell {self.name} of it; leave it out", name)
        from dagengine.model_files import find_model, read_model

        self._random = random.Random(common.seed)
        self._highest = read_model(find_model(model)).geometry.vocab_size
        self._library = importlib.import_module(self.name)
        self._engine = self.start(model, common, longest, dummy)

    @staticmethod
    def options() -> Sequence[str]:
        """The common options that it is told."""
        return ("dtype", "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "load_format")

    @abstractmethod
    def start(self, model: str, common: Common, longest: int, dummy: bool) -> Any:
        """The library's engine, with room for requests of `longest` tokens; `dummy`: with random weights."""

    @abstractmethod
    def stop(self) -> None:
        """End it and free its memory."""

    @property
    def device(self) -> tuple[str, dict[str, str]]:
        from dagengine.devices import describe, find_device

        return describe(find_device("auto"))

    def ids(self, count: int) -> list[int]:
        return self._random.choices(range(LOWEST_ID, self._highest), k=count)

    def __enter__(self) -> _Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class Vllm(_Peer):
    """vLLM's `LLM`."""

    name = "vllm"

    def start(self, model: str, common: Common, longest: int, dummy: bool) -> Any:
        told = {name: common.given[name] for name in self.options() if name in common.given}
        told["load_format"] = "dummy" if dummy else "auto"
        return self._library.LLM(
            model=model, max_model_len=longest + 1, skip_tokenizer_init=True, seed=common.seed, **told
        )

    def run(self, jobs: Sequence[Job], streams: int) -> None:
        """All jobs are given at once; how many run at once is `max_num_seqs`."""
        params = [
            self._library.SamplingParams(
                temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
            )
            for _, tokens in jobs
        ]
        prompts = [{"prompt_token_ids": ids} for ids, _ in jobs]
        self._engine.generate(prompts, params, use_tqdm=False)

    def stop(self) -> None:
        del self._engine


class Sglang(_Peer):
    """SGLang's `Engine`."""

    name = "sglang"
    NAMES: Mapping[str, str] = {
        "dtype": "dtype",
        "gpu_memory_utilization": "mem_fraction_static",
        "max_num_seqs": "max_running_requests",
        "max_num_batched_tokens": "chunked_prefill_size",
    }

    def start(self, model: str, common: Common, longest: int, dummy: bool) -> Any:
        told = {theirs: common.given[ours] for ours, theirs in self.NAMES.items() if ours in common.given}
        return self._library.Engine(
            model_path=model,
            context_length=longest + 1,
            skip_tokenizer_init=True,
            load_format="dummy" if dummy else "auto",
            random_seed=common.seed,
            log_level="error",
            **told,
        )

    def run(self, jobs: Sequence[Job], streams: int) -> None:
        """All jobs are given at once; how many run at once is `max_num_seqs`."""
        params = [{"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True} for _, tokens in jobs]
        self._engine.generate(input_ids=[ids for ids, _ in jobs], sampling_params=params)

    def stop(self) -> None:
        self._engine.shutdown()


PEERS: Mapping[str, type[Vllm] | type[Sglang]] = {"vllm": Vllm, "sglang": Sglang}
