"""Prometheus metrics of a scheduler. Names are vLLM's where it has one, with `mtp:` in the place of `vllm:`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from mtp_runtime.batching.scheduler import Scheduler
from mtp_runtime.batching.tickets import Ticket
from mtp_runtime.batching.watch import Busy, Watch
from mtp_runtime.events import Emitted, Finished
from mtp_runtime.stats import Stats
from mtp_serving.latencies import BUCKETS_S

PREFIX = "mtp:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REASONS = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "abort", "timeout": "timeout"}
"""How an answer ended -> the label `finished_reason`; `error` where it failed."""
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass
class _Seen:
    """What happened to a request so far: how often an answer got a slot first, and when each last said something."""

    entered: int = 0
    newest: dict[int, float] = field(default_factory=dict)


class _Instruments:
    """Makes them in one registry, each with the name of the model as its first label."""

    def __init__(self, model_name: str) -> None:
        self.registry, self._model = CollectorRegistry(), model_name

    def gauge(self, name: str, text: str) -> Gauge:
        """A number that goes up and down."""
        return Gauge(PREFIX + name, text, ["model_name"], registry=self.registry).labels(self._model)

    def counter(self, name: str, text: str) -> Counter:
        """A number that goes up."""
        return Counter(PREFIX + name, text, ["model_name"], registry=self.registry).labels(self._model)

    def counters(self, name: str, text: str, label: str) -> Callable[[str], Counter]:
        """One for each value of a label."""
        family = Counter(PREFIX + name, text, ["model_name", label], registry=self.registry)
        return lambda value: family.labels(self._model, value)

    def histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        """How often a value was how large."""
        family = Histogram(PREFIX + name, text, ["model_name"], registry=self.registry, buckets=buckets)
        return family.labels(self._model)


class Metrics(Watch):
    """In a registry of its own, so that several servers in one process do not meet."""

    def __init__(self, model_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing has happened; `clock` is that of the scheduler."""
        self._made = made = _Instruments(model_name)
        self._model, self._clock = model_name, clock
        # Of the scheduler's thread alone.
        self._seen: WeakKeyDictionary[Ticket, _Seen] = WeakKeyDictionary()
        self._preemptions = made.counter("num_preemptions", "Answers that had to leave their slot.")
        self._degraded = made.counter("drafter_failures", "Answers that went on without drafts.")
        self._prompt = made.counter("prompt_tokens", "Tokens of the prompts of answers that began.")
        self._generated = made.counter("generation_tokens", "Tokens of answers.")
        self._ended = made.counters("request_success", "Answers that ended.", "finished_reason")
        self._drafts = made.counter("spec_decode_num_drafts", "Drafts that were verified.")
        self._drafted = made.counter("spec_decode_num_draft_tokens", "Tokens of drafts.")
        self._accepted = made.counter("spec_decode_num_accepted_tokens", "Tokens of drafts that were kept.")
        self._by_position = made.counters(
            "spec_decode_num_accepted_tokens_per_pos", "Tokens of drafts that were kept, by position.", "position"
        )
        self._chosen = made.counters("spec_decode_num_cycles", "Cycles by the K that was chosen.", "draft_tokens")
        self._first = made.histogram("time_to_first_token_seconds", "From submission to the first token.", BUCKETS_S)
        self._between = made.histogram(
            "inter_token_latency_seconds", "Time between two deliveries over the tokens of the later one.", BUCKETS_S
        )
        self._whole = made.histogram("e2e_request_latency_seconds", "From submission to the end.", BUCKETS_S)
        self._queue = made.histogram("request_queue_time_seconds", "From submission to the first slot.", BUCKETS_S)
        self._prompts = made.histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._sizes = made.histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self._widths = made.histogram("batch_width", "Answers in a verify.", _WIDTHS)
        self._rows = made.histogram("batch_rows", "Rows of all answers in a verify.", _WIDTHS)

    def read(self, scheduler: Scheduler) -> None:
        """Ask a scheduler for what it knows itself whenever somebody wants the text."""
        made = self._made
        made.gauge("num_requests_running", "Answers that have a slot.").set_function(lambda: scheduler.running)
        made.gauge("num_requests_waiting", "Answers that wait for a slot.").set_function(lambda: scheduler.queued)
        usage = made.gauge(
            "kv_cache_usage_perc", "Share of the slots, each with caches of its own, that are taken, 0 to 1."
        )
        usage.set_function(lambda: scheduler.running / scheduler.slots)
        held = made.gauge("prefix_cache_bytes", "Bytes of states that are kept for later requests.")
        held.set_function(lambda: scheduler.prefixes.nbytes)
        made.gauge("prefix_cache_budget_bytes", "Most bytes that may be kept.").set(scheduler.prefixes.budget)
        made.registry.register(_Prefixes(scheduler, self._model))

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(_Timeless(self._made.registry))

    def entered(self, ticket: Ticket) -> None:
        """An answer has a slot; one that left it comes again."""
        seen = self._of(ticket)
        seen.entered += 1
        if seen.entered <= ticket.prepared.decoding.completions:
            self._queue.observe(self._clock() - ticket.submitted)

    def preempted(self, ticket: Ticket) -> None:
        """Counted."""
        self._preemptions.inc()

    def emitted(self, ticket: Ticket, event: Emitted) -> None:
        """Tokens, and the time since the ones before."""
        count, now, newest = len(event.token_ids), self._clock(), self._of(ticket).newest
        if not count:
            return
        before, newest[event.index] = newest.get(event.index), now
        self._generated.inc(count)
        if before is None:
            self._first.observe(now - ticket.submitted)
            self._prompt.inc(len(ticket.prepared.prompt))
            return
        for _ in range(count):
            self._between.observe((now - before) / count)

    def finished(self, ticket: Ticket, event: Finished) -> None:
        """Everything that is known at the end only."""
        self._ended(REASONS[event.finish_reason]).inc()
        self._whole.observe(self._clock() - ticket.submitted)
        self._prompts.observe(event.prompt_tokens)
        self._sizes.observe(len(event.token_ids))
        self._count(event.stats)

    def failed(self, ticket: Ticket, error: Exception) -> None:
        """It has ended as well."""
        self._ended("error").inc()

    def degraded(self, ticket: Ticket, error: Exception) -> None:
        """Counted."""
        self._degraded.inc()

    def round(self, widths: Sequence[int], scheduler: Busy) -> None:
        """How many ran together."""
        if widths:
            self._widths.observe(len(widths))
            self._rows.observe(sum(widths))

    def _of(self, ticket: Ticket) -> _Seen:
        return self._seen.setdefault(ticket, _Seen())

    def _count(self, stats: Stats) -> None:
        self._drafts.inc(stats.proposed_by_position[0] if stats.proposed_by_position else 0)
        self._drafted.inc(stats.drafted)
        self._accepted.inc(stats.accepted)
        for position, kept in enumerate(stats.accepted_by_position):
            self._by_position(str(position)).inc(kept)
        for chosen, cycles in stats.draft_tokens_chosen.items():
            self._chosen(str(chosen)).inc(cycles)


class _Timeless(CollectorRegistry):
    """Another registry without the times at which its counters were made, a second series for every one of them.

    The library's own switch for these holds for the whole process, in which others may have metrics, too.
    """

    def __init__(self, inner: CollectorRegistry) -> None:
        super().__init__()
        self._inner = inner

    def collect(self) -> Iterator[Metric]:
        """Every family, made for this call."""
        for family in self._inner.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class _Prefixes(Collector):
    """Tokens that were looked up in the prefix cache, and those that were found, as the cache counts them."""

    def __init__(self, scheduler: Scheduler, model_name: str) -> None:
        self._scheduler, self._model = scheduler, model_name

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Both counts."""
        prefixes = self._scheduler.prefixes
        for name, text, value in (
            ("prefix_cache_queries", "Tokens that were looked up in the prefix cache.", prefixes.queries),
            ("prefix_cache_hits", "Tokens of them whose state was there.", prefixes.hits),
        ):
            family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            family.add_metric([self._model], value)
            yield family
