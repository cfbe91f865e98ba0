"""Counters and gauges of one instance, for Triton's own metrics endpoint."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mtp_runtime.batching.tickets import Ticket
from mtp_runtime.batching.watch import Busy, Watch
from mtp_runtime.events import Emitted, Finished

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
        """Count tokens."""
        self._add("mtp:generation_tokens_total", len(event.token_ids))

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
        except Exception as error:
            _LOG.warning("this server takes no metrics, so none are published: %s", error)
            self._works = False

    def close(self) -> None:
        """Let go of everything; metrics before their families, as the server wants it."""
        self._metrics.clear()
        self._families.clear()

    def _add(self, name: str, amount: float, **labels: str) -> None:
        key = (name, tuple(labels.items()))
        self._values[key] = self._values.get(key, 0.0) + amount

    def _tell(self, key: Key, value: float) -> None:
        name, labels = key
        counts = name in COUNTERS
        if name not in self._families:
            kinds, text = self._utils.MetricFamily, (COUNTERS | GAUGES)[name]
            kind = kinds.COUNTER if counts else kinds.GAUGE
            self._families[name] = self._utils.MetricFamily(name=name, description=text, kind=kind)
        if key not in self._metrics:
            self._metrics[key] = self._families[name].Metric(labels=self._labels | dict(labels))
        if counts:
            self._metrics[key].increment(value - self._published.get(key, 0.0))
        else:
            self._metrics[key].set(value)
        self._published[key] = value
