"""Prometheus metrics of one application, prefix `dagengine_`. Labels are bounded: no request or state ids.

Counters of the engine are read when somebody asks; what is known per request is counted as it ends.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client import Counter as CounterMetric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from dagengine.async_engine import EngineThread
from dagengine.core import EngineCore
from dagengine.request import Event, Request, TokenEvent

from .errors import STATUS

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
SHORT = (1e-5, 5e-5, 1e-4, 5e-4, 1e-3, 5e-3, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)
ADAPTER_REASONS = ("kv_kind_unsupported", "rope_regime_mismatch", "chunk_crossing", "position_overflow",
                   "policy_unsupported")  # fmt: skip


@dataclass(frozen=True)
class Snapshot:
    """The engine's numbers at one moment, taken on its thread."""

    running: int
    waiting: int
    preemptions: int
    prompt_tokens: int
    reused_tokens: int
    generated_tokens: int
    restored_tokens: int
    batched_tokens: int
    steps: int
    non_finite: int
    evictions: int
    finished: Mapping[str, int]
    pages: Mapping[str, int]
    pages_total: int
    pages_shared: int
    page_size: int
    states: Mapping[str, int]
    deduplicated_tokens: int
    host_pages: Mapping[str, int]
    tickets: Mapping[str, int]
    transfers: Mapping[tuple[str, str], int]
    transfer_bytes: Mapping[str, int]
    completions: Mapping[str, int]
    decisions: Mapping[str, int]
    reloaded_tokens: int
    offloads: int
    prefetches: int
    host_evictions: int
    temp_bytes: Mapping[str, int]


def take_snapshot(core: EngineCore) -> Snapshot:
    """Read everything. Runs on the engine's thread."""
    stats, store = core.stats, core.store.stats()
    page_bytes = 0 if core.host_tier is None else core.host_tier.page_bytes
    return Snapshot(
        running=core.num_running,
        waiting=core.num_waiting,
        preemptions=core.num_preemptions,
        prompt_tokens=stats.prompt_tokens,
        reused_tokens=stats.reused_tokens,
        generated_tokens=stats.generated_tokens,
        restored_tokens=stats.restored_tokens,
        batched_tokens=stats.batched_tokens,
        steps=stats.steps,
        non_finite=stats.non_finite,
        evictions=store.evictions,
        finished=dict(stats.finished),
        pages={
            "free": store.pages_free,
            "cached": store.pages_cached,
            "live": store.pages_live,
            "waiting": store.pages_waiting,
            "moving": store.pages_moving,
        },
        pages_total=store.pages_total,
        pages_shared=store.pages_shared,
        page_size=core.store.page_size,
        states={
            "device": store.states_resident,
            "host": store.states_on_host,
            "nowhere": store.states - store.states_resident - store.states_on_host,
        },
        deduplicated_tokens=store.tokens_reused,
        host_pages={"free": store.host_free, "live": store.host_live, "moving": store.host_moving},
        tickets={"in_flight": store.tickets_in_flight, "lost": store.tickets_lost},
        transfers={
            ("store", "started"): store.stores,
            ("store", "failed"): store.stores_failed,
            ("store", "lost"): store.stores_lost,
            ("load", "started"): store.loads,
            ("load", "failed"): store.loads_failed,
            ("load", "lost"): store.loads_lost,
        },
        transfer_bytes={
            "store": store.pages_stored * page_bytes,
            "load": store.pages_loaded * page_bytes,
        },
        completions={
            "late": store.completions_late,
            "duplicate": store.completions_duplicate,
            "unknown": store.completions_unknown,
        },
        decisions={"reload": stats.reloads_chosen, "recompute": stats.recomputes_chosen},
        reloaded_tokens=stats.reloaded_tokens,
        offloads=stats.offloads,
        prefetches=stats.prefetches,
        host_evictions=store.host_evictions,
        temp_bytes=core.temp_bytes(),
    )


class Metrics:
    """Counts, and writes the exposition."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            return Histogram(f"dagengine_{name}", text, buckets=tuple(buckets), registry=self._registry)

        self._first_token = histogram("time_to_first_token_seconds", "Submission to first token.", SECONDS)
        self._merge = histogram(
            "merge_ttft_seconds", "The same, of answers over several references.", SECONDS
        )
        self._gaps = histogram("inter_token_latency_seconds", "Between two events of an answer.", SECONDS)
        self._compile = histogram("context_compile_seconds", "Compiling a request's references.", SHORT)
        self._kv_prepare = histogram(
            "kv_prepare_seconds", "Leasing and restoring what a request reads.", SECONDS
        )
        self._prompt = histogram("request_prompt_tokens", "Tokens a request sees and holds.", TOKENS)
        self._generation = histogram("request_generation_tokens", "Tokens sampled for an answer.", TOKENS)
        self._latency = Histogram(
            "dagengine_e2e_request_latency_seconds", "Whole HTTP requests, streams included.",
            ("route",), buckets=SECONDS, registry=self._registry,
        )  # fmt: skip
        self._http = CounterMetric(
            "dagengine_http_requests", "HTTP answers.", ("route", "method", "status"), registry=self._registry
        )
        self._errors = CounterMetric(
            "dagengine_request_errors",
            "Requests that ended with an error.",
            ("code",),
            registry=self._registry,
        )
        self._rejections = CounterMetric(
            "dagengine_adapter_rejections", "Layouts that were refused.", ("reason",), registry=self._registry
        )
        for reason in ADAPTER_REASONS:
            self._rejections.labels(reason)
        self._snapshots = _Snapshots()
        self._registry.register(self._snapshots)

    def observe(self, event: Event, request: Request, gap_s: float) -> None:
        """Count one event of a request, `gap_s` seconds after the one before."""
        if isinstance(event, TokenEvent):
            if gap_s > 0:
                self._gaps.observe(gap_s)
            return
        if event.error is not None:
            self.refused(event.error.code)
        for choice in event.choices:
            timing = choice.dag.timing
            if choice.num_sampled:
                self._first_token.observe(timing.first_token / 1e3)
                self._generation.observe(choice.num_sampled)
                if len(request.context) > 1:
                    self._merge.observe(timing.first_token / 1e3)
        if event.choices:
            dag = event.choices[0].dag
            self._compile.observe(dag.timing.compile / 1e3)
            self._kv_prepare.observe(max(0.0, dag.timing.kv_prepare) / 1e3)
            self._prompt.observe(dag.visible + dag.input)

    def refused(self, code: str) -> None:
        """Count a request that ended with an error of a known code."""
        self._errors.labels(code if code in STATUS else "other").inc()
        if code in ADAPTER_REASONS:
            self._rejections.labels(code).inc()

    def answered(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count one HTTP answer."""
        method = method if method in ("GET", "POST", "DELETE", "HEAD", "OPTIONS") else "other"
        self._http.labels(route, method, str(status)).inc()
        self._latency.labels(route).observe(seconds)

    def exposition(self, snapshot: Snapshot | None, engine: EngineThread) -> bytes:
        """The metrics in Prometheus' text format; without a snapshot the engine's are left out."""
        self._snapshots.now = snapshot
        self._snapshots.beat = time.time() - engine.seconds_since_beat()
        return generate_latest(self._registry)


class _Snapshots(Collector):
    """The last snapshot as metrics."""

    def __init__(self) -> None:
        self.now: Snapshot | None = None
        self.beat = 0.0

    def collect(self) -> Iterator[Metric]:
        yield _gauge(
            "engine_last_step_timestamp", "Unix time at which the engine last came round.", self.beat
        )
        now = self.now
        if now is None:
            return
        used = 1 - (now.pages["free"] + now.pages["cached"]) / now.pages_total
        yield _gauge("num_requests_running", "Sequences in the running batch.", now.running)
        yield _gauge("num_requests_waiting", "Sequences that wait.", now.waiting)
        yield _gauge("kv_cache_usage_perc", "Share of KV pages that something holds, 0 to 1.", used)
        yield _gauge("kv_pages_shared", "Live pages that several nodes refer to.", now.pages_shared)
        yield _gauge("dag_shared_tokens", "Room for tokens in these pages.", now.pages_shared * now.page_size)
        yield _gauge("deferred_free_pages", "Freed pages that wait for a step to end.", now.pages["waiting"])
        pages = {("device", k): v for k, v in now.pages.items()}
        pages |= {("host", k): v for k, v in now.host_pages.items()}
        yield _labelled("kv_pages", "KV pages.", ("tier", "status"), pages)
        yield _labelled(
            "kv_tickets", "Copies between the tiers that have not ended.", ("status",),
            {(k,): v for k, v in now.tickets.items()},
        )  # fmt: skip
        yield _labelled("dag_states", "States.", ("tier",), {(k,): v for k, v in now.states.items()})
        yield _labelled(
            "temp_buffer_bytes", "Peak temporary bytes of a backend.", ("backend",),
            {(k,): v for k, v in now.temp_bytes.items()},
        )  # fmt: skip
        yield _labelled(
            "cache_config_info", "The KV pool's shape.", ("page_size", "num_pages"),
            {(str(now.page_size), str(now.pages_total)): 1},
        )  # fmt: skip
        counters = (
            ("num_preemptions", "Sequences whose pages were taken back.", now.preemptions),
            ("prompt_tokens", "Tokens seen and held by finished answers.", now.prompt_tokens),
            ("generation_tokens", "Tokens sampled.", now.generated_tokens),
            ("prefix_cache_queries", "Tokens that could have been there already.", now.prompt_tokens),
            ("prefix_cache_hits", "Tokens that were there already.", now.reused_tokens),
            ("restored_tokens", "Tokens of evicted states computed again.", now.restored_tokens),
            ("dag_dedup_tokens", "Tokens whose pages equal work shared.", now.deduplicated_tokens),
            ("iteration_tokens", "Tokens computed in all steps.", now.batched_tokens),
            ("engine_steps", "Steps.", now.steps),
            ("non_finite_logits", "Answers that ended for want of finite logits.", now.non_finite),
            ("state_evictions", "Nodes whose pages left the device.", now.evictions),
            ("host_evictions", "Nodes whose pages left the host.", now.host_evictions),
            (
                "reloaded_tokens",
                "Tokens read that came from the host for their readers.",
                now.reloaded_tokens,
            ),
            ("state_offloads", "States that left the device since somebody asked for it.", now.offloads),
            ("prefetches", "Loads for sequences that waited.", now.prefetches),
        )
        for name, text, value in counters:
            yield CounterMetricFamily(f"dagengine_{name}", text, value=value)
        yield _counted("kv_transfers", "Copies between the tiers.", ("dir", "status"), now.transfers)
        moved = {(k,): v for k, v in now.transfer_bytes.items()}
        yield _counted("kv_transfer_bytes", "Bytes that arrived in the other tier.", ("dir",), moved)
        odd = {(k,): v for k, v in now.completions.items()}
        yield _counted("kv_odd_completions", "Ends of copies that nobody waited for.", ("kind",), odd)
        chosen = {(k,): v for k, v in now.decisions.items()}
        yield _counted("kv_bring_back", "How what was on the host was brought back.", ("how",), chosen)
        finished = CounterMetricFamily(
            "dagengine_request_success", "Answers that finished.", labels=("finished_reason",)
        )
        reasons = Counter({reason: now.finished.get(reason, 0) for reason in ("stop", "length", "prefill")})
        for reason, value in reasons.items():
            finished.add_metric((reason,), value)
        yield finished


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"dagengine_{name}", text, value=value)


def _counted(
    name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"dagengine_{name}", text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _labelled(
    name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"dagengine_{name}", text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family
