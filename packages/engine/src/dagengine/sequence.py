"""One answer of a request while it runs: what it samples, when it ends, and what has been told of it.

Knows tokens and text; not pages, queues or other requests. `accept` is the only place that ends an answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dagengine_kvstore import Read

from .detokenizer import IncrementalDetokenizer
from .prepare import Prepared
from .records import answer_record
from .request import Choice, DagInfo, Request, Timing, TokenEvent, TokenLogprob
from .rng import GAMMA
from .sampler import Sampled, SamplingRow
from .sampling import SamplingParams
from .tokenizer import Tokenizer
from .work import Phase, Work

SEED_STRIDE = GAMMA
"""Answers of one request draw from seeds this far apart (2^64 over the golden ratio, rounded to odd)."""

NOTHING: frozenset[int] = frozenset()


@dataclass(eq=False)
class Sequence(Work):
    """One answer of a request: its own input, then what is sampled.

    Attributes:
        reads: laid-out runs of the context, as the store leases them.
        max_tokens: resolved limit of sampled tokens (0 for a node that samples nothing).
        keep: whether its node is to be read by others, by its name or as a parent.
        holds_back: whether its last token is computed only once it is known, since a request of its submission that
            reads it must know it to begin: then both can run in one step.
        sealed_early: whether its node is readable, and its last step is still to end.
        after: another answer of the same request whose prefill this one waits for, to share its pages.
        reload: by node, whether what the host has of it is loaded for this answer, or computed again.
        failed_loads: by read of what cannot be computed again, how many loads had failed before this answer asked.
        awaited: by node, page indices that came from the host, or were to come, before this answer ran.
        recall: whether pages of its input are on their way from a directory; None: it was not looked there yet.
        recalled: tokens that came from there.
        prefetch_pages: unused pages without which prefetching is not tried; None: it is not tried any more.
    """

    request: Request = None  # type: ignore[assignment]
    index: int = 0
    reads: tuple[Read, ...] = ()
    num_visible: int = 0
    max_tokens: int = 0
    keep: bool = False
    holds_back: bool = False
    sealed_early: bool = False
    sampling: SamplingParams | None = None
    seed: int | None = None
    detokenizer: IncrementalDetokenizer | None = None
    eos: frozenset[int] = frozenset()
    after: Sequence | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    matched: int | None = None
    restored: int = 0
    reload: dict[int, bool] = field(default_factory=dict)
    failed_loads: dict[Read, int] = field(default_factory=dict)
    awaited: dict[int, set[int]] = field(default_factory=dict)
    prefetch_pages: int | None = 0
    recall: bool | None = None
    recalled: int = 0
    emitted: int = 0
    num_returned: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prepare_began: float | None = None
    prepared: float | None = None
    first_token: float | None = None
    num_input: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_input = len(self.request.input_ids)

    def begin_sampling(
        self,
        params: SamplingParams,
        eos: frozenset[int],
        draw_seed: Callable[[], int],
        tokenizer: Tokenizer | None,
    ) -> None:
        """Set up what sampling needs: a seed of this answer's own, terminating ids, incremental text."""
        self.sampling = params
        self.eos = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)
        if params.temperature > 0:
            self.seed = params.seed if params.seed is not None else draw_seed()
        if tokenizer is not None:
            self.detokenizer = IncrementalDetokenizer(tokenizer.decode, params.stop)

    @property
    def may_end_short(self) -> bool:
        """Whether the output may leave out sampled tokens: one that ends the answer, those of a stop string."""
        return bool(self.eos) or (self.sampling is not None and bool(self.sampling.stop))

    @property
    def sampled(self) -> list[int]:
        return self.tokens[self.num_input :]

    @property
    def wants_logits(self) -> bool:
        """Whether a token is sampled once everything so far is computed: not past the limit, which is known ahead."""
        return (
            self.finish_reason is None
            and self.sampling is not None
            and len(self.tokens) - self.num_input + self.pending < self.max_tokens
        )

    @property
    def num_tokens(self) -> int:
        """Own tokens so far, pending ones included; what is sampled behind the end does not count."""
        return len(self.tokens) + (self.pending if self.finish_reason is None else 0)

    @property
    def remaining(self) -> int:
        """As of any work; the last token that may be sampled needs KV only in a node that is kept."""
        known, pending = len(self.tokens), self.pending
        if not pending or self.finish_reason is not None:
            return known - self.computed
        if (not self.keep or self.holds_back) and known - self.num_input + pending >= self.max_tokens:
            return 0
        return known + pending - self.computed

    @property
    def most_tokens(self) -> int:
        """Own tokens whose KV may ever be computed."""
        if self.finish_reason is not None:
            return len(self.tokens)
        return self.num_input + self.max_tokens - (0 if self.keep else min(1, self.max_tokens))

    @property
    def complete(self) -> bool:
        """Whether nothing is left to sample, and everything is computed by steps that ended."""
        return not self.pending and not self.wants_logits and self.committed

    def completes_with(self, count: int) -> bool:
        """Whether the next `count` tokens are its last ones, and nothing is sampled any more; the last of them may be
        pending.
        """
        if self.pending and self.finish_reason is not None:
            return False
        return self.computed + count == self.num_tokens and not self.wants_logits

    @property
    def ends_in_flight(self) -> bool:
        """Whether the step that computes its last tokens was launched, and was not collected yet."""
        return (
            self.phase is Phase.RUNNING and not self.pending and self.completes_with(0) and not self.committed
        )

    @property
    def prefilled(self) -> bool:
        """Whether others may share the pages of the input: the steps that computed it have ended."""
        return self.writer.num_committed >= self.num_input or self.phase is Phase.DONE

    @property
    def num_sampled(self) -> int:
        """Sampled tokens that are known."""
        return len(self.tokens) - self.num_input

    def sampling_row(self) -> SamplingRow:
        """What the sampler must know to choose this answer's next token."""
        params = self.sampling
        assert params is not None
        step = len(self.tokens) - self.num_input + self.pending
        return SamplingRow(
            params,
            None if self.seed is None else self.seed + self.index * SEED_STRIDE,
            self.id,
            step,
            self.seen,
            self.sampled if params.penalised else (),
            self.eos if step < params.min_tokens else NOTHING,
        )

    def accept(self, result: Sampled) -> None:
        """One sampled token, which was pending until now: record it, and decide whether it ends the answer."""
        assert self.sampling is not None and self.finish_reason is None
        if self.first_token is None:
            self.first_token = time.perf_counter()
        self.tokens.append(result.token_id)
        num_sampled = len(self.tokens) - self.num_input
        check_stop = num_sampled >= self.sampling.min_tokens
        if result.token_id in self.eos:
            self.finish_reason = "stop"
            self.stop_reason = result.token_id if result.token_id in self.sampling.stop_token_ids else None
        else:
            if result.logprob is not None:
                self.logprobs.append(result.logprob)
            self.num_returned += 1
            if self.detokenizer is not None:
                self.detokenizer.push(result.token_id, check_stop=check_stop)
            if num_sampled >= self.max_tokens:
                self.finish_reason = "length"
        text = self.detokenizer
        if text is None:
            return
        if self.finish_reason is not None:
            text.flush(check_stop=check_stop)
        if text.stopped_by is not None:
            self.finish_reason, self.stop_reason = "stop", text.stopped_by
            self.num_returned = text.num_kept()
            del self.logprobs[self.num_returned :]

    def take_event(self) -> TokenEvent | None:
        """New text and ids, if any. Ids that may turn out to lie inside a stop string wait with their text."""
        text, delta, settled = self.detokenizer, "", self.num_returned
        if text is not None:
            finished = self.finish_reason is not None
            delta = text.take(finished=finished)
            if not finished:
                settled = min(settled, text.num_settled())
        begin = self.num_input
        ids = tuple(self.tokens[begin + self.emitted : begin + settled])
        if not delta and not ids:
            return None
        wanted = self.sampling is not None and self.sampling.logprobs is not None
        logprobs = tuple(self.logprobs[self.emitted : settled]) if wanted else None
        if settled > self.emitted:
            self.emitted = settled
        return TokenEvent(self.request.id, self.index, delta, ids, logprobs)

    def spans(self) -> dict[str, tuple[int, int]]:
        """The named spans of the node, half-open, in its own tokens; a pending one is counted as returned."""
        begin, end = self.num_input, self.num_tokens
        returned = self.num_returned + end - len(self.tokens)
        spans = {"prompt": (0, begin), "output": (begin, begin + returned), "all": (0, end)}
        if self.request.turn_start is not None:
            spans["turn"] = (self.request.turn_start, end)
        return spans

    def num_reloaded(self) -> int:
        """Tokens of its reads, in pages that came from the host for it, and of its input, from a directory."""
        size = self.writer.page_size
        return min(self.recalled, self.matched or 0) + sum(
            max(0, min(read.stop, (i + 1) * size) - max(read.start, i * size))
            for read in self.reads
            for i in self.awaited.get(read.node.uid, ())
        )

    def choice(
        self,
        prepared: Prepared,
        state: str | None,
        implementation: str,
        submitted: float,
        began: float,
        facts: Mapping[str, object],
    ) -> Choice:
        """The finished answer.

        Args:
            state: the id under which it was kept, if it was.
            implementation: what ran as its attention backend.
            submitted, began: as of `RunningRequest`.
            facts: of the engine, for the record.
        """
        assert self.finish_reason is not None and self.first_token is not None
        matched = self.matched or 0
        prepared_at = self.prepared or self.first_token
        wanted = self.sampling is not None and self.sampling.logprobs is not None
        return Choice(
            index=self.index,
            text=self.detokenizer.text if self.detokenizer else "",
            token_ids=tuple(self.sampled[: self.num_returned]),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=tuple(self.logprobs) if wanted else None,
            num_sampled=self.num_sampled,
            dag=DagInfo(
                state=state,
                spans=self.spans(),
                visible=self.num_visible,
                input=self.num_input,
                reused=max(0, self.num_visible - self.restored) + matched,
                computed=self.num_input - matched + self.restored,
                reloaded=self.num_reloaded(),
                policy=self.request.position,
                own_start=self.own_start,
                record=answer_record(
                    self.request,
                    facts,
                    index=self.index,
                    state=state,
                    backend=self.backend,
                    implementation=implementation,
                    seed=self.seed,
                    read=self.num_visible,
                    restored=self.restored,
                    matched=matched,
                    sampled=tuple(self.sampled),
                    finish_reason=self.finish_reason,
                ),
                timing=Timing(
                    waited=(began - submitted) * 1e3,
                    compile=prepared.compile_ms,
                    layout=prepared.layout_ms,
                    kv_prepare=(prepared_at - (self.prepare_began or prepared_at)) * 1e3,
                    first_token=(self.first_token - submitted) * 1e3,
                ),
            ),
        )
