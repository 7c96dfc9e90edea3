"""A deterministic run of the real engine against the oracle: one seed makes every choice, time is a counter.

Between steps requests are submitted, singly and as graphs, and aborted; states are named, forked, released,
pinned, expired and evicted; some steps fail. After every step the store counts everything again. What an
answer or a refusal has to be is the oracle's to say.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from fake_host import CoinCosts, Host
from oracle import Oracle, OracleNode, View, reference_cut
from scripted_model import VOCAB, scripted_core

from dagengine import ContextRef, DagError, Keep, SamplingParams
from dagengine.core import EngineCore
from dagengine.pipeline import Flight
from dagengine.request import Choice, Event, FinishedEvent, Request, TokenEvent
from dagengine.runner import Chunk
from dagengine_kvstore import KVStoreError
from dagengine_kvstore.fake_transfer import FakeTransfer
from dagengine_kvstore.torch_arena import TorchArena

MAX_IDLE_STEPS = 6
MAX_STEPS_WITHOUT_END = 800
STOPS = 300


class Mismatch(AssertionError):
    """The engine did something that the definition does not allow."""


@dataclass(eq=False)
class Handle:
    """A state id of ours: the oracle's node, how many of its tokens it shows, and until when."""

    id: str
    node: OracleNode
    at: int
    salt: str
    expires: float | None = None
    pinned: bool = False


@dataclass(eq=False)
class Pending:
    """A request that was accepted and has not ended.

    Attributes:
        parents: per reference the oracle's node, or the id of another request of the submission.
        ats: per reference where the handle cuts its node.
        tokens: token ids reported so far, by answer.
    """

    request: Request
    parents: list[OracleNode | str]
    ats: list[int | None]
    group: dict[str, Pending] | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    node: OracleNode | None = None
    failed: bool = False
    aborted: bool = False


@dataclass(frozen=True)
class Settings:
    """One engine. The pools that `draw` makes hold from barely one request to many."""

    page_size: int
    pages: int
    max_num_batched_tokens: int
    max_num_seqs: int
    host: Host | None = None
    eviction: str = "lru"

    @classmethod
    def draw(cls, rng: random.Random) -> Settings:
        page_size = rng.choice((1, 3, 16))
        tight = {1: rng.randint(30, 70), 3: rng.randint(14, 26), 16: rng.randint(5, 9)}[page_size]
        return cls(
            page_size=page_size,
            pages=tight if rng.random() < 0.7 else tight * rng.choice((2, 5)),
            max_num_batched_tokens=rng.choice((2, 5, 16, 64)),
            max_num_seqs=rng.choice((1, 2, 4, 8)),
        )


def draw_host(settings: Settings, seed: int) -> Settings:
    """The same with a host tier that is late, and in some worlds fails, loses, refuses and reports twice."""
    rng = random.Random(seed)
    faults = {name: rng.choice((0.0, 0.05, 0.3)) for name in ("fail", "duplicate", "refuse")}
    if rng.random() < 0.3:
        faults["lose"] = 0.05
    if rng.random() < 0.5:
        faults = {}
    host = Host(settings.pages * rng.choice((1, 4, 4, 8)) // rng.choice((1, 3)) or 1, **faults)
    return replace(settings, host=host, eviction=rng.choice(("lru", "next_use")))


class World:
    """One engine and the graphs that run through it.

    Args:
        seed: of every choice.
        settings: of the engine; None draws them.
        mode: how steps follow each other, see `scripted_model.MODES`; None is what the running test says.
    """

    def __init__(self, seed: int, settings: Settings | None = None, mode: str | None = None) -> None:
        self.rng, self._seed = random.Random(seed), seed
        self.settings = settings or Settings.draw(self.rng)
        self.now = 0.0
        self.expected_errors: frozenset[str] = frozenset()
        self.counts: Counter[str] = Counter()
        s = self.settings
        self.core: EngineCore = scripted_core(
            pages=s.pages,
            page_size=s.page_size,
            clock=lambda: self.now,
            mode=mode,
            max_num_batched_tokens=s.max_num_batched_tokens,
            max_num_seqs=s.max_num_seqs,
            seed=seed,
            eviction=s.eviction,
            transfer=s.host and self._make_transfer,
            costs=s.host and CoinCosts(),
        )
        self._count_joins()
        self._ids = 0
        self._stems = [[self.rng.randrange(VOCAB) for _ in range(30)] for _ in range(3)]
        self._fresh()

    def _count_joins(self) -> None:
        """Of what is launched, what runs in the step that completes what it reads."""
        launch = self.core._pipeline.launch

        def counted(chunks: Sequence[Chunk]) -> Flight:
            self.counts["joins"] += sum(chunk.joins for chunk in chunks)
            return launch(chunks)

        self.core._pipeline.launch = counted  # type: ignore[method-assign]

    def _fresh(self) -> None:
        self.oracle = Oracle(self.settings.page_size, self.settings.pages)
        self.ends: dict[str, FinishedEvent] = {}
        self.pending: dict[str, Pending] = {}
        self.handles: list[Handle] = []
        self._unchecked: list[Pending] = []
        self._idle = self._since_end = 0

    def run_graph(self) -> None:
        """Submit, disturb, finish and clean up one random graph. Raises Mismatch."""
        todo = self.rng.randint(6, 16)
        calm = self.rng.random() < 0.3
        while todo or self.core.has_work:
            if todo and (not self.core.has_work or self.rng.random() < 0.5):
                if self.rng.random() < 0.4:
                    todo -= self._submit_group(min(todo, self.rng.randint(2, 6)))
                else:
                    todo -= 1
                    self._submit_one()
            if not calm:
                self._disturb()
            self.step()
        self.clean_up()
        self.counts["graphs"] += 1

    def submit(self, *requests: Request, group: bool = False) -> None:
        """Submit one request, or several of one submission. Raises DagError as the engine does."""
        by_state = {handle.id: handle for handle in self.handles}
        accepted = []
        for request in requests:
            parents: list[OracleNode | str] = []
            ats: list[int | None] = []
            for ref in request.context:
                handle = by_state.get(ref.state or "")
                parents.append(handle.node if handle else str(ref.request))
                ats.append(reference_cut(ref, handle.at, len(handle.node.tokens)) if handle else ref.at)
            accepted.append(Pending(request, parents, ats))
        if group or len(requests) > 1:
            self.core.submit_group(requests)
        else:
            self.core.submit(requests[0])
        for pending in accepted:
            pending.group = {other.request.id: other for other in accepted}
        self._accept(accepted)

    def run(self, steps: int = MAX_STEPS_WITHOUT_END) -> None:
        """Step until nothing is left to do, at most so often."""
        while self.core.has_work and steps:
            self.step()
            steps -= 1

    def abort(self, request_id: str) -> bool:
        """Abort a request, whether or not it runs, and look at what follows."""
        if request_id in self.pending:
            self.pending[request_id].aborted = True
        ended = self.core.abort(request_id)
        self.core.store.check()
        for event in self.core.take_events():
            self._take(event)
        return ended

    def handle(self, request_id: str, index: int = 0) -> Handle:
        """The state that an answer became."""
        state = self.ends[request_id].choices[index].dag.state
        return next(handle for handle in self.handles if handle.id == state)

    def step(self) -> None:
        """One step of the engine, all its events, and the store's own audit."""
        events = self.core.step()
        self.core.store.check()
        self._check_pages()
        self._poison_free_pages()
        self._check_device()
        if self.core._pipeline.num_in_flight and not self.core.progressed:
            raise Mismatch("a step was launched, and is called no progress")
        self.counts["steps"] += 1
        moving = self.core.store.num_in_flight > 0
        self._idle = 0 if self.core.progressed or events or not self.core.has_work else self._idle + 1
        if self._idle and moving:
            self._idle -= 1
            self.now += 1.0
        self._since_end = 0 if not self.core.has_work else self._since_end + 1
        for event in events:
            self._take(event)
        if self._idle > MAX_IDLE_STEPS or self._since_end > MAX_STEPS_WITHOUT_END:
            raise Mismatch(
                f"no progress: {self._idle} idle steps, {self._since_end} without an end: {self._queues()}"
            )

    def _queues(self) -> str:
        return f"{self.core.num_running} running, {self.core.num_waiting} waiting, {self.core.store.stats()}"

    def _check_device(self) -> None:
        """Nothing fails on the device but what the test lets fail, also not in a row that nobody wants any more."""
        late = getattr(self.core, "late_device", None)
        for error in late.errors if late and not self.expected_errors else ():
            if error != "planted":
                raise Mismatch(f"a step failed on the device: {error}")

    def _check_pages(self) -> None:
        """Every page is in one place, in both tiers."""
        if self.settings.host is None:
            return
        s = self.core.store.stats()
        device = s.pages_free + s.pages_cached + s.pages_live + s.pages_waiting + s.pages_moving
        if device != s.pages_total or s.host_free + s.host_live + s.host_moving != s.host_total:
            raise Mismatch(f"pages do not add up: {s}")

    def _poison_free_pages(self) -> None:
        for start, length in self.core.store._books.pool._free._length.items():
            for layer in range(2):
                self.core._runner.arena.layer(layer)[start : start + length] = torch.nan

    # requests

    def _new_id(self, kind: str) -> str:
        self._ids += 1
        return f"{kind}{self._ids}"

    def _input(self) -> tuple[int, ...]:
        rng = self.rng
        if rng.random() < 0.6:
            stem = rng.choice(self._stems)[: rng.choice((1, 3, 7, 12, 18, 24))]
            return (*stem, *(rng.randrange(VOCAB) for _ in range(rng.choice((0, 0, 1, 4)))))
        return tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 9)))

    def _sampling(self, many: bool) -> SamplingParams | None:
        rng = self.rng
        if rng.random() < 0.25:
            return None
        return SamplingParams(
            max_tokens=rng.randint(1, 10),
            temperature=rng.choice((0.0, 1.0)) if not many else 1.0,
            n=rng.randint(2, 4) if many else 1,
            seed=rng.randrange(1000),
            stop_token_ids=tuple(range(begin := rng.randrange(VOCAB - STOPS), begin + STOPS)),
            min_tokens=0,
        )

    def _reference(self, mode: str, position: str, at: int, named: bool, **target: str) -> ContextRef:
        """A reference to a node of which at least `at` tokens exist; `named` spans of it exist too."""
        rng = self.rng
        cut = rng.randint(0, at) if rng.random() < 0.2 else None
        span: object = None
        if mode == "artifact":
            a = rng.randint(0, at)
            span = rng.choice(
                (None, "output", "prompt", "all", "turn" if named else "all", (a, rng.randint(a, at)))
            )
        start = rng.randint(0, 40) if position == "explicit" else None
        return ContextRef(mode=mode, span=span, at=cut, start=start, **target)  # type: ignore[arg-type]

    def _draw(self, kind: str, earlier: Sequence[Pending], many: bool, *, joins: bool = False) -> Pending:
        """A request; one that `joins` reads earlier ones only, if there are any, and mostly samples nothing."""
        rng = self.rng
        salt = earlier[0].request.salt if earlier else rng.choice(("", "", "", "tenant"))
        position = rng.choice(("linear", "linear", "native", "explicit"))
        whole = rng.choice(("inherit", "inherit", "digest"))
        refs: list[ContextRef] = []
        parents: list[OracleNode | str] = []
        ats: list[int | None] = []
        states = [handle for handle in self.handles if handle.salt == salt]
        for _ in range(rng.choice((1, 1, 2, 3) if joins else (0, 1, 1, 2, 2, 3, 5))):
            mode = "artifact" if rng.random() < 0.35 else whole
            if earlier and (joins or rng.random() < 0.6):
                parent = rng.choice(earlier)
                if parent.request.sampling is not None and parent.request.sampling.n > 1:
                    continue
                turn = parent.request.turn_start is not None
                at = len(parent.request.input_ids)
                refs.append(self._reference(mode, position, at, turn, request=parent.request.id))
                parents.append(parent.request.id)
                ats.append(refs[-1].at)
            elif states:
                handle = rng.choice(states)
                turn = self.oracle.graph.node(handle.node.name).spans.turn is not None
                refs.append(self._reference(mode, position, handle.at, turn, state=handle.id))
                parents.append(handle.node)
                ats.append(reference_cut(refs[-1], handle.at, len(handle.node.tokens)))
        ids = self._input()
        keep = None
        if rng.random() < 0.8:
            keep = Keep(ttl_s=rng.choice((None, None, 5.0, 40.0)), pin=rng.random() < 0.05)
        request = Request(
            id=self._new_id(kind),
            input_ids=ids,
            sampling=None if joins and rng.random() < 0.7 else self._sampling(many),
            context=tuple(refs),
            position=position,
            position_options={"own_start": rng.randint(80, 120)}
            if position == "explicit" and rng.random() < 0.2
            else {},
            keep=keep,
            salt=salt,
            priority=rng.choice((0, 0, 0, 1, -1)),
            turn_start=rng.randrange(len(ids)) if rng.random() < 0.3 else None,
        )
        return Pending(request, parents, ats)

    def _submit_one(self) -> None:
        pending = self._draw("r", (), self.rng.random() < 0.15)
        view = self._view(pending)
        refusal = self._state_refusal(pending) or self._position_refusal(pending, view)
        refusal = refusal or self.oracle.refusal(pending.request, view)
        try:
            self.core.submit(pending.request)
        except DagError as error:
            if error.code != refusal:
                raise Mismatch(
                    f"{pending.request} is refused: {error}; the definition says {refusal}"
                ) from None
            self.counts[f"refused {error.code}"] += 1
            return
        if refusal is not None:
            raise Mismatch(f"{pending.request} is accepted; the definition says {refusal}")
        self._accept([pending])

    def _submit_group(self, size: int) -> int:
        group: list[Pending] = []
        joins = self.rng.random() < 0.4
        for _ in range(size):
            group.append(self._draw("g", group, self.rng.random() < 0.05, joins=joins))
        refusal = next(filter(None, (self._state_refusal(pending) for pending in group)), None)
        try:
            self.core.submit_group([pending.request for pending in group])
        except DagError as error:
            if error.code != refusal:
                raise Mismatch(f"the group is refused: {error}; the definition says {refusal}") from None
            self.counts[f"refused {error.code}"] += 1
            return size
        if refusal is not None:
            raise Mismatch(f"the group is accepted; the definition says {refusal}")
        by_id = {pending.request.id: pending for pending in group}
        for pending in group:
            pending.group = by_id
        self.counts["groups"] += 1
        self._accept(group)
        return size

    def _accept(self, accepted: Sequence[Pending]) -> None:
        self.counts["requests"] += len(accepted)
        self.pending.update({pending.request.id: pending for pending in accepted})

    def _state_refusal(self, pending: Pending) -> str | None:
        by_id = {handle.id: handle for handle in self.handles}
        for ref in pending.request.context:
            if ref.state is not None and self._expired(by_id[ref.state]):
                return "state_released"
        return None

    def _expired(self, handle: Handle) -> bool:
        return handle.expires is not None and handle.expires <= self.now and not handle.pinned

    def _position_refusal(self, pending: Pending, view: View) -> str | None:
        least = max((position for _, _, position in view.shown), default=-1) + 1
        return "policy_unsupported" if view.own_start < least else None

    def _nodes(self, pending: Pending) -> list[OracleNode]:
        nodes = []
        for parent in pending.parents:
            node = parent if isinstance(parent, OracleNode) else (pending.group or {})[parent].node
            assert node is not None
            nodes.append(node)
        return nodes

    def _cuts(self, pending: Pending) -> list[int | None]:
        nodes = self._nodes(pending)
        return [
            at if at is not None and at < len(n.tokens) else None
            for at, n in zip(pending.ats, nodes, strict=True)
        ]

    def _view(self, pending: Pending) -> View:
        return self.oracle.view(pending.request, self._nodes(pending), self._cuts(pending))

    # disturbances

    def _disturb(self) -> None:
        rng = self.rng
        self.now += rng.choice((0.0, 0.0, 0.1, 1.0, 4.0)) if rng.random() < 0.3 else 0.0
        if self.pending and rng.random() < 0.04:
            victim = rng.choice(sorted(self.pending))
            if not self.abort(victim) or self.abort(victim):
                raise Mismatch(f"{victim} runs: it can be aborted, and only once")
            self.counts["aborts"] += 1
        if rng.random() < 0.01:
            self.core._backend(self.core.default_backend).fail_at = rng.randrange(2)
        self.handles = [handle for handle in self.handles if not self._expired(handle) or rng.random() < 0.5]
        live = [handle for handle in self.handles if not self._expired(handle)]
        if live and rng.random() < 0.15:
            self._release(rng.choice(live))
        if self.settings.host is not None:
            self._move()
        live = [handle for handle in self.handles if not self._expired(handle)]
        if live and rng.random() < 0.12:
            handle = rng.choice(live)
            at = rng.randint(0, handle.at)
            forked = self.core.fork(handle.id, at, salt=handle.salt)
            self.handles.append(Handle(forked, handle.node, at, handle.salt))
            self.counts["forks"] += 1
        if live and rng.random() < 0.4:
            for handle in rng.sample(live, min(len(live), rng.choice((1, 1, 3, 10)))):
                self._evict(handle)
            self.core.store.check()

    def _make_transfer(self, arena: TorchArena) -> FakeTransfer:
        assert self.settings.host is not None
        self.transfer = self.settings.host.transfer(arena, self._seed)
        return self.transfer

    def _move(self) -> None:
        """Offload, prefetch and drop from the host; now and then what was lost arrives after all."""
        rng = self.rng
        live = [handle for handle in self.handles if not self._expired(handle)]
        if live and rng.random() < 0.4:
            for handle in rng.sample(live, min(len(live), rng.choice((1, 1, 3, 10)))):
                try:
                    self.core.offload_state(handle.id, salt=handle.salt)
                except DagError as error:
                    if error.code != "capacity":
                        raise
                    self.counts["host full"] += 1
        if live and rng.random() < 0.1:
            handle = rng.choice(live)
            self.core.prefetch_state(handle.id, salt=handle.salt)
        if live and rng.random() < 0.05:
            handle = rng.choice(live)
            node, _ = self.core.store.resolve(handle.id, handle.salt)
            try:
                self.core.store.evict_host(node)
            except KVStoreError as error:
                if error.code != "state_in_use":
                    raise
        if rng.random() < 0.05:
            self.transfer.release_lost()
        self.core.store.check()

    def _end_transfers(self) -> None:
        """Until nothing moves any more; what was lost arrives."""
        self.transfer.release_lost()
        for _ in range(20):
            self.core.pump()
            self.core.store.check()
        stats = self.core.store.stats()
        if stats.tickets_in_flight or stats.tickets_lost or stats.pages_moving or stats.host_moving:
            raise Mismatch(f"transfers do not end: {stats}")

    def _release(self, handle: Handle) -> None:
        self.core.release_state(handle.id, salt=handle.salt)
        self.handles.remove(handle)
        self.counts["releases"] += 1

    def _evict(self, handle: Handle) -> None:
        node, _ = self.core.store.resolve(handle.id, handle.salt)
        try:
            self.counts["evicted pages"] += self.core.store.evict(node)
        except KVStoreError as error:
            if error.code != "state_in_use":
                raise

    # events

    def _take(self, event: Event) -> None:
        pending = self.pending.get(event.request_id)
        if pending is None:
            raise Mismatch(f"{event} after the end of its request")
        if isinstance(event, TokenEvent):
            pending.tokens.setdefault(event.index, []).extend(event.token_ids)
            return
        del self.pending[event.request_id]
        self.ends[event.request_id] = event
        self._since_end = 0
        try:
            if event.error is None:
                self._check_answers(pending, event)
            else:
                self._check_failure(pending, event.error)
        except AssertionError as error:
            raise Mismatch(f"{error}, in {_brief(pending.request)}") from error

    def _check_answers(self, pending: Pending, event: FinishedEvent) -> None:
        request = pending.request
        nodes, cuts, view = self._nodes(pending), self._cuts(pending), self._view(pending)
        assert self.oracle.refusal(request, view) is None, "the definition refuses it"
        expected = request.sampling.n if request.sampling else 1
        assert [choice.index for choice in event.choices] == list(range(expected))
        for choice in event.choices:
            own = [*request.input_ids, *choice.token_ids]
            if choice.finish_reason == "stop":
                assert isinstance(choice.stop_reason, int)
                own.append(choice.stop_reason)
            self._check_choice(pending, choice, own, view)
            name = self._new_id(f"{request.id}/{choice.index}#")
            node = self.oracle.add(name, request, nodes, cuts, view, own, len(choice.token_ids))
            pending.node = node
            if choice.dag.state is not None:
                assert request.keep is not None
                expires = self._expiry(choice, request.keep, expected > 1)
                self.handles.append(
                    Handle(choice.dag.state, node, len(own), request.salt, expires, request.keep.pin)
                )
            self.counts["answers"] += 1
            self.counts["visible tokens"] += len(view.shown)
            self.counts["reused tokens"] += choice.dag.reused

    def _expiry(self, choice: Choice, keep: Keep, many: bool) -> float | None:
        """When the state ends by itself; the first of several answers may do so before the last is sealed."""
        assert choice.dag.state is not None
        if keep.ttl_s is None:
            return None
        try:
            left = self.core.store.describe(choice.dag.state).expires_s
        except KVStoreError as error:
            assert error.code == "state_released" and many, error
            return self.now
        assert left is not None and left <= keep.ttl_s + 1e-6
        return self.now + left

    def _check_choice(self, pending: Pending, choice: Choice, own: list[int], view: View) -> None:
        request, dag = pending.request, choice.dag
        params, begin = request.sampling, len(request.input_ids)
        sampled = own[begin:]
        assert choice.num_sampled == len(sampled)
        assert pending.tokens.get(choice.index, []) == list(choice.token_ids), "events and answer differ"
        if params is None:
            assert choice.finish_reason == "prefill" and not sampled
        else:
            stops = set(params.stop_token_ids)
            assert not stops.intersection(choice.token_ids)
            assert choice.finish_reason == ("stop" if sampled[-1] in stops else "length")
            assert choice.finish_reason == "stop" or len(sampled) == params.max_tokens
        spans = {"prompt": (0, begin), "output": (begin, begin + len(choice.token_ids)), "all": (0, len(own))}
        if request.turn_start is not None:
            spans["turn"] = (request.turn_start, len(own))
        assert dict(dag.spans) == spans
        assert (dag.visible, dag.own_start, dag.input) == (len(view.shown), view.own_start, begin), dag
        assert 0 <= dag.reloaded <= dag.visible and (self.settings.host or not dag.reloaded), dag
        assert 0 <= dag.reused <= dag.visible + dag.input and dag.policy == request.position
        assert (dag.state is None) == (request.keep is None)

    def _check_failure(self, pending: Pending, error: DagError) -> None:
        pending.failed = True
        self.counts[f"failed {error.code}"] += 1
        parents = [(pending.group or {})[name] for name in pending.parents if isinstance(name, str)]
        if error.code == "parent_failed":
            assert any(parent.failed for parent in parents), error
            return
        if error.code in self.expected_errors or error.message == "RuntimeError: planted":
            pass
        elif error.code == "cancelled":
            assert pending.aborted, error
        else:
            view = self._view(pending)
            expected = self._position_refusal(pending, view) or self.oracle.refusal(pending.request, view)
            if error.code == "capacity" and expected is None and self.core.store.stats().tickets_lost:
                self.counts["capacity by lost transfers"] += 1
            elif error.code == "capacity" and expected is None:
                pinned = [handle.node for handle in self.handles if handle.pinned]
                most = self.oracle.most_pages(pending.request, view, pinned)
                assert self._pins_answers(pending) or most > self.settings.pages, (
                    f"{error}, though {most} pages are enough for everything"
                )
                self.counts["capacity by restores"] += 1
            else:
                assert error.code == expected, f"{error}; the definition says {expected}"
        if all(parent.node is not None for parent in parents):
            self._check_tokens(pending)
        else:
            self._unchecked.append(pending)

    def _check_tokens(self, pending: Pending) -> None:
        if pending.tokens:
            view = self._view(pending)
            for ids in pending.tokens.values():
                self.oracle.check_tokens(pending.request, view, [*pending.request.input_ids, *ids])

    def _check_the_unchecked(self) -> None:
        """What was told of requests that failed, of whose parents it was not known yet how they end."""
        unchecked, self._unchecked = self._unchecked, []
        for pending in unchecked:
            parents = [(pending.group or {})[name] for name in pending.parents if isinstance(name, str)]
            if all(parent.node is not None for parent in parents):
                self._check_tokens(pending)

    def _pins_answers(self, failing: Pending) -> bool:
        """Whether requests that have not ended may have pinned some of their answers already."""
        return any(p.request.keep and p.request.keep.pin for p in (*self.pending.values(), failing))

    # the end of a graph

    def clean_up(self) -> None:
        """Release everything and look for what stays. Raises Mismatch."""
        if self.pending:
            raise Mismatch(f"without a terminal event: {sorted(self.pending)}")
        self._check_the_unchecked()
        self.core.store.expire()
        for handle in [handle for handle in self.handles if not self._expired(handle)]:
            self._release(handle)
        if self.settings.host is not None:
            self._end_transfers()
        self.core.store.check()
        stats = self.core.store.stats()
        left = (
            stats.pages_live,
            stats.pages_waiting,
            stats.states,
            stats.handles,
            stats.leases,
            stats.writers,
            stats.host_live,
        )
        if any(left) or stats.pages_free + stats.pages_cached != stats.pages_total or stats.restores:
            raise Mismatch(f"something stays when nothing is left: {stats}")
        if self.rng.random() < 0.3:
            self.forget_everything()
        self._fresh()

    def overwrite(self) -> None:
        """Take all pages once: states that nothing pins are evicted, and no page is cached afterwards."""
        store = self.core.store
        writer = store.begin([], [], 0, signature={})
        writer.reserve(store.num_pages * store.page_size)
        writer.abort()

    def forget_everything(self) -> None:
        """Overwrite the cached pages too: then no node has a reason to stay."""
        store = self.core.store
        self.overwrite()
        self.core.preparer.forget_dropped()
        if len(self.core.preparer.graph) or store._books.nodes():
            gc.collect()
            self.core.preparer.forget_dropped()
            if len(self.core.preparer.graph) or store._books.nodes():
                raise Mismatch(
                    f"nodes stay for ever: {self.core.preparer.graph.nodes()} {store._books.nodes()}"
                )
            self.counts["collected by gc"] += 1

    def finish(self) -> Counter[str]:
        """What happened, for the tests to see that it was not nothing."""
        self.forget_everything()
        stats = self.core.store.stats()
        self.counts["preemptions"] = self.core.num_preemptions
        self.counts["restored tokens"] = self.core.stats.restored_tokens
        self.counts["evictions"] = stats.evictions
        self.counts["matched tokens"] = stats.tokens_reused
        if self.settings.host is not None:
            told = self.core.stats
            self.counts["reloaded tokens"] = told.reloaded_tokens
            self.counts["prefetches"] = told.prefetches
            self.counts["offloads"] = told.offloads
            self.counts["recomputes chosen"] = told.recomputes_chosen
            for name in ("stores", "loads", "stores_failed", "loads_failed", "stores_lost", "loads_lost"):
                self.counts[name] = getattr(stats, name)
            self.counts["duplicates"] = stats.completions_duplicate
            self.counts["late"] = stats.completions_late
        if self.core.num_running or self.core.num_waiting:
            raise Mismatch(self._queues())
        return self.counts


def _brief(request: Request) -> str:
    params = request.sampling and (request.sampling.max_tokens, request.sampling.n)
    return f"{request.id} {params} {request.position} {request.keep} {request.context}"


def run_world(
    seed: int, graphs: int, settings: Settings | None = None, mode: str | None = None
) -> Counter[str]:
    """Run graphs through one engine. Raises Mismatch, naming the seed to repeat it with."""
    world = World(seed, settings, mode)
    try:
        for _ in range(graphs):
            world.run_graph()
        return world.finish()
    except Exception as error:
        done = world.counts["graphs"]
        call = f"run_world(seed={seed}, graphs={done + 1}, mode={mode!r})"
        raise Mismatch(f"{call} with {world.settings}: {error}") from error
