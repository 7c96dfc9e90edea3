"""From what the engine returns to the JSON of answers. Builds values, sends nothing.

No answer holds NaN or an infinity: log-probabilities are cut at -9999.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from dagengine.request import Choice, DagInfo, TokenLogprob
from dagengine.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
REPLACEMENT = "\ufffd"


def to_json(value: Any) -> bytes:
    """Compact JSON in UTF-8; text that is no Unicode is escaped. Raises ValueError for NaN and infinities."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def dag_object(dag: DagInfo) -> dict[str, Any]:
    """The `dag` object of one answer."""
    return {
        "state": dag.state,
        "spans": {name: list(span) for name, span in dag.spans.items() if name != "all"},
        "tokens": {
            "visible": dag.visible,
            "input": dag.input,
            "reused": dag.reused,
            "computed": dag.computed,
            "reloaded": dag.reloaded,
        },
        "position": {"policy": dag.policy, "own_start": dag.own_start},
        "record": dict(dag.record),
        "timing_ms": {
            "waited": round(dag.timing.waited, 3),
            "compile": round(dag.timing.compile, 3),
            "layout": round(dag.timing.layout, 3),
            "kv_prepare": round(dag.timing.kv_prepare, 3),
            "first_token": round(dag.timing.first_token, 3),
        },
    }


def usage(answered: Iterable[Sequence[Choice]]) -> dict[str, Any]:
    """Token counts over prompts, each with its answers: a prompt counts once however many answers it has."""
    prompt = cached = completion = 0
    for choices in answered:
        first = choices[0].dag
        prompt += first.visible + first.input
        cached += first.reused
        completion += sum(choice.num_sampled for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def chat_logprobs(logprobs: Sequence[TokenLogprob], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """OpenAI's `logprobs` of a chat answer."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = token_text(token_id, tokenizer)
        data = None if REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": finite(logprob), "bytes": data}

    content = []
    for item in logprobs:
        top = [entry(token_id, logprob) for token_id, logprob in item.top]
        content.append({**entry(item.token_id, item.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def text_logprobs(
    logprobs: Sequence[TokenLogprob], tokenizer: Tokenizer | None, offset: int
) -> dict[str, Any]:
    """OpenAI's `logprobs` of a text completion.

    Args:
        offset: characters of the answer before the first of these tokens.
    """
    tokens, offsets = [], []
    for item in logprobs:
        tokens.append(token_text(item.token_id, tokenizer))
        offsets.append(offset)
        offset += len(tokens[-1])
    top: list[dict[str, float]] = []
    for item in logprobs:
        best: dict[str, float] = {}
        for token_id, logprob in item.top:
            best.setdefault(token_text(token_id, tokenizer), finite(logprob))
        top.append(best)
    return {
        "tokens": tokens,
        "token_logprobs": [finite(item.logprob) for item in logprobs],
        "top_logprobs": top,
        "text_offset": offsets,
    }


def token_text(token_id: int, tokenizer: Tokenizer | None) -> str:
    """A token by itself; its number where the model has no tokenizer."""
    return str(token_id) if tokenizer is None else tokenizer.token_text(token_id)


def finite(value: float) -> float:
    """The value, or -9999 for what JSON cannot carry."""
    return max(value, LOWEST_LOGPROB) if math.isfinite(value) else LOWEST_LOGPROB
