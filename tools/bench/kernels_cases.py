"""The cases of `tools/bench/kernels`: who sees which tokens where, in what shape, and what each case is raced against.

Knows segment tables and counts; no tensors, no devices, no times. Every table is drawn from a seed, its pages lie in a
shuffled order, and a query row's own token is in its context already (append comes before attention).

    Arena.node(n)          n fresh tokens, in fresh pages, stored at stored ..
    Node.seen_at(view)     the node's extents as a reader at that view position lists them; a slice with first, last
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dagengine_kernels import DELTA, HI, LO, PAGE, STORED, SegmentTable, SequenceSegments
from dagengine_kernels.graph_cases import graph_case

Extent = tuple[int, int, int, int, int]

DOCUMENT = 2857
OWN = 256
L2_BYTES = 64 << 20


@dataclass(frozen=True)
class Heads:
    """Query heads, kv heads and head dimension of one layer."""

    name: str
    query: int
    kv: int
    dim: int

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of a token in 2-byte pages."""
        return 2 * self.kv * self.dim * 2


LLAMA = Heads("llama-3-8b", 32, 8, 128)
LLAMA_70B_TP8 = Heads("llama-3-70b-tp8", 8, 1, 128)
QWEN_MOE = Heads("qwen3-30b-a3b", 32, 4, 128)
HEAD_64 = Heads("head-64", 32, 8, 64)
SMOLLM2 = Heads("smollm2-135m", 9, 3, 64)


@dataclass(frozen=True)
class Node:
    """Tokens that were made once. parts: (page, lo, hi, stored) each, in order."""

    parts: tuple[tuple[int, int, int, int], ...]

    def seen_at(self, view: int, first: int = 0, last: int | None = None) -> list[Extent]:
        """Extents of tokens first..last-1 of the node (all by default), the first of them seen at `view`."""
        listed, at = [], 0
        stop = sum(hi - lo for _, lo, hi, _ in self.parts) if last is None else last
        for page, lo, hi, stored in self.parts:
            begin, end = max(first, at), min(stop, at + hi - lo)
            if begin < end:
                moved = stored + begin - at
                listed.append((page, lo + begin - at, lo + end - at, moved, view + begin - first - moved))
            at += hi - lo
        return listed


class Arena:
    """Hands out pages in an order that `table` shuffles."""

    def __init__(self, page_size: int) -> None:
        self.page_size, self.used = page_size, 0

    def node(self, tokens: int, stored: int = 0, offset: int = 0) -> Node:
        """`tokens` fresh tokens stored at `stored`.., from row `offset` of the first of their pages."""
        parts, done = [], 0
        while done < tokens:
            lo = offset if not parts else 0
            hi = min(self.page_size, lo + tokens - done)
            parts.append((self.used, lo, hi, stored + done))
            done += hi - lo
            self.used += 1
        return Node(tuple(parts))

    def table(self, sequences: Iterable[SequenceSegments], seed: int = 0) -> SegmentTable:
        """The batch, its pages renumbered at random."""
        table = SegmentTable.from_sequences(sequences, page_size=self.page_size, num_pages=self.used)
        order = np.random.default_rng(seed).permutation(self.used).astype(np.int32)
        extents = table.extents.copy()
        extents[:, PAGE] = order[extents[:, PAGE]]
        return replace(table, extents=extents)


@dataclass(frozen=True)
class Case:
    """One row of the matrix.

    Attributes:
        name: as in reports, predictions and bars.
        group: what `--cases` calls it together with others, one of GROUPS.
        page_size: tokens per page.
        build: makes the table of a page size.
        rivals: names of baselines (kernels_baselines) that are raced in the same run.
        controls: whether the control paths and the ablation run too.
        against: name of another case whose time is this one's baseline besides the rivals.
        bar: whether a bar reads it; such cases come first.
    """

    name: str
    group: str
    build: Callable[[int], SegmentTable]
    heads: Heads = LLAMA
    page_size: int = 64
    rivals: tuple[str, ...] = ()
    controls: bool = False
    against: str | None = None
    bar: bool = False


@dataclass(frozen=True)
class Work:
    """What a table asks for, whoever computes it.

    Attributes:
        unique_tokens: distinct (page, row) that the table lists.
        listed_tokens: tokens listed, each as often as it is.
        pairs: visible (query row, token) pairs.
        rows: query rows.
    """

    unique_tokens: int
    listed_tokens: int
    pairs: int
    rows: int

    def bytes(self, heads: Heads, element: int = 2) -> int:
        """The fewest bytes: each K and V once, q once, out once."""
        kv = 2 * heads.kv * heads.dim * element * self.unique_tokens
        return kv + 2 * self.rows * heads.query * heads.dim * element

    def unshared_bytes(self, heads: Heads, element: int = 2) -> int:
        """The same where every sequence reads its own."""
        kv = 2 * heads.kv * heads.dim * element * self.listed_tokens
        return kv + 2 * self.rows * heads.query * heads.dim * element

    def flops(self, heads: Heads) -> int:
        """Multiplications and additions of both products over visible pairs."""
        return 4 * heads.query * heads.dim * self.pairs


def work_of(table: SegmentTable) -> Work:
    """Count a table."""
    seen = np.zeros((table.num_pages, table.page_size), np.bool_)
    extents = table.extents
    whole = (extents[:, LO] == 0) & (extents[:, HI] == table.page_size)
    seen[extents[whole, PAGE]] = True
    for page, lo, hi in extents[~whole][:, [PAGE, LO, HI]].tolist():
        seen[page, lo:hi] = True
    pairs = 0
    for b in range(table.num_sequences):
        rows = table.q_positions[table.q_indptr[b] : table.q_indptr[b + 1]]
        mine = extents[table.extent_indptr[b] : table.extent_indptr[b + 1]].astype(np.int64)
        first = mine[:, STORED] + mine[:, DELTA]
        length = mine[:, HI] - mine[:, LO]
        if not len(rows):
            continue
        done = first + length - 1 <= rows[0]
        pairs += int(length[done].sum()) * len(rows)
        for start, count in zip(first[~done].tolist(), length[~done].tolist(), strict=True):
            pairs += int(np.clip(rows - start + 1, 0, count).sum())
    return Work(int(seen.sum()), table.num_tokens, pairs, table.num_rows)


def longest_view(table: SegmentTable) -> int:
    """Length that a rotary table needs for the batch."""
    if not len(table.extents) or not table.num_rows:
        return 1
    extents = table.extents.astype(np.int64)
    last = int(table.q_positions.max())
    return int(max(last, (last - extents[:, DELTA]).max(), (extents[:, STORED] + extents[:, HI]).max())) + 1


def one_row(length: int, extents: Sequence[Extent], sequence_id: int) -> SequenceSegments:
    """A decode row at the last of `length` view positions."""
    return SequenceSegments(length - 1, 1, extents, sequence_id)


def decode(
    lengths: Sequence[int], *, segment: int | None = None, moved: bool = False, sliced: bool = False
) -> Callable[[int], SegmentTable]:
    """Sequences that share nothing.

    Args:
        segment: cut each context into segments of this many tokens (None: one segment).
        moved: every segment was stored elsewhere, all deltas are distinct; else all are 0.
        sliced: every segment begins in the middle of a page.
    """

    def build(page_size: int) -> SegmentTable:
        arena, r, sequences, serial = Arena(page_size), random.Random(1), [], 0
        for b, length in enumerate(lengths):
            extents: list[Extent] = []
            view = 0
            while view < length:
                count = min(segment or length, length - view)
                offset = r.randrange(1, page_size) if sliced else 0
                stored = view + 1 + 7 * serial % 8191 if moved else view
                extents += arena.node(count, stored, offset).seen_at(view)
                view += count
                serial += 1
            sequences.append(one_row(length, extents, b))
        return arena.table(sequences)

    return build


def zipf(total: int, count: int) -> list[int]:
    """`count` lengths that fall as 1/rank and add up to `total`."""
    weights = [1 / (i + 1) for i in range(count)]
    lengths = [max(1, int(total * w / sum(weights))) for w in weights]
    lengths[0] += total - sum(lengths)
    return lengths


def one_giant(total: int, count: int) -> list[int]:
    """Half of `total` in one sequence, the rest evenly in the others."""
    rest = total // 2 // (count - 1)
    return [total - rest * (count - 1), *([rest] * (count - 1))]


def prefill(
    new: int, documents: int = 0, length: int = DOCUMENT, *, contiguous: bool = False, sequences: int = 1
) -> Callable[[int], SegmentTable]:
    """`new` tokens after `documents` × `length` cached ones, each document at its own delta, or as one segment."""

    def build(page_size: int) -> SegmentTable:
        arena, listed = Arena(page_size), []
        for b in range(sequences):
            context = documents * length
            extents: list[Extent] = []
            if contiguous:
                extents = arena.node(context + new).seen_at(0)
            else:
                for i in range(documents):
                    extents += arena.node(length, stored=11 * i + 1).seen_at(i * length)
                extents += arena.node(new, stored=context).seen_at(context)
            listed.append(SequenceSegments(context, new, extents, b))
        return arena.table(listed)

    return build


def fan_out(readers: int, shared: int) -> Callable[[int], SegmentTable]:
    """Readers of one shared run, each at its own position, with own tails."""

    def build(page_size: int) -> SegmentTable:
        arena = Arena(page_size)
        node = arena.node(shared)
        sequences = []
        for b in range(readers):
            extents = [*node.seen_at(b), *arena.node(OWN, shared + b).seen_at(shared + b)]
            sequences.append(one_row(shared + b + OWN, extents, b))
        return arena.table(sequences)

    return build


def segments(count: int, batch: int = 32, length: int = 8448) -> Callable[[int], SegmentTable]:
    """Contexts of the same length in `count` segments of whole pages, each at its own delta, nothing shared."""
    return decode([length] * batch, segment=-(-length // (64 * count)) * 64, moved=True)


FA3, FLASHINFER, CASCADE, SDPA = "fa3", "flashinfer", "flashinfer-cascade", "sdpa"
PAGED = (FA3, FLASHINFER)

BARE = {
    "decode 32x8192": [8192] * 32,
    "decode 1x91424": [91424],
    "decode 64x1024": [1024] * 64,
    "decode 1x4096": [4096],
    "decode 8x1024": [1024] * 8,
}


def decode_cases() -> list[Case]:
    """Decode without sharing, and the same with deltas, slices and uneven lengths."""
    listed = []
    for name, lengths in BARE.items():
        listed.append(Case(name, "decode", decode(lengths), rivals=PAGED, bar=True))
        moved = decode(lengths, segment=2816, moved=True)
        sliced = decode(lengths, moved=True, sliced=True)
        listed.append(Case(f"{name} distinct deltas", "decode", moved, against=name, bar=True))
        listed.append(Case(f"{name} mid-page slices", "decode", sliced, against=name, bar=True))
        listed.append(Case(f"{name} page 16", "decode", decode(lengths), page_size=16, rivals=PAGED))
    documents = decode([32 * DOCUMENT], segment=DOCUMENT, moved=True, sliced=True)
    listed.append(Case("decode 1x91424 32 slices", "decode", documents, against="decode 1x91424"))
    even = "decode 32x8192"
    for kind, lengths in (("zipf lengths", zipf(32 * 8192, 32)), ("one giant", one_giant(32 * 8192, 32))):
        listed.append(Case(f"{even} {kind}", "decode", decode(lengths), rivals=PAGED, against=even, bar=True))
    return listed


def prefill_cases() -> list[Case]:
    """Causal prompts, and new tokens after cached documents; one segment beside 33."""
    listed = [
        Case(f"prefill {n}", "prefill", prefill(n), rivals=(FA3, SDPA), bar=True)
        for n in (1024, 2048, 4096, 8192, 16384, 32768)
    ]
    for n in (64, 16, 256, 1024):
        one = f"prefill {n} over 1x91424"
        contiguous = prefill(n, 32, contiguous=True)
        listed.append(Case(one, "prefill", contiguous, rivals=(FA3,), bar=n == 64))
        listed.append(
            Case(f"prefill {n} over 32x2857", "prefill", prefill(n, 32), against=one, bar=n in (64, 1024))
        )
    return listed


def other_cases() -> list[Case]:
    """Shapes, fan-out, numbers of segments, and the plain decode matrix."""
    listed = []
    for heads in (LLAMA_70B_TP8, QWEN_MOE, HEAD_64):
        for name in ("decode 32x8192", "decode 8x1024"):
            listed.append(
                Case(f"{name} {heads.name}", "shapes", decode(BARE[name]), heads=heads, rivals=PAGED)
            )
        listed.append(Case(f"prefill 8192 {heads.name}", "shapes", prefill(8192), heads=heads, rivals=(FA3,)))
    for count in (1, 8, 33, 128):
        against = None if count == 1 else "segments 1"
        listed.append(Case(f"segments {count}", "segments", segments(count), against=against))
    for shared in (8192, 32768, 2048):
        for readers in (1, 2, 4, 8, 16, 32, 64):
            rivals = (*PAGED, CASCADE) if readers in (8, 32) else ()
            name = f"fan-out {readers} of {shared}"
            listed.append(Case(name, "fanout", fan_out(readers, shared), rivals=rivals))
    for batch in (1, 8, 32, 128):
        for length in (1024, 4096, 32768, 91424):
            if f"decode {batch}x{length}" not in BARE and batch * length <= 128 * 32768:
                build = decode([length] * batch)
                listed.append(Case(f"decode {batch}x{length}", "matrix", build, rivals=PAGED))
    return listed


def graph(name: str) -> Callable[[int], SegmentTable]:
    """One of the package's graph cases: the same batches as its planner's tests."""
    return lambda page_size: graph_case(name, page_size=page_size, own=OWN).to_segments()


def graph_cases() -> list[Case]:
    """The five graph cases; the control paths and the ablation run on the one that shares across orders."""
    listed = []
    for name in GRAPHS:
        rivals = (*PAGED, CASCADE) if name in TREES else PAGED
        listed.append(Case(name, "graph", graph(name), rivals=rivals, controls=name == "own-order", bar=True))
    return listed


GRAPHS = ("own-order", "same-order", "subsets", "judges", "artifacts")
TREES = ("same-order", "judges", "artifacts")
GROUPS = ("checks", "graph", "decode", "prefill", "data", "shapes", "segments", "fanout", "matrix")


def matrix(wanted: Sequence[str] = ()) -> list[Case]:
    """The cases of the groups or with the names in `wanted` (all by default), those that a bar reads first.

    Raises: ValueError for a name that is neither.
    """
    everything = [*graph_cases(), *decode_cases(), *prefill_cases(), *other_cases()]
    known = {case.name for case in everything} | set(GROUPS)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"no case or group is called {', '.join(unknown)}; groups: {', '.join(GROUPS)}")
    chosen = [c for c in everything if not wanted or c.name in wanted or c.group in wanted]
    return [*(c for c in chosen if c.bar), *(c for c in chosen if not c.bar)]
