"""CudaRunner: replayed steps are what eager steps are, whatever changes between them.

The first half runs on the CPU, with a backend whose plans take turns in slots (stepping.py) and functions for graphs;
the second half on an NVIDIA GPU.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from dagengine.cuda_runner import CudaRunner, make_runner
from dagengine.graphs import GraphCache, capacities
from dagengine.runner import Runner
from dagengine.step_buffers import StepBuffers
from dagengine.views import Views
from dagengine_kernels import KernelError
from dagengine_kernels.errors import UNSUPPORTED
from dagengine_kernels.fused.backend import FusedBackend
from dagengine_kernels.reference import ReferenceBackend
from dagengine_kernels.staging import Staging

from .stepping import FakeCapture, FakeGraph, Stepper, TwinBackend, base_runner, geometry_of, runner_of

WINDOWS = {"full": (None, None), "window": (9, 9), "two groups": (None, 9)}


class Pair:
    """A CudaRunner on the CPU beside the plain runner: every launch is compared."""

    def __init__(self, windows=(None, None), page_size=4, max_num_seqs=8, **options):
        geometry = geometry_of(head_dim=16, windows=windows)
        self.capture = FakeCapture()
        self.twin = TwinBackend()
        self.runner = runner_of(
            CudaRunner,
            geometry,
            page_size=page_size,
            max_num_seqs=max_num_seqs,
            capture=self.capture,
            **options,
        )
        self.plain, self.truth = base_runner(geometry, page_size), ReferenceBackend()
        self.stepper = Stepper(page_size)
        self.num_groups = len(geometry.groups)
        self.ids = None

    def step(self, works, counts=None, pending=None):
        """Launch, compare, and give every work that sampled its token, unless it is to stay pending."""
        chunks = self.stepper.chunks(works, counts, pending)
        have = self.runner.launch(chunks, self.twin, self.ids)
        want = self.plain.launch(chunks, self.truth, self.ids)
        assert have.shape == want.shape
        assert torch.allclose(have, want, atol=1e-4, rtol=1e-4)
        self.stepper.done(chunks)
        self.ids = want.argmax(-1)
        return [chunk.work for chunk in chunks if chunk.samples]

    def decode(self, works, steps=1):
        for _ in range(steps):
            sampled = self.step(works)
            self.stepper.give(sampled, self.ids.tolist())

    def prefill(self, works):
        sampled = self.step(works, [len(work.tokens) - work.computed for work in works])
        self.stepper.give(sampled, self.ids.tolist())


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_steps_equal_the_plain_runners_while_batches_change(windows, eager):
    pair = Pair(windows, enforce_eager=eager)
    a, b, c = (pair.stepper.work(n) for n in (5, 2, 9))
    pair.prefill([a, b])
    pair.decode([a, b], 11)
    pair.prefill([c])
    pair.decode([a, b, c], 3)
    pair.decode([b, c], 6)
    pair.decode([c, b, a], 2)
    d = pair.stepper.work(4, context=(a.writer, b.writer), context_delta=3)
    pair.prefill([d])
    pair.decode([a, d], 9)
    assert pair.capture.num_captured == (0 if eager else 2), "one graph for 2 rows and one for 3 and 4"


def test_a_steady_step_is_planned_only_where_pages_are_new():
    pair = Pair(page_size=8)
    works = [pair.stepper.work(8), pair.stepper.work(8)]
    pair.prefill(works)
    pair.decode(works)
    planned = pair.twin.num_plans
    pair.decode(works, 7)
    assert pair.twin.num_plans == planned, "its plan advanced within the page"
    pair.decode(works)
    assert pair.twin.num_plans > planned, "the next page was not in the plan"
    for work in works:
        work.writer.reserve(30)
    pair.decode(works, 7)
    planned = pair.twin.num_plans
    pair.decode(works, 24)
    assert pair.twin.num_plans == planned + 1, "reserved pages are in the plan"


def test_tokens_that_are_pending_come_from_the_launch_before():
    pair = Pair()
    a, b, c = (pair.stepper.work(n) for n in (5, 3, 6))
    assert pair.step([a, b], [5, 3]) == [a, b]
    for _ in range(6):
        known = pair.ids.tolist()
        assert pair.step([b, a], pending=[1, 0]) == [b, a]
        pair.stepper.give([a, b], known)
        known = pair.ids.tolist()
        assert pair.step([a, b], pending=[1, 0]) == [a, b]
        pair.stepper.give([b, a], known)
    known = pair.ids.tolist()
    assert pair.step([c, a, b], [6, 1, 1], pending=[None, 0, 1]) == [c, a, b]
    pair.stepper.give([a, b], known)
    known = pair.ids.tolist()
    pair.stepper.give([c], known[:1])
    assert pair.step([a, c, b], pending=[1, None, 2]) == [a, c, b]


def test_a_row_that_does_not_sample_has_no_logits():
    pair = Pair()
    a, b = pair.stepper.work(5), pair.stepper.work(5)
    assert pair.step([a, b], [3, 4]) == []
    assert pair.step([a, b], [1, 1]) == [b]
    assert pair.runner._batch is not None, "it was a decode step"


def test_a_step_that_somebody_joins_is_no_decode_step():
    """Of a decode step the pages that are read count as written before it."""
    pair = Pair()
    a, b = pair.stepper.work(1), pair.stepper.work(1)
    *before, last = pair.stepper.chunks([a, b], [1, 1])
    chunks = [*before, last._replace(joins=True)]
    have = pair.runner.launch(chunks, pair.twin, None)
    assert pair.runner._batch is None
    assert torch.allclose(have, pair.plain.launch(chunks, pair.truth, None), atol=1e-4, rtol=1e-4)


def test_chunked_prefill_with_decode_leaves_the_decode_plan_alone():
    pair = Pair(page_size=16)
    a, b = pair.stepper.work(3), pair.stepper.work(40)
    pair.prefill([a])
    pair.decode([a], 2)
    planned = pair.twin.num_plans
    pair.prefill([b])
    pair.decode([a], 3)
    assert pair.twin.num_plans == planned + 1, "only b was planned"
    sampled = pair.step([a, c := pair.stepper.work(20)], [1, 20])
    pair.stepper.give(sampled, pair.ids.tolist())
    planned = pair.twin.num_plans
    pair.decode([a], 2)
    assert pair.twin.num_plans == planned + 1, "it went on without its plan"
    pair.decode([a, c], 2)


@pytest.mark.parametrize("reads", [False, True])
def test_work_that_was_given_other_pages_is_planned_anew_at_the_same_place(reads):
    """It stands where the plan has advanced to, but was preempted and computed again in between. What it reads, if
    anything, was found again; of what reads nothing the context is always the same.
    """
    pair = Pair(page_size=4)
    work, other = pair.stepper.work(4), pair.stepper.work(1)
    pair.prefill([work])
    pair.decode([work], 2)
    at, pages = work.computed, list(work.writer.pages)
    work.writer.rollback()
    work.computed, work.context = 0, work.context.copy() if reads else work.context
    other.writer.reserve(2)
    pair.step([work], [at])
    assert work.computed == at and work.writer.pages != pages
    planned = pair.twin.num_plans
    pair.decode([work])
    assert pair.twin.num_plans == planned + 1


def test_pages_that_were_given_back_are_planned_anew():
    """The plan says where the next tokens go; other work writes there now."""
    pair = Pair(page_size=4)
    work, other = pair.stepper.work(3), pair.stepper.work(5)
    pair.prefill([work])
    work.writer.reserve(9)
    pair.decode([work])
    promised = list(work.writer.pages)
    assert work.writer.give_back(0) == 2
    planned = pair.twin.num_plans
    pair.prefill([other])
    assert set(other.writer.pages) == set(promised[1:])
    pair.decode([work], 6)
    assert pair.twin.num_plans > planned
    assert work.writer.pages[:1] == promised[:1] and not set(work.writer.pages[1:]) & set(promised)


def test_a_failed_launch_is_not_continued():
    pair = Pair(page_size=16)
    work = pair.stepper.work(3)
    pair.prefill([work])
    pair.decode([work], 2)
    planned, replay = pair.twin.num_plans, pair.runner._batch.graph.replay

    def fail():
        raise RuntimeError("the device fell over")

    pair.runner._batch.graph.replay = fail
    chunks = pair.stepper.chunks([work])
    with pytest.raises(RuntimeError, match="fell over"):
        pair.runner.launch(chunks, pair.twin, None)
    next(iter(pair.runner.graphs._kept.values())).replay = replay
    have = pair.runner.launch(chunks, pair.twin, None)
    assert torch.allclose(have, pair.plain.launch(chunks, pair.truth, None), atol=1e-4)
    assert pair.twin.num_plans == planned + 1


def test_a_backend_without_slots_is_launched_eagerly_and_the_log_says_so(caplog):
    pair = Pair()
    works = [pair.stepper.work(n) for n in (4, 6)]
    with caplog.at_level("WARNING", "dagengine"):
        for counts in ([4, 6], None, None):
            chunks = pair.stepper.chunks(works, counts)
            have = pair.runner.launch(chunks, pair.truth, None)
            want = pair.plain.launch(chunks, pair.truth, None)
            assert torch.allclose(have, want, atol=1e-4)
            pair.stepper.done(chunks)
            pair.stepper.give(works, want.argmax(-1).tolist())
    assert pair.capture.num_captured == 0
    assert sum("one kernel at a time: it has no slots" in message for message in caplog.messages) == 1


def test_larger_steps_than_were_asked_for_are_eager():
    pair = Pair(max_num_seqs=2)
    works = [pair.stepper.work(2) for _ in range(3)]
    pair.prefill(works)
    pair.decode(works, 2)
    assert pair.capture.num_captured == 0
    pair.decode(works[:2], 2)
    assert pair.capture.num_captured == 1


class Trio(Pair):
    """A Pair beside a third runner, which launches what the first replays: their results are the same bits."""

    def __init__(self, windows=(None, None), page_size=4, **options):
        super().__init__(windows, page_size, **options)
        geometry = geometry_of(head_dim=16, windows=windows)
        self.eager, self.other = (
            runner_of(
                CudaRunner,
                geometry,
                page_size=page_size,
                capture=self.capture,
                enforce_eager=True,
                max_num_seqs=8,
                **options,
            ),
            TwinBackend(),
        )
        self.replayed = Counter()
        self.runner.graphs._capture = self.counted

    def counted(self, warm_up, body):
        graph = self.capture(warm_up, body)

        def replay():
            self.replayed[graph] += 1
            graph.replay()

        return FakeGraph(replay)

    def step(self, works, counts=None, pending=None):
        chunks = self.stepper.chunks(works, counts, pending)
        have = self.runner.launch(chunks, self.twin, self.ids).clone()
        want = self.eager.launch(chunks, self.other, self.ids)
        assert torch.equal(have, want)
        truth = self.plain.launch(chunks, self.truth, self.ids)
        assert have.shape == truth.shape and torch.allclose(have, truth, atol=1e-4, rtol=1e-4)
        self.stepper.done(chunks)
        self.ids = truth.argmax(-1)
        return [chunk.work for chunk in chunks if chunk.samples]


@pytest.mark.parametrize("windows", [(None, None), (None, 9)], ids=["one group", "two groups"])
@pytest.mark.parametrize("seed", range(3))
def test_any_mix_of_chunks_and_decode_replayed_is_what_launches_are(seed, windows):
    """Works of any lengths, in chunks, beside decode whose tokens are pending, preempted and computed again."""
    rng = np.random.default_rng(seed)
    trio = Trio(windows, mixed_rows=24)
    works, ended, waiting = [], [], {}
    for number in range(40):
        if len(works) < 4 and (not works or rng.random() < 0.5):
            context = [work.writer for work in ended if rng.random() < 0.3]
            works.append(trio.stepper.work(int(rng.integers(1, 30)), context, int(rng.integers(0, 5))))
        if rng.random() < 0.5:
            give(trio, waiting)
        if not waiting and rng.random() < 0.2:
            victim = works[int(rng.integers(len(works)))]
            victim.writer.rollback()
            victim.restart()
            victim.context = victim.context.copy()
        if not waiting and number % 10 == 9 and works[0].computed:
            ended.append(works.pop(0))
            continue
        left = [len(work.tokens) - work.computed for work in works]
        counts = [int(rng.integers(1, n + 1)) if n else 1 for n in left]
        known, before = trio.ids, waiting
        sampled = trio.step(works, counts, [waiting.get(work) for work in works])
        for work, row in before.items():
            trio.stepper.give([work], [int(known[row])])
        waiting = {work: row for row, work in enumerate(sampled)}
    assert len(trio.replayed) >= 3 and trio.replayed.total() > 10


def give(trio, waiting):
    """What was sampled becomes known."""
    for work, row in waiting.items():
        trio.stepper.give([work], [int(trio.ids[row])])
    waiting.clear()


def test_a_step_of_a_kind_is_captured_when_it_comes_again():
    pair = Pair(page_size=16)
    for expected in (0, 1, 1, 1):
        pair.prefill([pair.stepper.work(9)])
        assert pair.capture.num_captured == expected
    pair.prefill([pair.stepper.work(16)])
    assert pair.capture.num_captured == 1, "padded to 16 rows like the others"
    pair.prefill([pair.stepper.work(17)])
    assert pair.capture.num_captured == 1
    pair.step([pair.stepper.work(14)], [10])
    assert pair.capture.num_captured == 1, "nothing is sampled: another kind"


def test_many_rows_of_a_small_step_are_sampled():
    pair = Pair(page_size=4, max_num_seqs=100)
    for _ in range(3):
        works = [pair.stepper.work(n) for n in (3, *[1] * 10)]
        pair.prefill(works)
    assert pair.capture.num_captured == 1


def test_large_steps_and_those_of_a_runner_that_replays_none_are_not_padded():
    for rows, options in ((9, {"mixed_rows": 8}), (3, {"mixed_rows": 0})):
        pair = Pair(page_size=16, **options)
        for _ in range(3):
            pair.prefill([pair.stepper.work(rows)])
        assert pair.capture.num_captured == 0
        assert not pair.runner._buffers


def test_plans_of_large_steps_are_in_no_slot_of_which_graphs_hold_addresses():
    pair = Pair(page_size=16, mixed_rows=8)
    pair.prefill([pair.stepper.work(5)])
    works = [pair.stepper.work(3)]
    pair.prefill(works)
    pair.decode(works)
    slots = pair.runner._slots[pair.twin]
    replayed = [slot.plan for slot in (*slots.padded, *slots.decode)]
    assert None not in replayed and [slot.plan for slot in slots.large] == [None] * pair.num_groups
    pair.prefill([pair.stepper.work(9)])
    assert [slot.plan for slot in (*slots.padded, *slots.decode)] == replayed
    assert None not in [slot.plan for slot in slots.large]


def test_rows_that_pad_write_nothing_and_what_was_there_is_gone():
    pair = Pair(page_size=16)
    buffers = StepBuffers(8, 3, torch.device("cpu"))
    staging = Staging(torch.device("cpu"), torch.int64)
    many, few = pair.stepper.work(8), pair.stepper.work(3)
    buffers.fill_mixed(pair.stepper.chunks([many], [8]), np.arange(8), [7], None, staging)
    assert buffers.ids().tolist() == many.tokens
    chunks = pair.stepper.chunks([few], [4], pending=[1])
    buffers.fill_mixed(chunks, np.arange(4), [3], torch.tensor([5, 6]), staging)
    assert buffers.ids().tolist() == [*few.tokens, 6, 0, 0, 0, 0]
    assert buffers.slots.tolist() == [*chunks[0].slots, -1, -1, -1, -1]
    assert buffers.positions.tolist() == [0, 1, 2, 3, 0, 0, 0, 0]
    assert buffers.rows.tolist() == [3, 0, 0, 0, 0, 0, 0, 0]


def test_a_key_that_comes_once_is_not_captured_and_few_of_them_are_remembered(monkeypatch):
    monkeypatch.setattr("dagengine.graphs.MOST_ONCE", 2)
    capture = FakeCapture()
    cache = GraphCache(capture)

    def body():
        pass

    assert [cache.find_again(key, body, body) for key in "abc"] == [None, None, None]
    assert cache.find_again("a", body, body) is None, "two others came since"
    found = cache.find_again("a", body, body)
    assert found is not None and cache.find_again("a", body, body) is found
    assert capture.num_captured == 1


def test_capacities_end_with_the_most():
    assert capacities(64) == (1, 2, 4, 8, 16, 24, 32, 48, 64)
    assert capacities(256) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    assert capacities(1) == (1,)
    assert capacities(5) == (1, 2, 4, 5)
    assert capacities(30)[-3:] == (16, 24, 30)


def test_the_graph_used_longest_ago_is_dropped():
    capture = FakeCapture()
    cache = GraphCache(capture, most=2)

    def body():
        pass

    first = cache.find("a", body, body)
    cache.find("b", body, body)
    assert cache.find("a", body, body) is first
    cache.find("c", body, body)
    assert len(cache) == 2 and cache.find("a", body, body) is first
    assert capture.num_captured == 3
    cache.find("b", body, body)
    assert capture.num_captured == cache.num_captured == 4


def test_a_growing_view_is_what_the_work_says():
    stepper = Stepper(4)
    views = Views(4, 160)
    shared = stepper.work(11)
    for chunk in stepper.chunks([shared], [11]):
        shared.computed += chunk.count
    works = [stepper.work(3, context=(shared.writer,), context_delta=5), stepper.work(40)]
    for counts in ([1, 3], [2, 9], [0, 4], [0, 1], [0, 17]):
        listed = [(work, count) for work, count in zip(works, counts, strict=True) if count]
        batch, sizes = zip(*listed, strict=True)
        chunks = stepper.chunks(batch, sizes)
        first = [work.own_start + work.computed for work in batch]
        positions = np.concatenate([np.arange(at, at + n) for at, n in zip(first, sizes, strict=True)])
        table = views.table(batch, np.array(sizes), positions)
        table.validate()
        for b, (work, count) in enumerate(listed):
            mine = table.extents[table.extent_indptr[b] : table.extent_indptr[b + 1]]
            assert mine.tolist() == work.extents(count).tolist()
            assert table.static_extents[b] == len(work.context)
        stepper.done(chunks)


def test_only_a_cuda_device_gets_the_cuda_runner():
    geometry = geometry_of()
    made = runner_of(make_runner, geometry, page_size=4)
    assert type(made) is Runner


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

MODELS = {
    "heads of 64": {"head_dim": 64},
    "heads of 128": {"head_dim": 128, "page_size": 64},
    "qk-norm": {"head_dim": 128, "qk_norm": True, "page_size": 64},
    "window": {"head_dim": 64, "windows": (50, 50)},
    "two groups": {"head_dim": 64, "windows": (None, 50)},
}


class OnGpu:
    """Graphs, the same steps without graphs, and the CPU's float32."""

    def __init__(self, page_size=16, **options):
        geometry = geometry_of(**options)
        self.backends, self.runners = [], []
        for eager in (False, True):
            backend = FusedBackend("cuda")
            runner = runner_of(
                CudaRunner,
                geometry,
                page_size=page_size,
                device="cuda",
                dtype=torch.bfloat16,
                max_num_seqs=16,
                enforce_eager=eager,
            )
            try:
                runner.try_backend(backend)
            except KernelError as error:
                if error.code != UNSUPPORTED:
                    raise
                pytest.skip(str(error))
            self.backends.append(backend)
            self.runners.append(runner)
        self.plain, self.truth = base_runner(geometry, page_size), ReferenceBackend(torch.float32)
        self.stepper = Stepper(page_size)
        self.errors = []
        self.ids = None

    def step(self, works, counts=None, pending=None, check=True):
        chunks = self.stepper.chunks(works, counts, pending)
        ids = None if self.ids is None else self.ids.cuda()
        graph, eager = (
            runner.launch(chunks, backend, ids).clone()
            for runner, backend in zip(self.runners, self.backends, strict=True)
        )
        assert torch.equal(graph, eager)
        if check:
            want = self.plain.launch(chunks, self.truth, self.ids)
            assert graph.shape == want.shape
            if len(want):
                self.errors.append(float((graph.float().cpu() - want).norm() / want.norm()))
        self.stepper.done(chunks)
        # What is sampled need not be the best: the same for all, so that all go on with the same tokens.
        self.ids = torch.from_numpy(self.stepper.rng.integers(0, 320, len(graph)))
        return [chunk.work for chunk in chunks if chunk.samples]

    def decode(self, works, steps=1):
        for _ in range(steps):
            self.stepper.give(self.step(works), self.ids.tolist())

    def prefill(self, works):
        sampled = self.step(works, [len(work.tokens) - work.computed for work in works])
        self.stepper.give(sampled, self.ids.tolist())

    def close(self):
        """Rounding to bfloat16 is the only difference: the error neither is large anywhere nor grows with the steps."""
        assert max(self.errors) < 0.05, max(self.errors)
        early, late = np.array_split(np.array(self.errors), 2)
        assert np.median(late) < 2 * np.median(early) + 1e-3


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_replayed_steps_are_eager_steps_on_the_gpu(options):
    """100 steps: crossings of pages, works that come and go, padding, other orders, contexts at a delta."""
    gpu = OnGpu(**options)
    a, b, c, d, e = (gpu.stepper.work(n) for n in (5, 30, 64, 17, 1))
    gpu.prefill([a, b, c])
    gpu.decode([a, b, c], 40)
    gpu.prefill([d, e])
    gpu.decode([a, b, c, d, e], 20)
    gpu.decode([e, c, a], 15)
    f = gpu.stepper.work(9, context=(a.writer, c.writer), context_delta=6)
    gpu.prefill([f])
    gpu.decode([f, e], 20)
    gpu.decode([f], 5)
    gpu.close()
    graphs = gpu.runners[0].graphs
    assert 0 < graphs.num_captured <= 30, graphs.num_captured


@pytest.mark.gpu
@on_gpu
def test_ids_that_are_pending_on_the_gpu():
    gpu = OnGpu(page_size=64, head_dim=128)
    a, b, c = (gpu.stepper.work(n) for n in (5, 33, 60))
    assert gpu.step([a, b], [5, 33]) == [a, b]
    for _ in range(20):
        known = gpu.ids.tolist()
        assert gpu.step([b, a], pending=[1, 0]) == [b, a]
        gpu.stepper.give([a, b], known)
        known = gpu.ids.tolist()
        assert gpu.step([a, b], pending=[1, 0]) == [a, b]
        gpu.stepper.give([b, a], known)
    known = gpu.ids.tolist()
    assert gpu.step([c, a, b], [60, 1, 1], pending=[None, 0, 1]) == [c, a, b]
    gpu.stepper.give([a, b], known)
    gpu.stepper.give([c], gpu.ids.tolist()[:1])
    assert gpu.step([a, c, b], pending=[1, None, 2]) == [a, c, b]
    gpu.close()


def mix(gpu, rng, works, rounds):
    """Chunks of random lengths beside decode; what was sampled is known at once, and works that end make room."""
    for _ in range(rounds):
        while len(works) < 4:
            works.append(gpu.stepper.work(int(rng.integers(1, 120))))
        left = [len(work.tokens) - work.computed for work in works]
        counts = [min(int(rng.choice((1, 8, 8, 40))), n) for n in left]
        sampled = gpu.step(works, counts)
        gpu.stepper.give(sampled, gpu.ids.tolist())
        if rng.random() < 0.2:
            works.pop(0).writer.abort()


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_mixed_steps_replayed_are_launches_on_the_gpu(options):
    """The truth is checked in every step, and that the bits of a replay are those of the same launches."""
    gpu = OnGpu(**options)
    mix(gpu, np.random.default_rng(3), [], 60)
    assert max(gpu.errors) < 0.05, max(gpu.errors)
    assert sum(len(key) == 3 for key in gpu.runners[0].graphs._kept) > 0


@pytest.mark.gpu
@on_gpu
def test_padding_leaves_the_bits_of_batch_invariant_rows_alone():
    """Small steps padded and replayed beside the same steps as they come."""
    gpu = OnGpu(head_dim=128, page_size=64)
    geometry = geometry_of(head_dim=128)
    gpu.backends = [FusedBackend("cuda", batch_invariant=True) for _ in range(2)]
    gpu.runners = [
        runner_of(
            CudaRunner,
            geometry,
            page_size=64,
            device="cuda",
            dtype=torch.bfloat16,
            batch_invariant=True,
            max_num_seqs=16,
            **more,
        )
        for more in ({}, {"mixed_rows": 0, "enforce_eager": True})
    ]
    mix(gpu, np.random.default_rng(4), [], 60)
    assert sum(len(key) == 3 for key in gpu.runners[0].graphs._kept) > 0


@pytest.mark.gpu
@on_gpu
def test_a_steady_step_waits_for_nothing():
    """The host queues 30 steps, prefill of another work between them, while the device is kept busy by a spin."""
    gpu = OnGpu(head_dim=64)
    works = [gpu.stepper.work(n) for n in (3, 4, 5)]
    gpu.prefill(works)
    gpu.decode(works, 3)
    runner, backend = gpu.runners[0], gpu.backends[0]
    ids = gpu.ids.cuda()
    chunks = gpu.stepper.chunks(works)
    runner.launch(chunks, backend, None)
    gpu.stepper.done(chunks)
    late = gpu.stepper.work(50)
    for _ in range(2):
        warm = gpu.stepper.chunks([gpu.stepper.work(50)], [50])
        runner.launch(warm, backend, ids)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    for step in range(3):
        chunks = gpu.stepper.chunks(works, pending=[0, 1, 2])
        logits = runner.launch(chunks, backend, ids)
        gpu.stepper.done(chunks)
        gpu.stepper.give(works, [1, 2, 3])
        if step == 1:
            mixed = gpu.stepper.chunks([late], [50])
            runner.launch(mixed, backend, ids)
    done.record()
    assert not done.query(), "the host waited for the device"
    torch.cuda.synchronize()
    assert bool(logits.isfinite().all())
