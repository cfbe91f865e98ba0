"""What the tests of the dense families share: a bundle beside its oracle, and runs of its single sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mtp_engines.contracts import names
from mtp_engines.contracts.model import AttentionSpec, MtpSpec
from mtp_engines.engine import Sequences
from mtp_exporter.checking.pieces import run_head
from mtp_runtime import Model
from mtp_runtime.policy import DraftPolicy
from tests.fixtures.head_rows import every_row
from tests.oracles.dense_families import DenseOracle, open_dense_oracle
from tests.oracles.float64 import Speculation
from tests.runtime.parts import Run, recorded
from tests.support import build_bundle, load_model

IDS: list[int] = np.random.default_rng(0).integers(0, 64, 23).tolist()
PROMPT = [5, 6, 20]
# Share of the greatest value. Rounding to float32 gives up to 4e-5 after chained rows of EAGLE-1, which norms nothing,
# and less than 1e-5 elsewhere; the mildest fault of the oracle moves 2.5e-2.
TOLERANCE = 1e-4
VISIBLE = 1e-2

Arrays = dict[str, np.ndarray]


@dataclass
class Pair:
    """A target, the draft beside it if there is one, and the loaded bundle of both.

    tap: the oracle's name of the hidden state that an embedded head is fed, None for its family's own.
    """

    target: Path
    draft: Path | None
    model: Model
    tap: str | None = None
    _spoken: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    @cached_property
    def oracle(self) -> DenseOracle:
        return self.broken(None)

    def broken(self, fault: str | None) -> DenseOracle:
        return open_dense_oracle(self.target, self.draft, fault, self.tap)

    def or_none(self, fault: str) -> DenseOracle | None:
        """The broken oracle; None where it refuses a fault that could not change anything."""
        try:
            return self.broken(fault)
        except ValueError as error:
            if "changes nothing" not in str(error):
                raise
            return None

    @property
    def head(self) -> MtpSpec:
        assert self.model.manifest.model.mtp is not None
        return self.model.manifest.model.mtp

    def speculate(self, prompt: Sequence[int], limit: int, draft_tokens: int) -> Speculation:
        """The oracle's loop, each once."""
        key = (*prompt, limit, draft_tokens)
        if key not in self._spoken:
            self._spoken[key] = self.oracle.speculate(prompt, limit, draft_tokens)
        found: Speculation = self._spoken[key]
        return found

    def greedy(self, prompt: Sequence[int], limit: int) -> list[int]:
        """The oracle's plain decoding, each once."""
        key = (*prompt, limit)
        if key not in self._spoken:
            self._spoken[key] = self.oracle.greedy(prompt, limit)
        ids: list[int] = self._spoken[key]
        return ids


def pair_of(place: Path, target: Path, draft: Path | None = None, *, tap: str | None = None, **options: Any) -> Pair:
    """Build and load at `place`; options: of the build."""
    if draft is not None:
        options["draft_model"] = str(draft)
    if tap is not None:
        options["hidden_tap"] = tap.replace("_", "-")
    bundle = build_bundle(target, place, **{"draft_tokens": None, "max_model_len": 96, **options})
    return Pair(target, draft, load_model(bundle), tap)


# ------------------------------------------------------------------------------- single sessions


def target_run(model: Model, ids: Sequence[int], blocks: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """What the head is fed, and the logits, for ids that run in blocks of the given sizes."""
    assert sum(blocks) == len(ids)
    sequences: Any = model.engine.sequences()
    taps, hidden, start = [], [], 0
    for size in blocks:
        taps.append(sequences.verify(np.array([ids[start : start + size]]), 0).hidden[0].copy())
        # A head may be fed another tensor than the vocabulary head, and only the step has both.
        hidden.append(sequences._steps[size].hidden[0].copy())
        sequences.commit(np.array([size]))
        start += size
    return np.concatenate(taps), sequences.logits(np.concatenate(hidden))


def head_run(
    model: Model,
    depth: int,
    tokens: Sequence[int],
    hidden: np.ndarray,
    after: Arrays | None = None,
    start: int = 0,
    *,
    chained: bool = False,
) -> tuple[Arrays, Arrays]:
    """One depth of the head over rows whose first has position `start`.

    hidden: rows of the tap, or with `chained` the head's own. after: the cache of the run before.

    Returns:
        The outputs float[rows, width] by name, and the cache.
    """
    engine: Any = model.engine
    mtp, session = engine.spec.mtp, engine.sessions.mtp[depth]
    mixer, rows = mtp.layers[depth].mixer, np.asarray(hidden, np.float32)[None]
    assert isinstance(mixer, AttentionSpec)
    empty = np.zeros((1, mixer.num_kv_heads, 64, mixer.head_dim), np.float32)
    cache = {names.past_key(0): empty, names.past_value(0): empty.copy()} if after is None else after
    feed = {
        names.INPUT_IDS: np.array([tokens], np.int64),
        names.tap_of(mtp): rows,
        names.POSITION_IDS: np.arange(start, start + len(tokens))[None],
        names.PAST_LENGTH: np.array([start]),
        **{name: array.copy() for name, array in cache.items()},
    }
    if mtp.tap_projection:
        none = np.zeros((1, 0, mtp.tap_width(engine.spec.hidden_size)), np.float32)
        feed[names.CHAIN] = rows if chained else np.zeros((1, 0, mtp.hidden_size), np.float32)
        feed[names.tap_of(mtp)] = none if chained else rows
    found = every_row(session, feed)
    outputs = {name: found[name][0] for name in (names.HIDDEN_OUT, names.CHAIN_OUT) if name in found}
    presents = [found[name] for name in (names.present_key(0), names.present_value(0))]
    return outputs, dict(zip(cache, presents, strict=True))


def chain_of(outputs: Arrays) -> np.ndarray:
    """The rows that a chained step takes."""
    return outputs.get(names.CHAIN_OUT, outputs[names.HIDDEN_OUT])


def head_logits(model: Model, outputs: Arrays) -> np.ndarray:
    """Logits of the head's output over the vocabulary that it drafts from."""
    engine: Any = model.engine
    if engine.sessions.draft_head is None:
        return engine.sequences().logits(outputs[names.HIDDEN_OUT])
    (logits,) = engine.sessions.draft_head.score.run([names.LOGITS], {names.HIDDEN: outputs[names.HIDDEN_OUT]})
    return np.asarray(logits)


def drafted_ids(model: Model, tokens: Sequence[int], tap: np.ndarray) -> list[int]:
    """The first draft after every position, through the engine: one row a call."""
    sequences = model.engine.sequences()
    rows = np.asarray(tap, np.float32)
    return [
        int(sequences.draft(np.array([[token]]), rows[None, p : p + 1], np.array([1]), 1)[0, 0])
        for p, token in enumerate(tokens)
    ]


def head_stages(pair: Pair, depth: int, tokens: Sequence[int], hidden: np.ndarray) -> Arrays:
    """Every stage that the written graph names, without the prefix."""
    bundle, rows = pair.model.bundle, np.asarray(hidden, np.float32)[None]
    spec, limits = bundle.manifest.model, bundle.manifest.limits
    values = run_head(bundle.mtp[depth], spec, limits, depth, np.array(tokens), rows)
    prefix = names.stage("")
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


# ---------------------------------------------------------------------------------- comparisons


def share(got: np.ndarray, want: np.ndarray) -> float:
    """Greatest difference as a share of the greatest value."""
    assert got.shape == want.shape
    return float(np.abs(got - want).max() / np.abs(want).max())


def generated(pair: Pair, prompt: Sequence[int], limit: int, draft_tokens: int | DraftPolicy) -> tuple[Run, list[int]]:
    """A generation and how many drafts each cycle verified; drafts equal the oracle's, one by one."""
    run, recorder = recorded(pair.model, prompt, limit, draft_tokens=draft_tokens)
    chunks = -(-len(prompt) // pair.model.engine.limits.prefill_chunk)
    drafted = [rows - 1 for rows in recorder.verified_rows[chunks:]]
    proposals, known = iter(recorder.drafts), [*prompt, *run.blocks[0]]
    for count, block in zip(drafted, run.blocks[1:], strict=True):
        if count:
            assert next(proposals) == pair.oracle.draft(known, count)
        known += block
    assert next(proposals, None) is None
    return run, drafted


def agrees(pair: Pair, prompt: Sequence[int], limit: int, draft_tokens: int) -> set[int]:
    """Ids, drafts and accepted counts must be the oracle's; returns which counts occurred."""
    run, recorder = recorded(pair.model, prompt, limit, draft_tokens=draft_tokens)
    chunks = -(-len(prompt) // pair.model.engine.limits.prefill_chunk)
    if not draft_tokens:
        assert run.ids == pair.greedy(prompt, limit)
        assert (recorder.drafts, recorder.draft_calls, set(run.accepted)) == ([], 0, {0})
        return {0}
    want = pair.speculate(prompt, limit, draft_tokens)
    assert run.ids == want.ids
    assert [rows - 1 for rows in recorder.verified_rows[chunks:]] == want.drafted
    assert recorder.drafts == [draft for draft in want.drafts if draft]
    assert run.accepted == want.accepted
    assert (run.finished.stats.drafted, run.finished.stats.accepted) == (sum(want.drafted), sum(want.accepted))
    return set(want.accepted)


@dataclass(frozen=True)
class Built:
    """What a built bundle computes where a broken oracle may differ, given the right oracle's rows.

    target, head, chained: logits of the target, of the head over IDS, and of one chained row. depths: logits of the
    later depths. ids: the first draft after every position.
    """

    target: np.ndarray
    head: np.ndarray
    chained: np.ndarray
    depths: tuple[np.ndarray, ...]
    ids: list[int]

    @staticmethod
    def of(pair: Pair) -> Built:
        model, taken = pair.model, rows_of_depths(pair)
        outputs, cache = head_run(model, 0, *taken[0])
        row, _ = head_run(model, 0, [7], chain_of(outputs)[-1:], cache, len(IDS) - 1, chained=True)
        later = [head_logits(model, head_run(model, k, *taken[k])[0]) for k in range(1, len(taken))]
        return Built(
            target_run(model, IDS, [len(IDS)])[1],
            head_logits(model, outputs),
            head_logits(model, row),
            tuple(later),
            drafted_ids(model, *taken[0]),
        )


def rows_of_depths(pair: Pair) -> list[tuple[Sequence[int], np.ndarray]]:
    """Tokens and hidden rows of every depth over IDS, as the oracle computes them."""
    oracle = pair.oracle
    rows = oracle.head_input(oracle.forward(IDS))[:-1]
    found: list[tuple[Sequence[int], np.ndarray]] = []
    for k in range(oracle.depths):
        found.append((IDS[k + 1 :], rows[: len(IDS) - k - 1]))
        rows = oracle.head(*found[-1], **at(pair, k)).out if k + 1 < oracle.depths else rows
    return found


def at(pair: Pair, depth: int) -> dict[str, int]:
    """Arguments that name a depth to an oracle."""
    return {"depth": depth} if pair.oracle.kind == "mimo" else {}


def moved(pair: Pair, built: Built, fault: str) -> float | None:
    """How far a bundle is from the oracle with a fault, where that shows most; None if it changes nothing there."""
    wrong = pair.or_none(fault)
    if wrong is None:
        return None
    right, taken = pair.oracle, rows_of_depths(pair)
    forward, first = right.forward(IDS), right.head(*taken[0])
    theirs = wrong.head(*wrong.pair(IDS, wrong.head_input(forward)[:-1]))
    found = [share(built.target, wrong.forward(IDS).logits), share(built.head, theirs.logits)]
    position = len(IDS) - 1 - (fault == "chain_position_kept")
    row = wrong.head([7], wrong.head(*taken[0]).out[-1:], first.cache, position)
    found.append(share(built.chained, row.logits))
    for depth, logits in enumerate(built.depths, 1):
        found.append(share(logits, wrong.head(*taken[depth], depth=depth).logits))
    other = [wrong.token(logits) != token for logits, token in zip(first.logits, built.ids, strict=True)]
    return max(*found, float(np.mean(other)))


@dataclass
class Slot:
    """One sequence of a batch that drafts with the bundle's head."""

    prompt: list[int]
    limit: int
    ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)


def decode_together(sequences: Sequences, slots: Sequence[Slot], draft_tokens: int, mix_up: bool = False) -> None:
    """Run all slots to their ends; calls have K + 1 rows of every slot, prompts are cut into them.

    mix_up: a fault, the head gets the hidden rows of the neighbour.
    """
    batch, width = len(slots), draft_tokens + 1
    waiting = [list(slot.prompt) for slot in slots]
    drafts = np.zeros((batch, 0), np.int64)
    while any(len(slot.ids) < slot.limit for slot in slots):
        tokens, following = np.zeros((2, batch, width), np.int64)
        keep, rows = np.zeros((2, batch), np.int64)
        for b, slot in enumerate(slots):
            if waiting[b]:
                row, waiting[b] = waiting[b][:width], waiting[b][width:]
            elif len(slot.ids) < slot.limit:
                slot.drafts.append(drafts[b, : slot.limit - len(slot.ids) - 1].tolist())
                row = [slot.ids[-1], *slot.drafts[-1]]
            else:
                continue
            rows[b], tokens[b, : len(row)] = len(row), row
        verified = sequences.verify(tokens, width)
        for b, slot in enumerate(slots):
            chosen, count = verified.ids[b].tolist(), int(rows[b])
            if not count:
                continue
            if waiting[b] or not slot.ids:
                # The prompt: every row is kept, and the last one of all emits the first token.
                after = waiting[b][:1] or [chosen[count - 1]]
                slot.ids += [] if waiting[b] else after
                block = [*tokens[b, 1:count].tolist(), *after]
            else:
                draft = slot.drafts[-1]
                kept = next((i for i, token in enumerate(draft) if token != chosen[i]), len(draft))
                slot.accepted.append(kept)
                block = chosen[: kept + 1]
                slot.ids += block
            keep[b], following[b, : len(block)] = len(block), block
        hidden = verified.hidden.copy()
        sequences.commit(keep)
        drafts = sequences.draft(following, np.roll(hidden, 1, axis=0) if mix_up else hidden, keep, draft_tokens)
