"""The result of a benchmark as one JSON object, and as tables."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mtp_engines.bundle import WEIGHTS, Bundle
from mtp_tools.bench.measuring import Measured, Plan
from mtp_tools.bench.sizes import Sizes, StepBytes
from mtp_tools.bench.summary import PARTS, Row, Spread, shares, spread, step_seconds

_SPEED = "drafts | K | prefill tok/s | decode tok/s | against plain | draft ms | verify ms | commit ms | Python us"
_COUNTS = (
    "drafts | K | accepted / drafted | kept of proposed, by position | emitted a cycle | cycles by emitted tokens | "
    "cycles by K"
)


@dataclass(frozen=True)
class Memory:
    """Bytes of this process, and what the manifest says the model needs."""

    before_loading: int
    after_loading: int
    peak: int
    expected: Sizes

    def as_dict(self) -> dict[str, Any]:
        """With the ratio of what loading and running added to what was expected."""
        added = self.peak - self.before_loading
        return {
            "resident_before_loading_bytes": self.before_loading,
            "resident_after_loading_bytes": self.after_loading,
            "peak_bytes": self.peak,
            "weights_bytes": self.expected.weights,
            "caches_bytes": self.expected.caches,
            "states_bytes": self.expected.states,
            "expected_bytes": self.expected.total,
            "peak_over_expected": self.peak / self.expected.total,
            "added_over_expected": added / self.expected.total,
        }


def roofline(measured: Measured, step: StepBytes, how: str, threads: int) -> dict[str, Any]:
    """What of a plain step is explained by the bytes that it must read."""
    seconds = step_seconds(measured.rounds)
    return {
        "bandwidth_bytes_per_s": asdict(spread(measured.bandwidths)),
        "bandwidth_how": how,
        "threads": threads,
        "step_weights_bytes": step.weights,
        "step_cache_bytes": step.cache,
        "step_states_bytes": step.states,
        "step_bytes": step.total,
        "share_of_step": asdict(shares(seconds, measured.bandwidths, step.total)),
    }


def case_dict(row: Row) -> dict[str, Any]:
    """A row for JSON."""
    return {
        "draft_tokens": row.case.draft_tokens,
        "draft_branches": row.case.draft_branches,
        "verified_rows": row.case.verified_rows,
        "forced_acceptance": row.case.acceptance,
        "figures": {name: asdict(value) for name, value in row.figures.items()},
        "over_plain": {name: asdict(value) for name, value in row.ratios.items()},
        "stats": row.stats,
    }


def bundle_dict(bundle: Bundle) -> dict[str, Any]:
    """What was measured, so that the same bundle can be found or built again."""
    manifest = bundle.manifest
    return {
        "name": manifest.name,
        "source_digest": manifest.source_digest,
        "weights_sha256": manifest.files[WEIGHTS].sha256,
        "weights": asdict(manifest.weights),
        "numerics": manifest.numerics.promise,
        "max_model_len": manifest.limits.max_model_len,
        "max_draft_tokens": manifest.limits.max_draft_tokens,
        "built_with": manifest.versions,
    }


def tokens_sha256(measured: Measured, plan: Plan) -> str:
    """Digest of the plain answers, which are those of every case."""
    text = repr([list(answer.token_ids) for answer in measured.rounds[0][plan.cases[0]]])
    return hashlib.sha256(text.encode()).hexdigest()


def speed_table(rows: Sequence[Row]) -> Iterator[str]:
    """Medians of the rounds, least and greatest of what is compared in brackets."""
    yield from _header(_SPEED)
    for row in rows:
        figures = row.figures
        parts = " | ".join(_milliseconds(figures[f"{part}_ms"].median) for part in PARTS)
        python = figures["python_us_per_cycle"].median
        yield (
            f"| {_name(row)} | {_bracketed(figures['prefill_tokens_per_s'], '.1f')} | "
            f"{_bracketed(figures['decode_tokens_per_s'], '.1f')} | "
            f"{_bracketed(row.ratios['decode_tokens_per_s'], '.2f')} | {parts} | {python:.0f} |"
        )


def counts_table(rows: Sequence[Row]) -> Iterator[str]:
    """What was accepted; the same in every round."""
    yield from _header(_COUNTS)
    for row in rows:
        stats = row.stats
        positions = " / ".join(f"{rate:.2f}" for rate in stats["acceptance_by_position"])
        emitted, chosen = (
            ", ".join(f"{number}: {count}" for number, count in stats[name].items())
            for name in ("emitted_histogram", "draft_tokens_chosen")
        )
        counts = f"{stats['accepted']} / {stats['drafted']}" if stats["drafted"] else ""
        yield f"| {_name(row)} | {counts} | {positions} | {stats['emitted_per_cycle']:.2f} | {emitted} | {chosen} |"


def memory_line(memory: dict[str, Any]) -> str:
    """Memory in one line."""
    expected = " + ".join(f"{name} {_mb(memory[f'{name}_bytes'])}" for name in ("weights", "caches", "states"))
    return (
        f"memory: {_mb(memory['resident_before_loading_bytes'])} MB before loading, "
        f"{_mb(memory['resident_after_loading_bytes'])} after, peak {_mb(memory['peak_bytes'])}; {expected} = "
        f"{_mb(memory['expected_bytes'])} MB; the peak is {memory['peak_over_expected']:.2f} times that, and "
        f"{memory['added_over_expected']:.2f} times without what was there before loading"
    )


def roofline_line(found: dict[str, Any] | None, fits_cache: bool) -> str:
    """The share of a step that reading explains, in one line."""
    if found is None:
        return "roofline: left out, since only ONNX Runtime on a CPU reads weights as the bundle has them"
    share, bandwidth = found["share_of_step"], found["bandwidth_bytes_per_s"]["median"]
    note = "; so small a model may be read from the CPU's caches, then the share says little" if fits_cache else ""
    least, middle, greatest = (f"{100 * share[name]:.0f}" for name in ("least", "median", "greatest"))
    return (
        f"roofline: a plain step reads {found['step_bytes'] / 1e6:.1f} MB, which at {bandwidth / 1e9:.1f} GB/s takes "
        f"{middle} % ({least} .. {greatest}) of its time{note} [{found['bandwidth_how']}]"
    )


def _name(row: Row) -> str:
    rate = "" if row.case.acceptance is None else f"{row.case.acceptance:g} forced"
    branches = row.case.draft_branches
    tree = f"head, {branches} branch{'es' if branches > 1 else ''}, {row.case.verified_rows} rows" if branches else ""
    return f"{rate or tree or ('head' if row.case.draft_tokens else 'plain')} | {row.case.draft_tokens}"


def _header(columns: str) -> tuple[str, str]:
    return f"| {columns} |", "|" + "---|" * (columns.count("|") + 1)


def _bracketed(value: Spread, form: str) -> str:
    return f"{value.median:{form}} ({value.least:{form}} .. {value.greatest:{form}})"


def _milliseconds(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}"


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f}"
