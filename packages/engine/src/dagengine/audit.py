"""Audit: does the order that a query declares free really mean nothing to this model?

The planned query runs once as it is, once more unchanged (the control), and then with the children of every + in other
orders, each call with the same seed wherever it stands. Beside that, every call runs once more over a plain prompt:
what it sees, in order, encoded again as one text in which each part sees those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any

from dagengine_core_graph import Artifact
from dagengine_core_graph.query import Generate, Plus, Query, join_path, lower

from .encoded_queries import EncodedQuery, encode_lowered
from .errors import DagError
from .held import HeldParams
from .inputs import new_request_id
from .queries import QueryOptions
from .query_results import outcome_of
from .query_run import run_queries
from .request import Choice, Request
from .sampling import SamplingParams, seed_after

if TYPE_CHECKING:
    from .llm import LLM

MOST_TRIES = 20


@dataclass(frozen=True)
class Change:
    """An answer that differs from the one of the query as it is.

    Attributes:
        run: number of the permutation, from 1; 0 is the control or the plain prompt.
        first_difference: offset of the first sampled token that differs.
    """

    run: int
    text: str
    first_difference: int


@dataclass(frozen=True)
class AuditedCall:
    """One call.

    Attributes:
        path: in the planned query.
        agreement: the part of the permutations under which it answers the same; 1 where there are none.
        changes: what it answered under the others.
        control: what it answered when nothing was changed, if that differs.
        plain: what it answers to the plain prompt, if that differs.
    """

    path: str
    text: str
    agreement: float
    changes: tuple[Change, ...]
    control: Change | None
    plain: Change | None


@dataclass(frozen=True)
class AuditReport:
    """What became of every call.

    Attributes:
        runs: different permutations that were run; fewer than were asked for where there are no more.
        answers: paths of the calls whose answers the result holds.
        batch_invariant: whether the engine promises the same bits in any batch; otherwise see the control.
    """

    runs: int
    calls: tuple[AuditedCall, ...]
    answers: tuple[str, ...]
    batch_invariant: bool

    @property
    def agreement(self) -> float:
        """The smallest agreement of an answer of the result; 1 without answers."""
        return min((call.agreement for call in self.calls if call.path in self.answers), default=1.0)

    @property
    def plain_agreement(self) -> float:
        """The part of the calls that answer a plain prompt the same."""
        return sum(call.plain is None for call in self.calls) / len(self.calls) if self.calls else 1.0

    def data(self) -> dict[str, Any]:
        """JSON."""
        return {
            "runs": self.runs,
            "agreement": self.agreement,
            "plain_agreement": self.plain_agreement,
            "batch_invariant": self.batch_invariant,
            "answers": list(self.answers),
            "calls": [asdict(call) for call in self.calls],
        }


def audit(
    llm: LLM,
    query: Query,
    *,
    runs: int = 8,
    seed: int = 0,
    on_run: Callable[[int, int], None] | None = None,
    **options: Any,
) -> AuditReport:
    """Audit a query.

    Args:
        runs: permutations to try.
        seed: of the permutations, and of calls that name none.
        on_run: called with the number of runs done, and of all.
        options: as of `LLM.query`, but for `seed` and `keep`.

    Raises:
        DagError: what `LLM.query` raises; `invalid_request` for `runs` below 1 or no seed.
    """
    if isinstance(runs, bool) or not isinstance(runs, int) or runs < 1:
        raise DagError("invalid_request", f"runs is an integer from 1, not {runs!r}", "runs")
    if seed is None:
        raise DagError("invalid_request", "an audit needs a seed: its runs are compared", "seed")
    first, settings = llm.query_call(query, seed=seed, keep=False, **options)
    if any(isinstance(node.generate, HeldParams) for node in first.lowered.nodes):
        raise DagError("unsupported", "answers of another query cannot be asked for again", "query")
    seeds = _seeds(first, seed)
    variants = _permutations(first.planned.query, runs, seed)
    total, done = len(variants) + 2, 0
    found: list[dict[str, Choice]] = []
    for variant, origin in [(first.planned.query, None), (first.planned.query, None), *variants]:
        found.append(_run(llm, first, variant, origin, seeds, settings))
        done += 1
        if on_run is not None:
            on_run(done, total)
    base, control, *others = found
    plain = _run_plain(llm, first, seeds, settings)
    facts = llm.engine.ask(lambda core: core.facts)
    calls = []
    for path, choice in base.items():
        changes = [_change(number, choice, other[path]) for number, other in enumerate(others, 1)]
        changed = tuple(change for change in changes if change is not None)
        agreement = 1 - len(changed) / len(others) if others else 1.0
        calls.append(
            AuditedCall(
                path,
                choice.text,
                agreement,
                changed,
                _change(0, choice, control[path]),
                _change(0, choice, plain[path]),
            )
        )
    paths = {node.id: node.path for node in first.lowered.nodes}
    answers = tuple(paths[answer] for answer in first.answers)
    return AuditReport(len(others), tuple(calls), answers, facts["batch_invariant"] is True)


def permuted(query: Query, rng: Random, old: str = "", new: str = "") -> tuple[Query, dict[str, str]]:
    """A planned query with the children of every + in another order, and per path of a call there its path here."""
    children = list(enumerate(query.subqueries))
    if isinstance(query, Plus):
        rng.shuffle(children)
    origin = {join_path(new, "g"): join_path(old, "g")} if isinstance(query, Generate) else {}
    moved = []
    for place, (index, child) in enumerate(children):
        found, below = permuted(
            child, rng, join_path(old, query.step(index)), join_path(new, query.step(place))
        )
        moved.append(found)
        origin |= below
    return (query.with_subqueries(tuple(moved)) if moved else query), origin


def _permutations(query: Query, runs: int, seed: int) -> list[tuple[Query, dict[str, str]]]:
    """Up to so many different ones, none of them the query itself."""
    rng, known = Random(seed), {query}
    found: list[tuple[Query, dict[str, str]]] = []
    for _ in range(MOST_TRIES * runs):
        if len(found) == runs:
            break
        variant, origin = permuted(query, rng)
        if variant not in known:
            known.add(variant)
            found.append((variant, origin))
    return found


def _seeds(query: EncodedQuery, seed: int) -> dict[str, int]:
    """The seed of each call, by its path: the one that the query run with `seed` gives it."""
    seeds = {}
    for node in query.lowered.nodes:
        if node.generate is not None:
            named = node.generate.options.get("seed")
            seeds[node.path] = seed_after(named if isinstance(named, int) else seed, node.sample)
    return seeds


def _run(
    llm: LLM,
    first: EncodedQuery,
    variant: Query,
    origin: Mapping[str, str] | None,
    seeds: Mapping[str, int],
    options: QueryOptions,
) -> dict[str, Choice]:
    """Every call's answer, by its path in the query as it is."""
    planned = replace(first.planned, query=variant)
    encoded = first if origin is None else encode_lowered(planned, lower(planned), llm.prompts)
    paths = {
        node.id: node.path if origin is None else origin[node.path]
        for node in encoded.lowered.nodes
        if node.generate is not None
    }
    job, found, facts = run_queries(
        llm, [encoded], options, seeds=[{node: seeds[path] for node, path in paths.items()}]
    )
    outcome = outcome_of(job, 0, found, facts)
    return {paths[node]: choice for node, choice in outcome.calls.items()}


def _run_plain(
    llm: LLM, query: EncodedQuery, seeds: Mapping[str, int], options: QueryOptions
) -> dict[str, Choice]:
    """Every call over one plain prompt, nested ones first."""
    seen: dict[str, tuple[int, ...]] = {}
    turns: dict[str, tuple[int, ...]] = {}
    answers: dict[str, Choice] = {}
    for node in query.lowered.nodes:
        own = query.prompts[node.id]
        before: tuple[int, ...] = ()
        for ref in node.context:
            name = str(ref.node)
            before += turns[name] if isinstance(ref, Artifact) else seen[name]
        whole = before + own.input_ids
        seen[node.id] = whole
        if node.generate is None:
            continue
        sampling = SamplingParams.from_mapping({**(node.sampling(None) or {}), "seed": seeds[node.path]})
        request = Request(
            new_request_id(),
            whole,
            sampling,
            backend=options.backend,
            position=options.position,
            most_tokens=options.max_tokens,
        )
        event = llm.run([request])[0]
        if event.error is not None:
            raise DagError(event.error.code, event.error.message, node.path)
        choice = event.choices[0]
        answers[node.path] = choice
        if own.turn_start is None:
            turns[node.id] = choice.token_ids
        else:
            turns[node.id] = own.input_ids[own.turn_start :] + _sampled(choice)
    return answers


def _sampled(choice: Choice) -> tuple[int, ...]:
    output: Any = choice.dag.record["output"]
    return tuple(output["token_ids"])


def _change(run: int, expected: Choice, found: Choice) -> Change | None:
    a, b = _sampled(expected), _sampled(found)
    if a == b:
        return None
    return Change(run, found.text, _first_difference(a, b))


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((offset for offset, (x, y) in pairs if x != y), min(len(a), len(b)))
