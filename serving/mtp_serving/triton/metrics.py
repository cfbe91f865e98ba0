"""Counters, gauges and histograms of one instance, for Triton's own metrics endpoint."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from mtp_runtime.batching.tickets import Ticket
from mtp_runtime.batching.watch import Busy, Watch
from mtp_runtime.events import Emitted, Finished
from mtp_serving.latencies import BUCKETS_S

_LOG = logging.getLogger(__name__)
_INTERVAL_S = 0.5
"""Each value takes a message to the server, so values are published now and then, and when an answer has ended."""

COUNTERS = {
    "mtp:prompt_tokens_total": "Tokens of prompts.",
    "mtp:generation_tokens_total": "Tokens of answers.",
    "mtp:request_success_total": "Answers that ended, by reason.",
    "mtp:request_failure_total": "Answers that could not be finished.",
    "mtp:num_preemptions_total": "Answers that had to leave their slot for one of higher priority.",
    "mtp:drafter_failures_total": "Answers that went on without drafts because their drafter failed.",
    "mtp:spec_decode_num_drafts_total": "Cycles with a draft.",
    "mtp:spec_decode_num_draft_tokens_total": "Draft tokens.",
    "mtp:spec_decode_num_accepted_tokens_total": "Draft tokens that were kept.",
    "mtp:spec_decode_num_accepted_tokens_per_pos_total": "Draft tokens that were kept, by position in the draft.",
    "mtp:prefix_cache_queries_total": "Tokens that were looked up among the texts that were read before.",
    "mtp:prefix_cache_hits_total": "Tokens that were found there.",
}
GAUGES = {
    "mtp:num_requests_running": "Answers that have a slot.",
    "mtp:num_requests_waiting": "Answers that wait for a slot.",
    "mtp:batch_width": "Answers that shared the last round.",
    "mtp:prefix_cache_bytes": "Memory of the texts that were read before.",
}
FIRST, BETWEEN = "mtp:time_to_first_token_seconds", "mtp:inter_token_latency_seconds"
HISTOGRAMS = {
    FIRST: "From submission to the first token.",
    BETWEEN: "Time between two deliveries over the tokens of the later one.",
}
Key = tuple[str, tuple[tuple[str, str], ...]]


class Metrics(Watch):
    """Counts in the engine's thread, and publishes there."""

    def __init__(self, utils: Any, labels: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        """`utils` is the module `triton_python_backend_utils`; `labels` tell instances apart."""
        self._utils, self._labels, self._clock = utils, dict(labels), clock
        self._values: dict[Key, float] = {}
        self._published: dict[Key, float] = {}
        self._families: dict[str, Any] = {}
        self._metrics: dict[Key, Any] = {}
        # Of each answer that has said something, when that was.
        self._newest: WeakKeyDictionary[Ticket, dict[int, float]] = WeakKeyDictionary()
        self._observed: list[tuple[str, float]] = []
        self._due, self._works = 0.0, True

    def finished(self, ticket: Ticket, event: Finished) -> None:
        """Count an answer and its drafts."""
        self._add("mtp:prompt_tokens_total", event.prompt_tokens if event.completion.index == 0 else 0)
        self._add("mtp:request_success_total", 1, finished_reason=event.finish_reason)
        stats, prefix = event.stats, "mtp:spec_decode_num_"
        self._add(f"{prefix}drafts_total", sum(stats.proposed_by_position[:1]))
        self._add(f"{prefix}draft_tokens_total", stats.drafted)
        self._add(f"{prefix}accepted_tokens_total", stats.accepted)
        for position, count in enumerate(stats.accepted_by_position):
            self._add(f"{prefix}accepted_tokens_per_pos_total", count, position=str(position))
        self._due = 0.0

    def entered(self, ticket: Ticket) -> None:
        """Tell soon of a change in what runs and waits."""
        self._due = 0.0

    def emitted(self, ticket: Ticket, event: Emitted) -> None:
        """Count tokens, and note the time since the ones before."""
        count, now, newest = len(event.token_ids), self._clock(), self._newest.setdefault(ticket, {})
        if not count:
            return
        self._add("mtp:generation_tokens_total", count)
        before, newest[event.index] = newest.get(event.index), now
        if before is None:
            self._observed.append((FIRST, now - ticket.submitted))
        else:
            # Once for all of them, where the HTTP server has it once for each: here each takes a message, too.
            self._observed.append((BETWEEN, (now - before) / count))

    def preempted(self, ticket: Ticket) -> None:
        """Count it."""
        self._add("mtp:num_preemptions_total", 1)

    def failed(self, ticket: Ticket, error: Exception) -> None:
        """Count it."""
        self._add("mtp:request_failure_total", 1)
        self._due = 0.0

    def degraded(self, ticket: Ticket, error: Exception) -> None:
        """Count it."""
        self._add("mtp:drafter_failures_total", 1)

    def round(self, widths: Sequence[int], scheduler: Busy) -> None:
        """Take the state of the scheduler."""
        gauges = {
            "mtp:num_requests_running": scheduler.running,
            "mtp:num_requests_waiting": scheduler.queued,
            "mtp:batch_width": len(widths),
            "mtp:prefix_cache_bytes": scheduler.prefixes.nbytes,
            "mtp:prefix_cache_queries_total": scheduler.prefixes.queries,
            "mtp:prefix_cache_hits_total": scheduler.prefixes.hits,
        }
        self._values |= {(name, ()): float(value) for name, value in gauges.items()}
        if not scheduler.running:
            self._due = 0.0

    def publish(self) -> None:
        """Tell the server what changed, if it is time; a server without metrics is asked once."""
        now = self._clock()
        if not self._works or now < self._due:
            return
        self._due = now + _INTERVAL_S
        try:
            for key, value in self._values.items():
                if value != self._published.get(key, 0.0) or key not in self._metrics:
                    self._tell(key, value)
            self._tell_observed()
        except Exception as error:
            _LOG.warning("this server takes no metrics, so none are published: %s", error)
            self._works = False
            self._observed.clear()

    def close(self) -> None:
        """Let go of everything; metrics before their families, as the server wants it."""
        self._metrics.clear()
        self._families.clear()

    def _add(self, name: str, amount: float, **labels: str) -> None:
        key = (name, tuple(labels.items()))
        self._values[key] = self._values.get(key, 0.0) + amount

    def _tell(self, key: Key, value: float) -> None:
        kinds, counts = self._utils.MetricFamily, key[0] in COUNTERS
        metric = self._metric(key, kinds.COUNTER if counts else kinds.GAUGE)
        if counts:
            metric.increment(value - self._published.get(key, 0.0))
        else:
            metric.set(value)
        self._published[key] = value

    def _tell_observed(self) -> None:
        """One by one; older servers know no histograms, and tell of times no more than their own statistics do."""
        observed, self._observed = self._observed, []
        kind = getattr(self._utils.MetricFamily, "HISTOGRAM", None)
        if kind is None:
            return
        for name, seconds in observed:
            self._metric((name, ()), kind, buckets=list(BUCKETS_S)).observe(seconds)

    def _metric(self, key: Key, kind: Any, **options: Any) -> Any:
        name, labels = key
        if name not in self._families:
            text = (COUNTERS | GAUGES | HISTOGRAMS)[name]
            self._families[name] = self._utils.MetricFamily(name=name, description=text, kind=kind)
        if key not in self._metrics:
            self._metrics[key] = self._families[name].Metric(labels=self._labels | dict(labels), **options)
        return self._metrics[key]
