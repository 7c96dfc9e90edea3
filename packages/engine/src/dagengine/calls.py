"""One call of `LLM` or `AsyncLLM`: the prompts it was given, its requests, and what it returns once they ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .async_engine import EngineThread
from .errors import DagError
from .inputs import Input
from .request import FinishedEvent, Keep, Request
from .sampling import SamplingParams
from .state import make_result

Prompt = Input
Prompts = Prompt | Sequence[Prompt]


@dataclass(frozen=True)
class Call:
    """The requests of one call.

    Attributes:
        single: whether the call was given one prompt and no list, so that it returns no list.
    """

    requests: tuple[Request, ...]
    single: bool

    def results(self, engine: EngineThread, events: Sequence[FinishedEvent]) -> Any:
        """A `Result` per request, a list of n with n > 1.

        Args:
            events: the terminal events, in the order of the requests.

        Raises:
            DagError: the first error; the states of the other requests are released then.
        """
        error = next((event.error for event in events if event.error is not None), None)
        if error is not None:
            for event in events:
                release_states(engine, event)
            raise error
        answers = [[make_result(engine, choice) for choice in event.choices] for event in events]
        shaped: list[Any] = [
            results if request.sampling is not None and request.sampling.n > 1 else results[0]
            for request, results in zip(self.requests, answers, strict=True)
        ]
        return shaped[0] if self.single else shaped

    def states(self, engine: EngineThread, events: Sequence[FinishedEvent]) -> Any:
        """A `State` per request. Raises as `results`."""
        found = self.results(engine, events)
        return found.state if self.single else [result.state for result in found]


def release_states(engine: EngineThread, event: FinishedEvent) -> None:
    """Let go of the states of answers that nobody will be given."""
    for choice in event.choices:
        make_result(engine, choice).close()


def listed(prompts: Prompts) -> tuple[list[Prompt], bool]:
    """The prompts as a list, and whether there was one and no list: text, ids or messages are one.

    Raises:
        DagError: `invalid_request` for what is neither.
    """
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        rule = "prompts are text, token ids, messages, or a list of these"
        raise DagError("invalid_request", f"{rule}, not {type(prompts).__name__}", "prompts")
    if isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int | Mapping)):
        return [prompts], True  # type: ignore[list-item]
    return list(prompts), False  # type: ignore[arg-type]


def keep_of(keep: bool | Keep | None) -> Keep | None:
    """What a `keep` argument means: True keeps until released, False and None drop.

    Raises:
        DagError: `invalid_request` for anything but these and a `Keep`.
    """
    if keep is None or isinstance(keep, Keep):
        return keep
    if not isinstance(keep, bool):
        message = f"keep is true, false or a Keep, not {type(keep).__name__}"
        raise DagError("invalid_request", message, "keep")
    return Keep() if keep else None


def sampling_params(params: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
    """The params, or params made of options. Raises DagError `invalid_request` for both, or a wrong option."""
    if params is None:
        return SamplingParams.from_mapping(options)
    if options:
        message = "give sampling options or SamplingParams, not both"
        raise DagError("invalid_request", message, next(iter(options)))
    return params
