"""`verify`: row by row says what rows together say, and what plain decoding says where rows together do not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mtp_engines.backends.gpu.sequences import DeviceSequences
from mtp_engines.backends.onnxruntime_cpu.sequences import CpuSequences
from mtp_engines.backends.options import EngineOptions
from mtp_engines.bundle import BACKBONE
from mtp_engines.engine import Ids, Sequences, Verified
from mtp_engines.errors import NumericsError
from mtp_runtime import Finished, Model, load
from mtp_runtime.acceptance import GreedyAcceptor
from mtp_runtime.drafters.none import NoDrafter
from mtp_runtime.loop import Generation, Parts
from mtp_runtime.policy import FixedPolicy
from mtp_runtime.stats import Seconds, Stats
from mtp_runtime.timing import TimedAcceptor, TimedDrafter, TimedSequences
from mtp_runtime.verification import RowByRow, Scored
from tests.fixtures.checkpoints import markov_checkpoint, partial_checkpoint
from tests.runtime.changed import changed, forty_after_eight
from tests.runtime.conftest import Models
from tests.runtime.parts import Run, collect, counts, limit_only
from tests.runtime.test_statistics import AsksTheEngine, FakeEngine
from tests.support import build_bundle, load_model, refused, run_command

PROMPT = [5, 6, 20]
PIECES = ("A", "bc", "dS", "TO", "P!", "ef", "gh")
WARM: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 3}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": WARM,
    "rejection": WARM | {"acceptor": "rejection"},
    "scores": {"logprobs": 3, "prompt_logprobs": 2},
    "drawn scores": WARM | {"logprobs": 2},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    "lossy": {"acceptor": "typical"},
}


@pytest.fixture(params=["carried", "hybrid", "partial", "markov"])
def model(request: pytest.FixtureRequest, hybrid: Models, markov: Models) -> Model:
    """Trained; random; right sometimes; wrong after every third token."""
    made = {"hybrid": lambda: hybrid(seed=30), "markov": lambda: markov(draft="third")}
    return made.get(request.param, lambda: request.getfixturevalue(request.param))()


def said(model: Model, draft_tokens: int, verify: str = "step", **options: Any) -> Finished:
    """One answer of a fixed length, unless the options say otherwise."""
    options = {"prompt_ids": PROMPT, "max_new_tokens": 24, "ignore_eos": True, **options}
    return model.complete(**options, draft_tokens=draft_tokens, verify=verify)


def everything(finished: Finished) -> tuple[Any, ...]:
    """All but the times; log-probabilities are compared bit by bit."""
    return (
        finished.token_ids,
        finished.text,
        finished.finish_reason,
        finished.logprobs,
        finished.prompt_logprobs,
        finished.completion,
        counts(finished),
    )


@pytest.mark.parametrize("asked", REQUESTS)
def test_row_by_row_says_and_counts_what_rows_together_do(model: Model, asked: str) -> None:
    """At the same K on an exact engine, with drafts that are kept and drafts that are not."""
    kept = 0
    for draft_tokens in range(5):
        options = REQUESTS[asked]
        rows, step = (said(model, draft_tokens, verify, **options) for verify in ("rows", "step"))
        assert everything(step) == everything(rows)
        if asked not in ("rejection", "lossy"):
            assert step.token_ids == said(model, 0, "rows", **options).token_ids
        kept += step.stats.accepted
    if model.manifest.name == "tiny-mtp":
        assert kept > 0


@pytest.mark.parametrize("drafter", ["ngram", "mtp+ngram"])
def test_looked_up_drafts_too(carried: Model, drafter: str) -> None:
    rows, step = (
        said(carried, 3, verify, drafter=drafter, prompt_ids=PROMPT * 4, max_new_tokens=40)
        for verify in ("rows", "step")
    )
    assert everything(step) == everything(rows)
    assert step.stats.accepted_by_source["ngram"] > 0


class Aliased(RowByRow):
    """A fault: rows are kept as the engine's own memory, which the next run writes over."""

    def _row(self, index: int) -> Verified:
        while len(self._rows) <= index:
            if self._rows:
                self._sequences.commit(np.array([1]))
            self._rows.append(self._verify(np.array([[self._tokens[len(self._rows)]]]), 1))
        return self._rows[index]


class Eager(RowByRow):
    """A fault: rows are run before anybody asks for them, those of rejected tokens too."""

    def begin(self, pending: int, draft: list[int]) -> tuple[list[int], Scored]:
        found = super().begin(pending, draft)
        self._row(len(draft))
        return found


def test_control_hidden_rows_that_are_written_over_are_seen(partial: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head drafts from them: no token shows it, the statistics do."""
    right = said(partial, 3, "rows")
    monkeypatch.setattr("mtp_runtime.verification.RowByRow", Aliased)
    wrong = said(partial, 3)
    assert wrong.token_ids == right.token_ids
    assert counts(wrong) != counts(right)


def _states(model: Model, draft_tokens: int, verify: str) -> Run:
    """A greedy run with the digests of every committed state."""
    sequences = model.engine.sequences()
    drafter = model.drafter(sequences) if draft_tokens else NoDrafter()
    policy, ending = FixedPolicy(draft_tokens), limit_only(12)
    parts = model.run(PROMPT, sequences, drafter, policy, ending, None, None, None, verify)
    return collect(parts, sequences)


def test_every_committed_state_is_that_of_plain_decoding(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every cycle and at the end; the control runs rows that nobody asked for."""
    plain = _states(model, 0, "rows")
    last = max(plain.states)
    for draft_tokens in range(5):
        step = _states(model, draft_tokens, "step")
        assert last in step.states, "the last state was not looked at"
        assert {length: plain.states[length] for length in step.states} == step.states
    monkeypatch.setattr("mtp_runtime.verification.RowByRow", Eager)
    wrong = _states(model, 3, "step")
    assert any(plain.states.get(length) != state for length, state in wrong.states.items())


# Engines whose rows depend on how many run at once


def _flips(wide_gap: float) -> Any:
    """A CPU engine that takes the second best token in wide runs where the best one is ahead by less than this."""
    right = CpuSequences.verify

    def verify(self: CpuSequences, tokens: Ids, logit_rows: int, *, logits: bool = False) -> Verified:
        if tokens.shape[1] == 1 or not self.lengths[0]:
            return right(self, tokens, logit_rows, logits=logits)
        found = right(self, tokens, logit_rows, logits=True)
        assert found.logits is not None
        scores, order = found.logits.copy(), np.argsort(found.logits, axis=-1)[..., -2:]
        best, second = np.moveaxis(np.take_along_axis(scores, order[..., ::-1], -1), -1, 0)
        close = best - second < wide_gap
        for place in zip(*np.nonzero(close), strict=True):
            scores[place][order[place]] = scores[place][order[place][::-1]]
        ids = np.where(close, order[..., 0], found.ids)
        return Verified(ids, found.hidden, scores if logits else None)

    return verify


@pytest.mark.parametrize("asked", ["greedy", "coupled", "scores", "penalties"])
def test_row_by_row_is_plain_decoding_where_rows_together_are_not(
    carried: Model, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control is the same engine with rows together."""
    options = REQUESTS[asked]
    plain = said(carried, 0, "rows", **options)
    monkeypatch.setattr(CpuSequences, "verify", _flips(0.6))
    assert said(carried, 0, "rows", **options).token_ids == plain.token_ids
    for draft_tokens in range(1, 5):
        step = said(carried, draft_tokens, **options)
        assert everything(step)[:6] == everything(plain)[:6]
        assert step.stats.accepted > 0
    # A draw changes only where one of the two best tokens wins, so a longer text is looked at.
    options = {"max_new_tokens": 60, **options}
    plain = said(carried, 0, "rows", **options)
    together = [said(carried, draft_tokens, "rows", **options).token_ids for draft_tokens in range(1, 5)]
    assert any(ids != plain.token_ids for ids in together)


@pytest.fixture(scope="module")
def on_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A head that is right sometimes, through the runner of the GPU backends; PyTorch's threads are the process's."""
    before, place = torch.get_num_threads(), tmp_path_factory.mktemp("torch")
    layers = ["linear_attention", "full_attention"]
    partial_checkpoint(place / "checkpoint", layer_types=layers, noise=0.2, head_noise=1.0)
    bundle = build_bundle(place / "checkpoint", place / "bundle", draft_tokens=3)
    yield load(bundle, options=EngineOptions(backend="torch", device="cpu", threads=1))
    torch.set_num_threads(before)


@pytest.mark.parametrize("asked", ["greedy", "coupled", "scores"])
def test_row_by_row_is_plain_decoding_through_the_runner_of_the_gpu_backends(
    on_torch: Model, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain decoding goes through whole cycles there, row by row through the host; the control changes wide runs."""
    options = {"max_new_tokens": 19, **REQUESTS[asked]}
    plain = said(on_torch, 0, "rows", **options)
    right = DeviceSequences.verify

    def off_by_one(self: DeviceSequences, tokens: Ids, logit_rows: int, *, logits: bool = False) -> Verified:
        found = right(self, tokens, logit_rows, logits=logits)
        if tokens.shape[1] == 1 or not self.lengths[0]:
            return found
        scores = None if found.logits is None else np.roll(found.logits, 1, axis=-1)
        return Verified((found.ids + 1) % 64, found.hidden, scores)

    monkeypatch.setattr(DeviceSequences, "verify", off_by_one)
    monkeypatch.setattr(DeviceSequences, "cycle", None)
    for draft_tokens in range(1, 4):
        step = said(on_torch, draft_tokens, **options)
        assert everything(step)[:6] == everything(plain)[:6]
        assert step.stats.accepted > 0
        # A lookup before the head keeps rows together on the host, too.
        together = said(on_torch, draft_tokens, "rows", drafter="mtp+ngram", **options)
        assert together.token_ids != plain.token_ids


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The chain t + 1 whose head drafts 40 after 8, which gives NaN."""
    place = tmp_path_factory.mktemp("poisoned")
    markov_checkpoint(place / "checkpoint", draft=forty_after_eight)
    bundle = build_bundle(place / "checkpoint", place / "bundle", draft_tokens=4)
    return load_model(changed(bundle, place / "changed", BACKBONE, "embedding", (40, 0), np.nan))


@pytest.mark.parametrize("draft_tokens", range(1, 5))
def test_a_draft_that_is_not_finite_is_rejected_like_another(
    poisoned: Model, draft_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row is never run, so what was drafted before it is kept; the control runs it."""
    options = {"prompt_ids": [7], "max_new_tokens": 20}
    done = said(poisoned, draft_tokens, **options)
    assert list(done.token_ids) == list(range(8, 28))
    assert done.stats.drafted_by_source["mtp"] > done.stats.accepted > 0
    monkeypatch.setattr("mtp_runtime.verification.RowByRow", Eager)
    with pytest.raises(NumericsError):
        said(poisoned, draft_tokens, **options)


# Ends


@pytest.mark.parametrize("draft_tokens", range(5))
def test_an_end_token_at_every_place_of_a_block(markov: Models, draft_tokens: int) -> None:
    places = set()
    for start in range(22, 30):
        options = {"prompt_ids": [start], "draft_tokens": draft_tokens, "max_new_tokens": 20}
        run = collect(markov(eos=30).generate(**options, verify="step"))
        assert everything(run.finished) == everything(markov(eos=30).complete(**options))
        assert run.ids == list(range(start + 1, 31))
        places.add(len(run.blocks[-1]))
    assert places == set(range(1, draft_tokens + 2)), "an end at some place of a block was not reached"


@pytest.mark.parametrize("draft_tokens", [0, 2, 3])
@pytest.mark.parametrize("stop", ["bc", "S", "STOP", "ef", ["gh", "P!e"]])
def test_a_stop_text_inside_a_block(markov: Models, stop: str | list[str], draft_tokens: int) -> None:
    model = markov(pieces=PIECES)
    options = {"prompt": "A", "max_new_tokens": 6, "draft_tokens": draft_tokens, "stop": stop}
    step = model.complete(**options, verify="step")
    assert everything(step) == everything(model.complete(**options))
    assert step.finish_reason == "stop"


@pytest.mark.parametrize("limit", range(10))
def test_a_limit_inside_a_block(markov: Models, limit: int) -> None:
    step, rows = (said(markov(), 3, verify, max_new_tokens=limit) for verify in ("step", "rows"))
    assert everything(step) == everything(rows)
    assert len(step.token_ids) == limit


def test_the_context_to_its_last_token(partial: Model) -> None:
    step, rows = (
        said(partial, 4, verify, prompt_ids=[7] * 100, max_new_tokens=99, ignore_eos=True)
        for verify in ("step", "rows")
    )
    assert everything(step) == everything(rows)
    assert len(step.token_ids) == 28


# Requests


def test_auto_has_nothing_to_choose_row_by_row(partial: Model) -> None:
    with refused("verify is 'step'", "draft_tokens is 'auto'", "use verify 'rows'"):
        partial.complete(prompt_ids=PROMPT, draft_tokens="auto", verify="step")
    assert partial.complete(prompt_ids=PROMPT, max_new_tokens=3, draft_tokens="auto", verify="rows").token_ids


def test_an_unknown_way_is_refused(partial: Model) -> None:
    with refused("verify = 'columns'", "'rows' or 'step'"):
        partial.complete(prompt_ids=PROMPT, verify="columns")


def test_the_command_takes_it(partial: Model, tmp_path: Path) -> None:
    command = ["mtp-run", "generate", partial.bundle.directory, "--prompt-ids", "5,6,20", "--max-new-tokens", "9"]
    shown = [run_command(*command, "--verify", verify) for verify in ("rows", "step")]
    assert [result.returncode for result in shown] == [0, 0], shown[1].stderr
    assert shown[0].stdout == shown[1].stdout != ""


# Times


class TakesAMillisecond(GreedyAcceptor):
    """An acceptor whose own work takes a millisecond a cycle on the engine's clock."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__()
        self._engine = engine

    def accept(self, draft: Any, scored: Scored) -> list[int]:
        self._engine.now += 0.001
        return super().accept(draft, scored)


def _timed_run(tokens: int) -> tuple[Seconds, float]:
    """Times of a run row by row on a clock that only the parts move, and what the clock shows at its end."""
    engine, stats = FakeEngine(), Stats()
    prefill: Sequences = TimedSequences(engine, stats.seconds, ("prefill", "prefill"), engine.clock)
    timed = TimedSequences(engine, stats.seconds, clock=engine.clock)
    drafter = TimedDrafter(AsksTheEngine(timed), stats.seconds, engine.clock)
    verification, policy = RowByRow(timed, logits=False), FixedPolicy(3)
    acceptor = TimedAcceptor(TakesAMillisecond(engine), stats.seconds, engine.clock)
    list(
        Generation(
            [5], Parts(prefill, verification, drafter, policy, limit_only(tokens), stats, 256, acceptor=acceptor)
        )
    )
    return stats.seconds, engine.now


def test_rows_that_run_while_they_are_judged_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten cycles of four rows: 40 runs and 40 commits of 10 ms, none of which is time of the acceptor."""
    seconds, wall = _timed_run(41)
    found = (seconds.prefill, seconds.draft, seconds.verify, seconds.commit, seconds.accept)
    assert found == pytest.approx((0.1, 0.1, 0.4, 0.4, 0.011))
    assert seconds.total == pytest.approx(wall)

    @contextmanager
    def inclusive(seconds: Seconds, part: str, clock: Any) -> Iterator[None]:
        start = clock()
        yield
        setattr(seconds, part, getattr(seconds, part) + clock() - start)

    monkeypatch.setattr("mtp_runtime.timing.timed", inclusive)
    seconds, wall = _timed_run(41)
    assert seconds.total > 1.5 * wall, "control: nested parts would count twice"
