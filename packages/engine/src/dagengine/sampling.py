"""Sampling parameters: what one request asks of the sampler, validated when built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property

from .errors import DagError, shown

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_CHOICES = 64
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_SEED = 2**63 - 1
MAX_DIGITS = 20
MIN_REPETITION_PENALTY = 1e-9


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen, and when to stop.

    Attributes:
        max_tokens: most tokens to sample, at least 1; None means as many as the model's length allows.
        min_tokens: no terminating id or stop string counts before this many tokens were sampled.
        temperature: 0 is greedy (arg max, lowest id on ties); otherwise logits are divided by it.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of likeliest tokens with at least this probability mass, in (0, 1].
        min_p: drop tokens below this fraction of the likeliest token's probability, in [0, 1].
        repetition_penalty: in [1e-9, 100]; divides positive and multiplies negative logits of tokens that the request
            sees or has sampled (Keskar et al., CTRL, section 4.1).
        presence_penalty, frequency_penalty: in [-2, 2]; subtracted once, and per occurrence, for tokens
            that the request has sampled.
        seed: decides, with the number of tokens sampled before, each draw: what else is in the batch never does. None
            draws a seed, which the result reports.
        stop: strings that end the output and are not part of it.
        stop_token_ids: further ids that end the output like the model's end-of-sequence ids.
        ignore_eos: the model's own end-of-sequence ids do not end the output.
        logprobs: None, or how many alternatives to report beside each sampled token (0 to 20), from the
            model's distribution before penalties and temperature.
        logit_bias: token id to a number in [-100, 100] that is added to its logit.
        n: how many independent answers; answer i draws from a stream of its own that the seed decides.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    n: int = 1

    @cached_property
    def penalised(self) -> bool:
        """Whether a choice depends on what was seen or sampled before."""
        return self.repetition_penalty != 1.0 or bool(self.presence_penalty or self.frequency_penalty)

    @cached_property
    def plain_greedy(self) -> bool:
        """Whether the arg max of the model's logits is the choice, unless ids are banned."""
        return self.temperature == 0.0 and not self.logit_bias and not self.penalised

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        else:
            object.__setattr__(self, "stop", tuple(_sequence("stop", self.stop)))
        object.__setattr__(self, "stop_token_ids", tuple(_sequence("stop_token_ids", self.stop_token_ids)))
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31)
        _integer("min_tokens", self.min_tokens, 0, 2**31)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _bad("min_tokens", f"must be at most max_tokens ({self.max_tokens})", self.min_tokens)
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, -1, 2**31)
        _number("top_p", self.top_p, 0.0, 1.0, open_below=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 100.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise _bad("stop", f"holds at most {MAX_STOP_STRINGS} strings", len(self.stop))
        for text in self.stop:
            if not isinstance(text, str) or not text or len(text) > MAX_STOP_LENGTH:
                raise _bad("stop", f"holds non-empty strings of at most {MAX_STOP_LENGTH} characters", text)
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 2**31)
        if not isinstance(self.ignore_eos, bool):
            raise _bad("ignore_eos", "must be true or false", self.ignore_eos)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        _integer("n", self.n, 1, MAX_CHOICES)
        if self.n > 1 and self.temperature == 0.0:
            raise _bad("n", "must be 1 when temperature is 0: greedy answers are all the same", self.n)

    def with_seed(self, seed: int) -> SamplingParams:
        """The same with another seed; the rest is not checked again. Raises DagError for what is no seed."""
        _integer("seed", seed, -MAX_SEED - 1, MAX_SEED)
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, seed=seed)
        return other

    @classmethod
    def from_mapping(cls, options: Mapping[str, object], path: str = "") -> SamplingParams:
        """Build from JSON-like options; an unknown key is an error that names `path` and the key."""
        known = {f.name for f in fields(cls)}
        for key in options:
            if key not in known:
                raise DagError("invalid_request", f"unknown sampling option {key!r}", _join(path, str(key)))
        try:
            return cls(**options)  # type: ignore[arg-type]
        except DagError as error:
            raise DagError(error.code, error.message, _join(path, error.field or "")) from None


def seed_after(seed: int, count: int) -> int:
    """The seed `count` after `seed`, as a signed 64-bit integer; the random numbers take it modulo 2^64."""
    return (seed + count + MAX_SEED + 1) % (2 * MAX_SEED + 2) - MAX_SEED - 1


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _bad(name: str, rule: str, value: object) -> DagError:
    return DagError("invalid_request", f"{name} {rule}, not {shown(value)}", name)


def _sequence(name: str, value: object) -> list[object]:
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise _bad(name, "must be a list", value)
    return list(value)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _bad(name, f"must be an integer from {low} to {high}", value)


def _number(name: str, value: object, low: float, high: float, *, open_below: bool = False) -> None:
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    if not fits or not (low < value if open_below else low <= value) or value > high:  # type: ignore[operator]
        interval = f"({low}, {high}]" if open_below else f"[{low}, {high}]"
        raise _bad(name, f"must be a number in {interval}", value)


def _logit_bias(value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or len(value) > MAX_LOGIT_BIAS:
        raise _bad("logit_bias", f"must map at most {MAX_LOGIT_BIAS} token ids to numbers", value)
    result: dict[int, float] = {}
    for key, bias in value.items():
        written = isinstance(key, str) and len(key) <= MAX_DIGITS and key.isascii() and key.isdecimal()
        token = int(key) if written else key
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise _bad("logit_bias", "must have token ids as keys", key)
        _number("logit_bias", bias, -100.0, 100.0)
        if token in result:
            raise _bad("logit_bias", "must name a token id once", key)
        result[token] = float(bias)
    return result
