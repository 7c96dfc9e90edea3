"""`dagengine bench bulk`: many questions over short fragments, as bulks of span queries, beside plain prefix caching.

The engine is driven directly, through `LLM.query_bulk`: HTTP has no call for bulks. Questions and fragments are random
words of exact lengths over a generated overlap (`overlap`), or a user's own evidence (`evidence`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..console import CommandError, say
from . import arguments
from .arguments import POOL, Common
from .evidence import read_evidence
from .overlap import OVERLAPS, Workload, neighbours
from .publish import publish
from .record import Figure, circumstances, command_line
from .texts import Texts

if TYPE_CHECKING:
    from dagengine.tokenizer import Tokenizer

ALL = "all"
BULKS = ("1", "1024", ALL)
QUERIES, WIDTH, LENGTH, QUESTION = 2048, 10, 100, 32
SYSTEM, SHARE = 16, 0.25


def bulk(
    common: Common,
    fragment_overlap: Annotated[
        list[float] | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="part of reads that read again, repeatable  [default: 0, 0.12, 0.37, 0.6, 0.9]",
        ),
    ] = None,
    bulk: Annotated[
        list[str] | None,
        typer.Option(metavar="{N,all}", help="queries given at once, repeatable  [default: 1, 1024, all]"),
    ] = None,
    queries: Annotated[int | None, typer.Option(min=2, help="in all  [default: 2048]")] = None,
    fragments: Annotated[int | None, typer.Option(min=1, help="that a query reads  [default: 10]")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="of each fragment  [default: 100]")] = None,
    question: Annotated[
        int | None, typer.Option(min=1, help="own tokens of a query, with its marks  [default: 32]")
    ] = None,
    evidence: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            dir_okay=False,
            help="questions with the fragments they read, in place of made ones",
        ),
    ] = None,
    answer: Annotated[int, typer.Option(min=1, help="tokens of an answer")] = 1,
    window: Annotated[
        int, typer.Option(min=1, help="most plain prompts at once, and most queries of a window")
    ] = 64,
    pool_share: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="part of all reads that the pool holds, unless its size is given  [default: 0.25]"
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="of each bulk, both ways")] = 1,
) -> None:
    """Bulks of span queries over short fragments that they share, against plain prompts with prefix caching."""
    from dagengine.model_files import find_model
    from dagengine.shapes import shape_config
    from dagengine.tokenizer import Tokenizer

    from .bulk_runs import BARS, BulkRuns
    from .probe import Probe
    from .words import write_tokenizer

    made = {
        "fragment_overlap": fragment_overlap,
        "queries": queries,
        "fragments": fragments,
        "tokens": tokens,
        "question": question,
    }
    given = None if evidence is None else _evidence(common, evidence, made)
    if pool_share is not None and any(name in common.given for name in POOL):
        raise CommandError("the pool's size is given; leave it out", "pool_share")
    if pool_share is not None and not isfinite(pool_share):
        raise CommandError(f"a number, not {pool_share}", "pool_share")
    total = len(given.questions) if given is not None else queries or QUERIES
    bulks = _bulks(bulk, total)
    say(str(common.threads))
    where = circumstances(command_line("bulk"), common.threads.count)
    figures: list[Figure] = []
    with common.folder() as model:
        if common.shape is not None:
            write_tokenizer(Path(model), shape_config(common.shape))
        tokenizer = Tokenizer(find_model(model))

        def count(text: str) -> int:
            return len(tokenizer.encode(text, add_special_tokens=False))

        def count_chat(messages: Sequence[Mapping[str, str]], *, generate: bool) -> int:
            return len(tokenizer.chat(messages, generate=generate, has_context=False).input_ids)

        texts = Texts(count, count_chat, common.seed)
        before = texts.text(SYSTEM)
        sizes = _Sizes(total, fragments or WIDTH, tokens or LENGTH, question or QUESTION)
        workloads = [given] if given is not None else [
            sizes.workload(texts, part, common.seed) for part in fragment_overlap or OVERLAPS
        ]  # fmt: skip
        room = max(
            _room(
                workload,
                tokenizer,
                before,
                common.page_size,
                SHARE if pool_share is None else pool_share,
                window,
            )
            for workload in workloads
        )
        say(f"loading {common.label}")
        engine = common.engine(tokens=room + window * answer, sequences=window)
        with Probe(model, seed=common.seed, options=engine, text=True) as probe:
            for workload in workloads:
                runs = BulkRuns(probe.llm, workload, before, window=window, answer=answer, seed=common.seed)
                runs.warm_up()
                for size in bulks:
                    says = sizes.says(workload.made_with) if given is None else f"evidence {evidence.name}"
                    say(f"measuring {says}, bulk {size}")
                    case = f"{common.label}, {says}, bulk {size}, {total} questions, {window} at once, in process"
                    figures += runs.measure(case, size, repeats)
            device = probe.device
    publish("bulk", figures, where.on(*device), common.destination, BARS)


command = arguments.command(bulk)


@dataclass(frozen=True)
class _Sizes:
    """Of a made workload: questions, fragments of each, tokens of a fragment and of a question."""

    questions: int
    width: int
    length: int
    question: int

    def workload(self, texts: Texts, overlap: float, seed: int) -> Workload:
        reads = neighbours(self.questions, self.width, overlap, seed)
        distinct = 1 + max(index for found in reads for index in found)
        return Workload(
            [texts.text(self.length) for _ in range(distinct)],
            [texts.question(self.question) for _ in range(self.questions)],
            reads,
            overlap,
        )

    def says(self, overlap: float | None) -> str:
        return f"{self.width} fragments x {self.length}, question {self.question}, overlap {overlap:g}"


def _evidence(common: Common, path: Path, made: Mapping[str, object]) -> Workload:
    """Raises CommandError for options of made workloads beside it, and for a shape, whose words are its own."""
    for name, value in made.items():
        if value is not None:
            raise CommandError("the evidence says that; leave it out", name)
    if common.shape is not None:
        raise CommandError(
            "a shape knows no words of other texts; give a model with its tokenizer", "evidence"
        )
    return read_evidence(path)


def _bulks(given: Sequence[str] | None, total: int) -> list[str]:
    """The sizes as they were given, each once; by default those below the number of queries, and all."""
    if given is None:
        return [size for size in BULKS if size == ALL or int(size) < total]
    for size in given:
        if size != ALL and not (size.isdecimal() and 0 < int(size) < total):
            raise CommandError(
                f"{ALL}, or a number from 1 below that of queries, {total}; not {size!r}", "bulk"
            )
    return list(dict.fromkeys(given))


def _room(workload: Workload, tokenizer: Tokenizer, before: str, page: int, share: float, window: int) -> int:
    """Tokens of the pool: the share of all reads as fragments, or a window of whole prompts if that is more."""

    def ids(*texts: str) -> tuple[int, ...]:
        messages = [{"role": "user", "content": text} for text in texts]
        return tokenizer.chat(messages, generate=False, has_context=True).input_ids

    encoded = [ids(text) for text in workload.fragments]
    if len(set(encoded)) < len(encoded):
        raise CommandError("to this model's tokenizer different fragments are the same tokens", "evidence")
    pages = [-(-len(found) // page) for found in encoded]
    reads = [sum(pages[index] for index in found) for found in workload.reads]
    widest = max(range(len(reads)), key=lambda index: reads[index])
    texts = (before, *(workload.fragments[index] for index in workload.reads[widest]))
    longest = len(ids(*texts, workload.questions[widest]))
    return max(round(share * sum(reads)) * page, window * (max(reads) + -(-longest // page) + 1) * page)
