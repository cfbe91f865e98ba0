"""`mtp-run verify`: it passes on an honest engine and fails on each deliberate fault."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mtp_engines.engine import Floats, Ids, Sequences, Verified
from mtp_runtime import Model
from mtp_tools.verify import checks as checks_module
from mtp_tools.verify.checks import checks
from mtp_tools.verify.forced import ForcedDrafter
from mtp_tools.verify.runs import CommitsEverything, run_against, run_plain
from tests.fixtures.checkpoints import partial_checkpoint, random_checkpoint
from tests.support import build_bundle, command_refused, load_model, run_command

PROMPT = [5, 6, 20]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    checkpoint = partial_checkpoint(folder / "checkpoint")
    return build_bundle(checkpoint, folder / "bundle", draft_tokens=3)


@pytest.fixture(scope="module")
def model(bundle: Path) -> Model:
    return load_model(bundle)


class Faulty:
    """Sequences that pass everything on; subclasses break one thing."""

    def __init__(self, inner: Sequences) -> None:
        self.inner = inner
        self.lengths = inner.lengths
        self.draft, self.logits, self.snapshot, self.reset = inner.draft, inner.logits, inner.snapshot, inner.reset

    def verify(self, tokens: Ids, logit_rows: int, **options: bool) -> Verified:
        return self.inner.verify(tokens, logit_rows, **options)

    def commit(self, rows: Ids) -> None:
        self.inner.commit(rows)


class ChangesAToken(Faulty):
    """The target's choice for every third row of a verify is off by one."""

    def verify(self, tokens: Ids, logit_rows: int, **options: bool) -> Verified:
        verified = self.inner.verify(tokens, logit_rows, **options)
        return replace(verified, ids=verified.ids ^ (np.arange(logit_rows) == 2))


class NudgesHidden(Faulty):
    """Hidden rows of wide calls are off by the last bit."""

    def verify(self, tokens: Ids, logit_rows: int, **options: bool) -> Verified:
        verified = self.inner.verify(tokens, logit_rows, **options)
        wide = tokens.shape[1] > 1 and self.lengths[0] >= len(PROMPT)
        return replace(verified, hidden=np.nextafter(verified.hidden, np.float32(9))) if wide else verified


class CommitsOneTooFew(Faulty):
    """A fully accepted block loses its last row in the state, though not in the length."""

    def commit(self, rows: Ids) -> None:
        fewer = np.maximum(rows - 1, 1) if rows[0] > 1 and self.lengths[0] > len(PROMPT) else rows
        self.inner.commit(fewer)
        self.inner.lengths += rows - fewer


def forced(model: Model, right: int, fault: type | None = None):
    plain = run_plain(model, PROMPT, 24)
    drafter = ForcedDrafter(len(PROMPT), plain.ids, model.manifest.model.vocab_size, lambda cycle, k: min(right, k))
    return run_against(model, plain, 3, drafter, fault)


@pytest.mark.parametrize("right", range(4))
def test_forced_drafts_are_accepted_exactly_as_forced(model: Model, right: int) -> None:
    outcome = forced(model, right)
    assert outcome.holds
    full = [length for length, count in outcome.stats.emitted_histogram.items() if count > 1]
    assert full == [right + 1], "all cycles but those cut by the limit accept what was forced"


@pytest.mark.parametrize(
    ("fault", "right"),
    [(CommitsEverything, 0), (CommitsEverything, 2), (ChangesAToken, 3), (CommitsOneTooFew, 3)],
)
def test_control_a_faulty_engine_is_noticed(model: Model, fault: type, right: int) -> None:
    assert not forced(model, right, fault).holds


def test_a_difference_in_state_alone_is_named(model: Model) -> None:
    outcome = forced(model, 0, CommitsEverything)
    assert outcome.first_state is not None
    length, name = outcome.first_state
    assert length > len(PROMPT)
    assert name.startswith("past.")


def test_the_checks_hold_and_reach_every_accepted_count(model: Model) -> None:
    lines = list(checks(model, 16, 24))
    assert [line.text for line in lines if not line.holds] == []
    assert any(line.text == "every accepted count from 0 to 3 was reached" for line in lines)
    assert any("control" in line.text for line in lines)
    assert len(lines) > 30


def test_a_row_that_differs_in_the_last_layer_alone_is_noticed(model: Model) -> None:
    """No token and no state shows it: the rows that leave the last layer are compared themselves."""
    outcome = forced(model, 3, NudgesHidden)
    assert (outcome.first_token, outcome.first_state) == (None, None)
    assert outcome.first_hidden is not None


@pytest.mark.parametrize("kinds", [["full_attention"] * 2, ["linear_attention"] * 2])
def test_models_of_one_kind_of_layer_are_verified_too(tmp_path: Path, kinds: list[str]) -> None:
    checkpoint = random_checkpoint(tmp_path / "checkpoint", seed=4, layer_types=kinds, num_hidden_layers=2)
    model = load_model(build_bundle(checkpoint, tmp_path / "bundle", draft_tokens=2))
    assert [line.text for line in checks(model, 8, 12) if not line.holds] == []


def test_the_command_returns_one_when_a_check_fails_and_reads_every_byte(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mtp_tools.verify import cli

    asked: list[bool] = []
    honest = cli.open_bundle

    def opened(directory: Path, *, thorough: bool) -> object:
        asked.append(thorough)
        return honest(directory, thorough=thorough)

    monkeypatch.setattr(cli, "open_bundle", opened)
    callback = cli.verify.callback
    assert callback is not None
    arguments = {"bundle": bundle, "new_tokens": 8, "long_tokens": 8, "quiet": True}
    arguments |= {"threads": 1, "backend": None, "device": None}
    monkeypatch.setattr(cli, "checks", lambda *_: [checks_module.Line("fine", True)])
    assert callback(**arguments) == 0
    monkeypatch.setattr(cli, "checks", lambda *_: [checks_module.Line("broken", False)])
    assert callback(**arguments) == 1
    assert "NOT lossless" in capsys.readouterr().out
    assert asked == [True, True]


def test_a_context_as_short_as_a_verification_allows_holds_and_a_shorter_one_is_refused(tmp_path: Path) -> None:
    """Neither may end in the verdict that the bundle is not lossless."""
    checkpoint = partial_checkpoint(tmp_path / "checkpoint")
    short = build_bundle(checkpoint, tmp_path / "short", draft_tokens=3, max_model_len=6)
    assert [line.text for line in checks(load_model(short), 32, 32) if not line.holds] == []
    shorter = build_bundle(checkpoint, tmp_path / "shorter", draft_tokens=3, max_model_len=5)
    command_refused(run_command("mtp-run", "verify", shorter), "holds 5 tokens", "at least 6")


def test_a_count_that_was_never_reached_fails(model: Model) -> None:
    assert not checks_module._coverage({0, 1, 3}, 3).holds
    assert checks_module._coverage({0, 1, 2, 3}, 3).holds


def test_control_the_control_itself_fails_when_the_comparison_is_blind(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks_module, "CommitsEverything", Faulty)
    failed = [line.text for line in checks(model, 16, 24) if not line.holds]
    assert failed == ["control: rejected rows left in the state are noticed"]


def test_control_the_checks_fail_when_the_engine_is_faulty(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model_: Model, plain, draft_tokens: int, drafter=None, wrap=None, verify="rows"):
        return run_against(model_, plain, draft_tokens, drafter, wrap or CommitsEverything, verify)

    monkeypatch.setattr(checks_module, "run_against", broken)
    failed = [line for line in checks(model, 16, 24) if not line.holds]
    assert failed
    assert any("state past." in line.text for line in failed)
    assert any("apart" in line.text for line in failed), "the top-two gap stands at the first token that differs"


def test_the_command_prints_a_verdict_and_returns_zero(bundle: Path) -> None:
    result = run_command("mtp-run", "verify", bundle, "--quiet", "--new-tokens", "12", "--long-tokens", "16")
    assert result.returncode == 0, result.stderr
    assert "lossless" in result.stdout


def test_random_shapes_are_lossless_for_every_draft_width(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "checkpoint", seed=5, tied=True, linear_num_value_heads=15)
    model = load_model(build_bundle(checkpoint, tmp_path / "bundle", max_model_len=600))
    failed = [line.text for line in checks(model, 12, 40) if not line.holds]
    assert failed == []


def test_a_forced_drafter_counts_prompt_rows_that_come_in_chunks() -> None:
    drafter = ForcedDrafter(4, [10, 11, 12, 13], 100, lambda cycle, k: 1)
    hidden: Floats = np.zeros((3, 2), np.float32)
    drafter.observe(np.array([7, 8]), hidden[:2])
    drafter.observe(np.array([9, 10]), hidden[:2])
    assert drafter.propose(3) == [11, 13, 14]
