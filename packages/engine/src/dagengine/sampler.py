"""From logits to the next token of each sequence, on the device and without waiting for it.

`Sampler.launch` only enqueues work; `PendingSample.ids` can feed the next step on the device before the host knows
them. A row's choice is a function of its logits, its parameters, its own history and (seed, step), not of other rows.
Rows pay for what they ask for:

    greedy                        argmax
    temperature, min_p            argmax of score + Gumbel noise over the vocabulary (the Gumbel-max trick)
    top_k, top_p                  the same over the likeliest tokens, in order
    penalties, bias, banned ids   a copy of the row first, changed in place

On CUDA a kernel of dagengine_kernels draws over the vocabulary, with and without top_p; the rest is torch everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dagengine_kernels.fused.cuda.draw import draw

from .candidates import MASS_BITS, MAX_VOCAB, argmax, greatest, lengths, likeliest, mass
from .penalties import PenaltyCounts
from .request import TokenLogprob
from .rng import gumbel, weyl
from .sampling_rows import Job, Kind, SamplingRow, Table, chunk_rows, chunks, job_of
from .transfer import to_device, to_host

FEW = 1024
"""Where top-p keeps fewer tokens than this, which a CPU can look at, it does not sort the vocabulary."""


class Sampled(NamedTuple):
    token_id: int
    logprob: TokenLogprob | None


@dataclass(frozen=True)
class NonFiniteLogits:
    """A row's logits hold NaN or only infinities, or no id may be chosen: the sequence cannot go on."""

    row: int


class Sampler:
    """Samples for all sequences of an engine; holds the token counts of those with penalties.

    Args:
        vocab_size: ids at or past it are never chosen.
    Raises: ValueError for a vocabulary that no tokenizer has (2^21 ids or more).
    """

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        if not 0 < vocab_size < MAX_VOCAB:
            raise ValueError(f"vocab_size must be from 1 to {MAX_VOCAB - 1}, not {vocab_size}")
        self._device, self._vocab = device, vocab_size
        self._counts = PenaltyCounts(device, vocab_size)
        self._offsets: Tensor | None = None

    @torch.inference_mode()
    def launch(self, logits: Tensor, rows: SequenceOf[SamplingRow]) -> PendingSample:
        """Enqueue the choice of one token per row; on CUDA nothing waits for the device.

        Args:
            logits: [R, V], V >= vocab_size, float32 (on a CPU also float64); not changed.
            rows: R of them; each key at most once.
        """
        assert logits.shape[0] == len(rows) and logits.shape[1] >= self._vocab
        if logits.shape[1] > self._vocab:
            logits = logits[:, : self._vocab]
        ids, peaks, finite = greatest(logits)
        jobs = [job for i, row in enumerate(rows) if (job := job_of(i, row, self._vocab)) is not None]
        if jobs:
            self._process(logits, jobs, ids, finite, peaks)
            ids = ids * finite
        counted = [job for job in jobs if job.slot is not None]
        if counted:
            where = np.array([(job.index, job.slot) for job in counted], np.int64)
            index, slots = to_device(where, self._device).unbind(1)
            self._counts.add([job.row for job in counted], slots, ids.index_select(0, index))
        return PendingSample(rows, ids, finite, self._logprobs(logits, rows, ids, peaks))

    def forget(self, key: int) -> None:
        """Drop what is held of a sequence that ended, or was preempted or rolled back. Unknown keys are no error."""
        self._counts.forget(key)

    def _process(self, logits: Tensor, jobs: list[Job], ids: Tensor, finite: Tensor, peaks: Tensor) -> None:
        """Write the choices of rows that are not plain greedy over those of the argmax."""
        counted = [job for job in jobs if job.row.penalised]
        for job, slot in zip(counted, self._counts.slots([job.row for job in counted]), strict=True):
            job.slot = slot
        jobs = sorted(jobs, key=lambda job: (job.group, job.top_k))
        table = Table.load(jobs, self._device)
        for begin, end in chunks(jobs, self._vocab, self._device):
            chunk, some = jobs[begin:end], table.slice(begin, end)
            if chunk[0].row.changed:
                scores, rows = logits.index_select(0, some.index), None
                self._adjust(scores, chunk, some)
                chosen, tops, usable = greatest(scores)
                finite.index_copy_(0, some.index, finite.index_select(0, some.index) & usable)
            else:
                scores, rows = logits, some.index
                tops = peaks.index_select(0, some.index)
            if chunk[0].kind is not Kind.GREEDY:
                chosen = self._draw(scores, rows, tops, chunk, some)
            ids.index_copy_(0, some.index, chosen)

    def _adjust(self, scores: Tensor, jobs: SequenceOf[Job], table: Table) -> None:
        """Penalties, biases and banned ids, in place."""
        flat = scores.view(-1)
        params = [job.row.params for job in jobs]
        if any(p.repetition_penalty != 1.0 for p in params):
            self._counts.repeat(scores, table.slot, table.column("repetition", scores.dtype))
        if any(p.presence_penalty or p.frequency_penalty for p in params):
            names = ("presence", "frequency")
            self._counts.subtract(scores, table.slot, *(table.column(name, scores.dtype) for name in names))
        places: list[int] = []
        values: list[float] = []
        banned: list[int] = []
        for position, job in enumerate(jobs):
            begin = position * self._vocab
            for token, bias in job.row.params.logit_bias.items():
                if token < self._vocab:
                    places.append(begin + token)
                    values.append(bias)
            banned += [begin + token for token in job.row.banned if token < self._vocab]
        if places:
            added = to_device(np.array(values, np.float64), self._device).to(scores.dtype)
            flat.scatter_add_(0, to_device(np.array(places, np.int64), self._device), added)
        if banned:
            flat.index_fill_(0, to_device(np.array(banned, np.int64), self._device), -torch.inf)

    def _draw(
        self, scores: Tensor, rows: Tensor | None, peaks: Tensor, jobs: SequenceOf[Job], table: Table
    ) -> Tensor:
        """Draw token ids, int64 [n].

        Args:
            scores: [R, V]; with `rows`, not changed.
            rows: int64 [n], which of them; None: all.
            peaks: [n, 1], the greatest of each.
        """
        temperature = table.column("temperature", scores.dtype)
        log_min_p = table.column("log_min_p", scores.dtype)
        if jobs[0].kind is not Kind.LIKELIEST and scores.device.type == "cuda":
            top_p = table.column("top_p", torch.float64)[:, 0] if jobs[0].kind is Kind.ALL_IN_ORDER else None
            columns = peaks[:, 0], table.key, temperature[:, 0], log_min_p[:, 0], top_p
            return draw(scores, *columns, rows)
        if rows is not None:
            scores = scores.index_select(0, rows)
        shifted = scores.sub_(peaks).div_(temperature)
        if jobs[0].kind is not Kind.RACE:
            return self._draw_in_order(shifted, jobs, table)
        noise = gumbel(table.key, self._weyl(), shifted.dtype)
        if any(job.row.params.min_p > 0.0 for job in jobs):
            noise.masked_fill_(shifted < log_min_p, -torch.inf)
        return argmax(noise.add_(shifted))

    def _draw_in_order(self, shifted: Tensor, jobs: SequenceOf[Job], table: Table) -> Tensor:
        ordered, ids, size = self._candidates(shifted, jobs, table)
        noise = gumbel(table.key, weyl(ids), shifted.dtype)
        dropped = torch.arange(ids.shape[1], device=self._device) >= size[:, None]
        first = argmax(noise.add_(ordered).masked_fill_(dropped, -torch.inf))
        return ids.gather(1, first[:, None])[:, 0]

    def _candidates(
        self, shifted: Tensor, jobs: SequenceOf[Job], table: Table
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The likeliest tokens in order, scores and ids [n, K], and how many of them stay, int64 [n]."""
        width = max(job.top_k for job in jobs)
        limits = table.top_k, table.column("log_min_p", shifted.dtype), table.column("top_p", torch.float64)
        if self._device.type == "cpu" and jobs[0].kind is Kind.ALL_IN_ORDER and width > FEW:
            ordered, ids = likeliest(shifted, FEW)
            total = (mass(shifted) * (shifted >= limits[1])).sum(dim=-1)
            size = lengths(ordered, *limits, total)
            if int(size.max()) < FEW:
                return ordered, ids, size
        ordered, ids = likeliest(shifted, width)
        return ordered, ids, lengths(ordered, *limits)

    def _weyl(self) -> Tensor:
        if self._offsets is None:
            self._offsets = weyl(torch.arange(self._vocab, device=self._device))
        return self._offsets

    def _logprobs(
        self, logits: Tensor, rows: SequenceOf[SamplingRow], ids: Tensor, peaks: Tensor
    ) -> _Logprobs | None:
        """Log-probabilities under the model's own distribution, for the rows that want them."""
        wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        if not wanted:
            return None
        most = min(self._vocab, max(rows[i].params.logprobs or 0 for i in wanted))
        index = to_device(np.array(wanted, np.int64), self._device)
        size = chunk_rows(self._vocab, self._device)
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for some in index.split(size):
            shifted = logits.index_select(0, some)
            shifted.sub_(peaks.index_select(0, some))
            chosen = shifted.gather(1, ids.index_select(0, some)[:, None])
            top, top_ids = (
                likeliest(shifted, most) if most else (chosen[:, :0], ids.new_zeros((len(some), 0)))
            )
            total = mass(shifted).sum(dim=-1, keepdim=True).to(torch.float64).mul_(2.0**-MASS_BITS).log_()
            norm = total.to(shifted.dtype)
            found.append((chosen - norm, top - norm, top_ids))
        chosen, top, top_ids = (torch.cat(parts) for parts in zip(*found, strict=True))
        return _Logprobs(wanted, to_host(chosen), to_host(top), to_host(top_ids))


class PendingSample:
    """What a launch chose, before the host knows it.

    Attributes:
        ids: int64 [R] on the device; 0 for rows that are not finite.
    """

    def __init__(
        self, rows: SequenceOf[SamplingRow], ids: Tensor, finite: Tensor, logprobs: _Logprobs | None
    ) -> None:
        self.ids = ids
        self._rows, self._logprobs = rows, logprobs
        self._host = to_host(ids), to_host(finite)
        self._ready: torch.cuda.Event | None = None
        if ids.device.type == "cuda":
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(ids.device))

    def results(self) -> list[Sampled | NonFiniteLogits]:
        """The choices, one per row; waits until the device has made them."""
        if self._ready is not None:
            self._ready.synchronize()
        ids, finite = (tensor.tolist() for tensor in self._host)
        logprobs = {} if self._logprobs is None else self._logprobs.read(self._rows, ids)
        return [
            Sampled(token, logprobs.get(i)) if finite[i] else NonFiniteLogits(i)
            for i, token in enumerate(ids)
        ]


@dataclass(frozen=True)
class _Logprobs:
    """Host copies, complete once the launch's event is: [n, 1], [n, most] and ids [n, most] for rows `index`."""

    index: list[int]
    chosen: Tensor
    top: Tensor
    top_ids: Tensor

    def read(self, rows: SequenceOf[SamplingRow], ids: list[int]) -> dict[int, TokenLogprob]:
        found: dict[int, TokenLogprob] = {}
        columns = (self.index, self.chosen.tolist(), self.top_ids.tolist(), self.top.tolist())
        for i, (chosen,), top_ids, top in zip(*columns, strict=True):
            pairs = list(zip(top_ids, top, strict=True))[: rows[i].params.logprobs or 0]
            found[i] = TokenLogprob(ids[i], chosen, tuple(pair for pair in pairs if math.isfinite(pair[1])))
        return found
