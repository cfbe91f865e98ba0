"""`mtp-run verify` where rows together differ from plain decoding: rounding is settled as such, a fault is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mtp_engines.backends.onnxruntime_cpu.sequences import CpuSequences
from mtp_engines.backends.options import EngineOptions
from mtp_engines.contracts.manifest import BackendBuild
from mtp_engines.engine import Ids, Sequences, Verified
from mtp_runtime import Model, load
from mtp_runtime.verification import VerifyMode
from mtp_tools.verify import checks as checks_module
from mtp_tools.verify import cli
from mtp_tools.verify.checks import Line, checks
from mtp_tools.verify.forced import ForcedDrafter
from mtp_tools.verify.runs import CommitsEverything, Outcome, Plain, run_against, run_plain
from mtp_tools.verify.settle import Flip, Precision, Rounding, Settlement, settle
from tests.fixtures.checkpoints import edit_tensor, partial_checkpoint, read_tensors
from tests.runtime.conftest import CARRIED
from tests.support import build_bundle, load_model
from tests.tools.test_verify import CommitsOneTooFew, Faulty

PROMPT = [5, 6, 20]
ROUNDING = Rounding("fp32", 64)
Verify = Callable[..., Verified]


def _twins(array: np.ndarray) -> np.ndarray:
    """Ids 2 i and 2 i + 1 have one row: the best two tokens are always equal, and plain decoding takes the first."""
    return np.repeat(array[::2], 2, axis=0)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("near-tie")
    checkpoint = partial_checkpoint(place / "checkpoint")
    (head,) = (name for name in read_tensors(checkpoint) if name.endswith("lm_head.weight"))
    edit_tensor(checkpoint, head, _twins)
    return build_bundle(checkpoint, place / "bundle", draft_tokens=3)


@pytest.fixture
def model(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """An engine that promises no more than near-tie; what it does is left to the test."""
    loaded = load_model(bundle)
    monkeypatch.setattr(loaded.engine, "numerics", "near-tie")
    return loaded


def _rounded(steps: float, right: Verify = CpuSequences.verify, *, flips: bool = True) -> Verify:
    """Logits and hidden rows of wide runs are off by up to so many steps, the same ones whenever a run is repeated.

    Without `flips` twins stay equal, so that no token changes.
    """

    def verify(self: CpuSequences, tokens: Ids, logit_rows: int, *, logits: bool = False) -> Verified:
        wide = tokens.shape[1] > 1 and self.lengths[0] >= len(PROMPT)
        found = right(self, tokens, logit_rows, logits=logits or wide)
        if not wide:
            return found
        assert found.logits is not None
        noise = np.random.default_rng([int(self.lengths[0]), *tokens[0].tolist()])

        def off(rows: np.ndarray) -> np.ndarray:
            step = np.spacing(np.abs(rows).max(axis=-1, keepdims=True))
            return (rows + step * noise.uniform(-steps, steps, rows.shape)).astype(np.float32)

        scores, hidden = off(found.logits), off(found.hidden)
        if not flips:
            scores = np.repeat(scores[..., ::2], 2, axis=-1)
        return Verified(scores.argmax(axis=-1), hidden, scores if logits else None)

    return verify


def _forced(model: Model, right: int, fault: Callable[[Sequences], Any] | None = None) -> tuple[Plain, Outcome]:
    plain = run_plain(model, PROMPT, 24)
    drafter = ForcedDrafter(len(PROMPT), plain.ids, model.manifest.model.vocab_size, lambda cycle, k: min(right, k))
    return plain, run_against(model, plain, 3, drafter, fault)


def _settled(model: Model, right: int = 3, fault: Any = None, rounding: Rounding = ROUNDING) -> Settlement:
    plain, outcome = _forced(model, right, fault)
    assert not outcome.holds, "control: there is something to settle"
    return settle(model, plain, outcome, rounding, fault)


def test_rounding_is_settled_and_row_by_row_stays_exact(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuSequences, "verify", _rounded(2))
    lines = list(checks(model, 12, 20))
    assert [line.text for line in lines if not line.holds] == []
    assert sum(line.near_ties for line in lines) > 10
    flipped = next(line.text for line in lines if line.near_ties)
    for part in ("best two ids", "0.00e+00 apart", "32 count as rounding: near tie", "steps of rounding"):
        assert part in flipped
    by_step = [line for line in lines if "verify step" in line.text]
    assert [line.text.split("K = ")[1][:1] for line in by_step[:3]] == ["1", "2", "3"]
    assert not any(line.near_ties or line.is_rounded or ";" in line.text for line in by_step)
    assert any("control: rejected rows" in line.text for line in lines)


def test_the_same_on_a_bundle_that_promises_exact_is_a_failure_with_a_name(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuSequences, "verify", _rounded(2))
    monkeypatch.setattr(model.engine, "numerics", "exact")
    lines = list(checks(model, 12, 20))
    failed = [line.text for line in lines if not line.holds]
    assert any("near tie" in text and text.endswith("which breaks the promise `exact`") for text in failed)
    assert not any("verify step" in text or "control" in text or "bug" in text for text in failed)
    assert not any(line.near_ties for line in lines)


class SwapsRows(Faulty):
    """The last two rows of a wide run change places."""

    def verify(self, tokens: Ids, logit_rows: int, **options: bool) -> Verified:
        found = self.inner.verify(tokens, logit_rows, **options)
        if tokens.shape[1] == 1 or self.lengths[0] < len(PROMPT):
            return found
        order = [*range(logit_rows - 2), logit_rows - 1, logit_rows - 2]
        logits = None if found.logits is None else found.logits[:, order]
        return Verified(found.ids[:, order], found.hidden[:, order], logits)


class SaysAnother(Faulty):
    """The choice of every third row of a run is another id, no twin of the best one."""

    def verify(self, tokens: Ids, logit_rows: int, **options: bool) -> Verified:
        found = self.inner.verify(tokens, logit_rows, **options)
        return replace(found, ids=found.ids ^ (4 * (np.arange(logit_rows) == 2)))


class KeepsOneMore(CommitsEverything):
    """A rejected row stays, in length too."""

    def commit(self, rows: Ids) -> None:
        more = np.minimum(rows + 1, self._rows)
        self._inner.commit(more if self.lengths[0] < 40 else rows)


@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize(
    ("fault", "right"),
    [(CommitsEverything, 0), (KeepsOneMore, 0), (SwapsRows, 3), (SaysAnother, 3), (CommitsOneTooFew, 3)],
)
def test_a_fault_is_no_rounding(
    model: Model, fault: Any, right: int, near: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among rounding too, which alone would be settled."""
    if near:
        monkeypatch.setattr(CpuSequences, "verify", _rounded(2, flips=False))
        assert _settled(model, right).is_rounding, "control: without the fault"
    found = _settled(model, right, fault)
    assert not found.is_rounding
    assert str(found).endswith("bug")


def test_a_fault_in_the_state_alone_is_named(model: Model) -> None:
    found = _settled(model, 0, CommitsEverything)
    assert found.fault is not None
    assert "state past." in found.fault
    assert "32 count as rounding" in found.fault


@pytest.mark.parametrize(("steps", "is_rounding"), [(2, True), (25, True), (60, False), (4000, False)])
def test_the_bound_tells_rounding_from_more(
    model: Model, steps: float, is_rounding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 steps at a hidden size of 64."""
    monkeypatch.setattr(CpuSequences, "verify", _rounded(steps))
    assert _settled(model).is_rounding == is_rounding


def test_control_of_the_bound(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a bound large differences pass for rounding, with none allowed the smallest do not."""
    monkeypatch.setattr(CpuSequences, "verify", _rounded(4000))
    monkeypatch.setattr(Rounding, "allowed", math.inf)
    assert _settled(model).is_rounding
    monkeypatch.setattr(CpuSequences, "verify", _rounded(2))
    monkeypatch.setattr(Rounding, "allowed", 0.0)
    assert not _settled(model).is_rounding


def test_the_smallest_fault_is_far_beyond_the_bound(model: Model) -> None:
    """What the bound lies between: 2 steps of rounding above, and these."""
    for fault, right in ((CommitsEverything, 0), (SwapsRows, 3), (CommitsOneTooFew, 3)):
        assert _settled(model, right, fault).most > 1e4


def test_a_difference_that_does_not_come_back_is_a_fault(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuSequences, "verify", _rounded(2))
    plain, outcome = _forced(model, 3)
    monkeypatch.undo()
    found = settle(model, plain, replace(outcome, first_token=None, ids=plain.ids), ROUNDING)
    assert found.fault is not None
    forgotten = settle(model, *_forced(model, 3), ROUNDING)
    assert forgotten.fault == "the difference does not come back when the run is repeated"


def test_a_flip_reports_what_the_engine_says_there(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids, the gap and the difference, taken from the engine by hand."""
    honest = CpuSequences.verify
    monkeypatch.setattr(CpuSequences, "verify", _rounded(2))
    plain, outcome = _forced(model, 3)
    first = settle(model, plain, outcome, ROUNDING).flips[0]
    assert first.index == outcome.first_token
    monkeypatch.setattr(CpuSequences, "verify", honest)
    sequences = model.engine.sequences()
    text = [*PROMPT, *plain.ids[: first.index]]
    sequences.verify(np.array([PROMPT]), 0)
    sequences.commit(np.array([len(PROMPT)]))
    for token in text[len(PROMPT) :]:
        verified = sequences.verify(np.array([[token]]), 1, logits=True)
        sequences.commit(np.array([1]))
    assert verified.logits is not None
    row = verified.logits[0, 0]
    assert (first.first, first.said) == (plain.ids[first.index], outcome.ids[first.index])
    assert {first.first, first.second} == set(np.argsort(row, kind="stable")[-2:].tolist())
    assert (first.gap, first.behind) == (0.0, 0.0)
    assert 0 < first.apart <= 2.5 * first.step
    assert first.step == pytest.approx(float(np.spacing(np.abs(row).max())))


@pytest.mark.parametrize("magnitude", [1.0, 0.9, 20.0, 1000.0, 3e-3])
def test_a_step_is_the_spacing_of_the_type(magnitude: float) -> None:
    types: dict[Precision, Any] = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
    for precision, kind in types.items():
        value = kind(magnitude)
        assert Rounding(precision, 64).step(float(value)) == float(np.spacing(value))
    assert Rounding("fp32", 64).step(0.0) > 0


def test_a_flip_needs_a_difference_that_explains_it_and_is_rounding() -> None:
    near = Flip(3, 8, 9, 8, 1e-6, 1e-6, 6e-7, 1e-6, 64.0, True)
    assert near.is_near_tie
    assert str(near).endswith("near tie")
    for change in ({"behind": 1.3e-6}, {"apart": 7e-5, "behind": 1e-4}, {"is_best": False}):
        assert not replace(near, **change).is_near_tie
        assert str(replace(near, **change)).endswith("bug")
    assert "and the run says 7" in str(replace(near, said=7))


# The checks and the command


def test_control_row_by_row_that_is_not_is_seen(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """If `step` ran rows together on a near-tie engine, its lines fail."""
    monkeypatch.setattr(CpuSequences, "verify", _rounded(2))

    def rows(*arguments: Any, verify: str = "rows") -> Outcome:
        return run_against(*arguments)

    monkeypatch.setattr(checks_module, "run_against", rows)
    failed = [line.text for line in checks(model, 12, 20) if not line.holds]
    assert failed
    assert all("verify step" in text for text in failed)


def test_control_the_control_notices_nothing_where_rows_are_not_left(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding alone must not pass for a fault that was noticed."""
    monkeypatch.setattr(CpuSequences, "verify", _rounded(2))
    monkeypatch.setattr(checks_module, "CommitsEverything", Faulty)
    failed = [line.text for line in checks(model, 12, 20) if not line.holds]
    assert failed == ["control: rejected rows left in the state are noticed"]


def _command(model: Model, monkeypatch: pytest.MonkeyPatch, bundle: Path) -> int:
    monkeypatch.setattr(cli, "open_model", lambda *_: model)
    callback = cli.verify.callback
    assert callback is not None
    options = {"bundle": bundle, "new_tokens": 8, "long_tokens": 8, "quiet": True}
    code: int = callback(**options, threads=1, backend=None, device=None)
    return code


def test_the_command_says_near_tie_and_returns_zero(
    model: Model, bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CpuSequences, "verify", _rounded(2))
    assert _command(model, monkeypatch, bundle) == 0
    shown = capsys.readouterr().out.splitlines()
    assert all(line.startswith("tie ") for line in shown[:-1])
    assert "near-tie: " in shown[-1]
    assert shown[-1].endswith("near ties settled, none beyond; use --verify step for exactness")
    assert int(shown[-1].split(" near ties settled")[0].split()[-1]) > 0
    monkeypatch.setattr(model.engine, "numerics", "exact")
    assert _command(model, monkeypatch, bundle) == 1
    monkeypatch.setattr(model.engine, "numerics", "near-tie")
    monkeypatch.setattr(CpuSequences, "verify", _rounded(4000))
    assert _command(model, monkeypatch, bundle) == 1
    assert "NOT lossless" in capsys.readouterr().out.splitlines()[-1]


def test_the_last_line_counts() -> None:
    lines = [Line("a", True), Line("b", True, 2, True), Line("c", True, 0, True)]
    wanted = "near-tie: 3 checks, K = 0..7, 2 differ by rounding, 2 near ties settled, none beyond; "
    assert cli._verdict(lines, "near-tie", 7) == wanted + "use --verify step for exactness"
    assert cli._verdict(lines[:1], "exact", 7) == "lossless, 1 checks, K = 0..7"
    assert cli._verdict([*lines, Line("d", False)], "near-tie", 7) == "NOT lossless: 1 failed, 4 checks, K = 0..7"


def test_the_type_is_that_of_the_backend(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli._precision(model, EngineOptions()) == "fp32"
    builds = {"torch-cuda": BackendBuild("fp16"), "torch-cpu": BackendBuild("fp32")}
    monkeypatch.setattr(model, "bundle", replace(model.bundle, manifest=replace(model.manifest, backends=builds)))
    assert cli._precision(model, EngineOptions(backend="torch")) == "fp32"
    monkeypatch.setattr(model.engine, "runs_on", "sm_90")
    assert cli._precision(model, EngineOptions(backend="torch")) == "fp16"
    assert cli._precision(model, EngineOptions(backend="tensorrt")) == "bf16"


def test_an_engine_that_is_near_tie_by_itself_is_settled(tmp_path: Path) -> None:
    """PyTorch on a CPU multiplies the last rows of a block another way, and row by row as plain decoding does."""
    bundle = build_bundle(CARRIED, tmp_path / "bundle", draft_tokens=7)
    torch = load(bundle, options=EngineOptions(backend="torch", device="cpu", threads=1))
    assert torch.engine.numerics == "near-tie"
    plain = run_plain(torch, PROMPT, 24)

    def against(verify: VerifyMode) -> Outcome:
        drafter = ForcedDrafter(len(PROMPT), plain.ids, torch.manifest.model.vocab_size, lambda cycle, k: k - cycle % 2)
        return run_against(torch, plain, 7, drafter, verify=verify)

    rounding = Rounding("fp32", torch.engine.spec.hidden_size)
    found = settle(torch, plain, against("rows"), rounding)
    assert found.is_rounding, found
    assert 0 < found.most < rounding.allowed
    assert against("step").holds
