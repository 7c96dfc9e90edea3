"""Replay: what records say was done, done again and compared. Equal in batch-invariant mode, token by token.

Records of plain requests and of graph nodes name what they read, states and requests, and those records must be beside
them: together they are run as one graph. The record of a query is whole by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagengine_core_graph.query import FORMAT as QUERY_FORMAT
from dagengine_core_graph.query import load_query

from .encoded_queries import encode_query
from .errors import DagError, as_dag_error, shown
from .inputs import new_request_id
from .queries import QueryOptions
from .query_run import run_queries
from .records import FORMAT
from .request import Choice, ContextRef, FinishedEvent, Request
from .sampling import SamplingParams, seed_after
from .sequence import SEED_STRIDE

if TYPE_CHECKING:
    from .llm import LLM

CIRCUMSTANCES = ("batch_invariant", "device", "page_size", "versions")
DECIDING = ("device", "versions", "implementation")

# What replaying reads of a record, and the types of its JSON there; `inputs` may be absent.
INTEGER, TEXT, OBJECT, LIST, NULL = "an integer", "a text", "an object", "a list", "null"
ALL = {"signature": (OBJECT,), "policy": (TEXT,), "backend": (TEXT, NULL)}
PLAIN = {"id": (TEXT,), "index": (INTEGER,), "seed": (INTEGER, NULL), "output": (OBJECT,)}
INPUTS = {
    "input_ids": (LIST,),
    "turn_start": (INTEGER, NULL),
    "context": (LIST,),
    "position_options": (OBJECT,),
    "sampling": (OBJECT, NULL),
    "most_tokens": (INTEGER, NULL),
}
QUERY = {"query": (OBJECT, NULL), "max_tokens": (INTEGER,), "input_digest": (TEXT,), "calls": (LIST,)}
CALL = {"node": (TEXT,), "path": (TEXT,), "seed": (INTEGER, NULL), "output": (OBJECT,)}
OUTPUT = {"token_ids": (LIST,), "finish_reason": (TEXT,)}


@dataclass(frozen=True)
class Replayed:
    """One answer, again.

    Attributes:
        name: of the request, or of the call in a query by its path.
        expected, found: sampled token ids, the terminating one included.
    """

    name: str
    index: int
    expected: tuple[int, ...]
    found: tuple[int, ...]
    expected_reason: str
    found_reason: str

    @property
    def equal(self) -> bool:
        return self.expected == self.found and self.expected_reason == self.found_reason

    @property
    def first_difference(self) -> int | None:
        """The offset of the first token that differs; None where none does."""
        if self.expected == self.found:
            return None
        pairs = zip(self.expected, self.found, strict=False)
        shorter = min(len(self.expected), len(self.found))
        return next((offset for offset, (a, b) in enumerate(pairs) if a != b), shorter)


@dataclass(frozen=True)
class ReplayReport:
    """Attributes:
    exact: whether equality was promised: both runs in batch-invariant mode, on the same device, with the same versions
        and the same implementation of attention.
    differences: circumstances that are not those of the records, as "name: then, now".
    """

    answers: tuple[Replayed, ...]
    exact: bool
    differences: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return all(answer.equal for answer in self.answers)


def find_records(value: Any) -> list[dict[str, Any]]:
    """The records in JSON values: records themselves, answers that have them in `dag`, or lists of either.

    Raises:
        DagError: `invalid_request` where there is none.
    """
    found = list(_records(value))
    if not found:
        raise DagError("invalid_request", f"there is no {FORMAT} in this", "record")
    return found


def replay(llm: LLM, records: Sequence[Mapping[str, Any]]) -> ReplayReport:
    """Run records again.

    Raises:
        DagError: `invalid_request` for what is no record, `signature_mismatch` for another model's, `state_not_found`
            where the record of something that is read is missing, and what a request ends with.
    """
    facts = llm.engine.ask(lambda core: core.facts)
    differences: dict[str, None] = {}
    exact = True
    for place, record in enumerate(records):
        _check_shape(record, f"records[{place}]")
        for note in _compared(record, facts, f"records[{place}]"):
            differences[note] = None
        exact &= record["batch_invariant"] is True and facts["batch_invariant"] is True
    plain = [record for record in records if record.get("kind") != "query"]
    answers = _replay_requests(llm, plain, differences) if plain else []
    for place, record in enumerate(records):
        if record.get("kind") == "query":
            answers += _replay_query(llm, record, f"records[{place}]", differences)
    exact &= not any(note.partition(":")[0] in DECIDING for note in differences)
    return ReplayReport(tuple(answers), exact, tuple(differences))


def _records(value: Any) -> Iterable[dict[str, Any]]:
    if isinstance(value, list):
        for item in value:
            yield from _records(item)
    elif isinstance(value, dict):
        if value.get("format") == FORMAT:
            yield value
            return
        dag = value.get("dag")
        if isinstance(dag, dict) and "record" in dag:
            yield from _records(dag["record"])
        elif "record" in value:
            yield from _records(value["record"])
        for name in ("choices", "nodes"):
            if isinstance(value.get(name), list):
                yield from _records(value[name])


def _check_shape(record: object, path: str) -> None:
    """Refuse what replaying could not read. Raises DagError `invalid_request`."""
    found = _members(record, path, {})
    if found.get("format") != FORMAT:
        raise DagError("invalid_request", f"this is no {FORMAT}", path)
    if found.get("kind") == "query":
        _members(found, path, {**ALL, **QUERY})
        for index, call in enumerate(found["calls"]):
            here = f"{path}.calls[{index}]"
            _members(_members(call, here, CALL)["output"], f"{here}.output", OUTPUT)
        return
    _members(_members(found, path, {**ALL, **PLAIN})["output"], f"{path}.output", OUTPUT)
    if found.get("inputs") is None:
        return
    for index, ref in enumerate(_members(found["inputs"], f"{path}.inputs", INPUTS)["context"]):
        here = f"{path}.inputs.context[{index}]"
        _members(ref, here, {"state" if "state" in _members(ref, here, {}) else "request": (TEXT,)})


def _members(value: object, path: str, wanted: Mapping[str, Sequence[str]]) -> Mapping[str, Any]:
    """The object, which has these members of these types."""
    if not isinstance(value, Mapping):
        raise DagError("invalid_request", f"an object is needed, not {shown(value)}", path)
    for name, rules in wanted.items():
        if name not in value:
            raise DagError("invalid_request", f"{' or '.join(rules)} is missing", f"{path}.{name}")
        if _json_type(value[name]) not in rules:
            message = f"{' or '.join(rules)} is needed, not {shown(value[name])}"
            raise DagError("invalid_request", message, f"{path}.{name}")
    return value


def _json_type(value: object) -> str | None:
    if value is None:
        return NULL
    if isinstance(value, int) and not isinstance(value, bool):
        return INTEGER
    kinds = ((str, TEXT), (Mapping, OBJECT), (list | tuple, LIST))
    return next((name for kind, name in kinds if isinstance(value, kind)), None)


def _compared(record: Mapping[str, Any], facts: Mapping[str, object], path: str) -> list[str]:
    """Circumstances that differ. Raises DagError `signature_mismatch`."""
    missing = [name for name in ("signature", *CIRCUMSTANCES) if name not in record]
    if record.get("format") != FORMAT or missing:
        raise DagError("invalid_request", f"this is no {FORMAT}", path)
    known = facts["signature"]
    assert isinstance(known, Mapping)
    for name, value in known.items():
        if dict(record["signature"]).get(name) != value:
            then = shown(dict(record["signature"]).get(name))
            message = f"{name} was {then} and is {value!r}: another model, or loaded otherwise"
            raise DagError("signature_mismatch", message, f"{path}.signature.{name}")
    return [f"{name}: {record[name]}, {facts[name]}" for name in CIRCUMSTANCES if record[name] != facts[name]]


def _compare_implementation(record: Mapping[str, Any], found: Choice, differences: dict[str, None]) -> None:
    """Note where attention is computed by other code than the record says."""
    then, now = record.get("implementation"), found.dag.record["implementation"]
    if then != now:
        differences[f"implementation: {then}, {now}"] = None


def _replay_requests(
    llm: LLM, records: Sequence[Mapping[str, Any]], differences: dict[str, None]
) -> list[Replayed]:
    """Plain records as one graph. Notes in `differences` what else computed them."""
    submission = new_request_id()
    by_state = {record["state"]: place for place, record in enumerate(records) if record.get("state")}
    by_id = {record["id"]: place for place, record in enumerate(records)}
    requests: dict[int, Request] = {}

    def parent(ref: Mapping[str, Any], path: str) -> int:
        named = by_state.get(ref["state"]) if "state" in ref else by_id.get(ref.get("request"))
        if named is None:
            missing = ref.get("state", ref.get("request"))
            message = f"it reads {missing}, whose record is not here; give that too"
            raise DagError("state_not_found", message, path)
        return named

    waiting = list(enumerate(records))
    while waiting:
        left = []
        for place, record in waiting:
            path = f"records[{place}].inputs"
            inputs = record.get("inputs")
            if not isinstance(inputs, Mapping):
                raise DagError("invalid_request", "a record without inputs cannot be run again", path)
            parents = [parent(ref, f"{path}.context[{index}]") for index, ref in enumerate(inputs["context"])]
            if all(named in requests for named in parents):
                ids = [f"{submission}:{named}" for named in parents]
                requests[place] = _request(f"{submission}:{place}", record, inputs, ids)
            else:
                left.append((place, record))
        if len(left) == len(waiting):
            raise DagError("cycle", "these records read each other", f"records[{left[0][0]}]")
        waiting = left
    ordered = list(requests)
    events = llm.run([requests[place] for place in ordered])
    found = dict(zip(ordered, events, strict=True))
    answers = []
    for place, record in enumerate(records):
        choice = _choice(found[place])
        _compare_implementation(record, choice, differences)
        answers.append(_answer(record["id"], record["index"], record["output"], choice))
    return answers


def _request(
    request_id: str, record: Mapping[str, Any], inputs: Mapping[str, Any], parents: Sequence[str]
) -> Request:
    sampling = None
    if inputs["sampling"] is not None:
        options = {name: value for name, value in inputs["sampling"].items() if name != "n"}
        if record["seed"] is not None:
            options["seed"] = seed_after(record["seed"], record["index"] * SEED_STRIDE)
        sampling = SamplingParams.from_mapping(options)
    context = tuple(
        ContextRef(
            request=parent,
            mode=ref.get("mode", "inherit"),
            span=tuple(ref["span"]) if isinstance(ref.get("span"), list) else ref.get("span"),
            at=ref.get("at"),
            start=ref.get("start"),
        )
        for ref, parent in zip(inputs["context"], parents, strict=True)
    )
    return Request(
        id=request_id,
        input_ids=tuple(inputs["input_ids"]),
        sampling=sampling,
        context=context,
        position=record["policy"],
        position_options=inputs["position_options"],
        backend=record["backend"],
        turn_start=inputs["turn_start"],
        most_tokens=inputs["most_tokens"],
    )


def _replay_query(
    llm: LLM, record: Mapping[str, Any], path: str, differences: dict[str, None]
) -> list[Replayed]:
    if record["query"] is None:
        message = "this query read answers that an earlier one left; they are not in its record"
        raise DagError("invalid_request", message, f"{path}.query")
    try:
        query = load_query({"format": QUERY_FORMAT, "query": record["query"]})
    except Exception as error:
        raise as_dag_error(error) from None
    encoded = encode_query(query, llm.prompts)
    seeds = {call["node"]: call["seed"] for call in record["calls"] if call["seed"] is not None}
    options = QueryOptions(
        position=record["policy"],
        backend=record["backend"],
        max_tokens=record["max_tokens"],
        fragment_ttl_s=llm.fragments.ttl_s,
    )
    job, found, _ = run_queries(llm, [encoded], options, seeds=[seeds])
    if job.queries[0].input_digest != record["input_digest"]:
        message = "its messages are other tokens here: another tokenizer, or another chat template"
        raise DagError("signature_mismatch", message, f"{path}.input_digest")
    for index, call in enumerate(record["calls"]):
        if call["node"] not in job.places[0]:
            message = f"the query has no node {shown(call['node'])}"
            raise DagError("invalid_request", message, f"{path}.calls[{index}].node")
    answers = []
    for call in record["calls"]:
        choice = _choice(found[job.places[0][call["node"]]])
        _compare_implementation(record, choice, differences)
        answers.append(_answer(call["path"], 0, call["output"], choice))
    return answers


def _choice(event: FinishedEvent) -> Choice:
    if event.error is not None:
        raise event.error
    return event.choices[0]


def _answer(name: str, index: int, expected: Mapping[str, Any], found: Choice) -> Replayed:
    output: Any = found.dag.record["output"]
    return Replayed(
        name,
        index,
        tuple(expected["token_ids"]),
        tuple(output["token_ids"]),
        expected["finish_reason"],
        output["finish_reason"],
    )
