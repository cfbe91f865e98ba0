"""Costs of the parts of a cycle: what is measured, kept, found again, and never trusted. Asserts no time."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mtp_engines import cost_cache
from mtp_engines.backends.options import EngineOptions
from mtp_engines.bundle import MEASURED, Bundle, open_bundle, refuse_foreign
from mtp_engines.contracts.manifest import Limits
from mtp_engines.cost_cache import costs_of, key_of
from mtp_engines.costs import CycleCosts, measure_costs
from mtp_engines.engine import Engine, Floats, Ids, Verified
from mtp_engines.errors import NumericsError
from mtp_runtime import load
from tests.fixtures.checkpoints import markov_checkpoint, partial_checkpoint
from tests.support import build_bundle, copy_of, refused

ONE = EngineOptions(threads=1)
MADE_UP = CycleCosts(verify=(1.0, 1.5), draft=(0.25,), catch_up=0.125, commit=0.5)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("costs")
    return build_bundle(partial_checkpoint(folder / "checkpoint"), folder / "bundle", draft_tokens=1)


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    return copy_of(made, tmp_path / "bundle")


def opened(place: Path) -> tuple[Bundle, Engine]:
    return open_bundle(place), load(place, threads=1).engine


class Pretended:
    """Sequences whose calls move a clock on by what they are said to cost; `slow` seconds more in some."""

    def __init__(self, slow: Callable[[int], float] = lambda call: 0.0, finite: bool = True, answers: int = 1) -> None:
        self.lengths: Ids = np.zeros(answers, np.int64)
        self.now, self._slow, self._calls, self._finite, self._staged = 0.0, slow, 0, finite, 0

    def engine(self, most: int, room: int = 256) -> Any:
        limits = Limits(max_model_len=room, max_batch_size=1, max_draft_tokens=most)
        spec = SimpleNamespace(mtp=object(), vocab_size=7)

        def sequences(batch: int) -> Pretended:
            assert batch == len(self.lengths)
            return self

        return SimpleNamespace(sequences=sequences, limits=limits, spec=spec)

    def verify(self, tokens: Ids, logit_rows: int) -> Verified:
        answers, rows = tokens.shape
        assert tokens.max() < 7
        assert answers == len(self.lengths)
        self._spend(10.0 + answers * rows)
        if logit_rows and not self._finite:
            raise NumericsError("Not a number.")
        self._staged = rows
        return Verified(np.zeros((answers, logit_rows), np.int64), np.zeros((answers, rows, 4), np.float32))

    def commit(self, rows: Ids) -> None:
        self._spend(3.0 if rows[0] < self._staged else 0.0)
        self.lengths += rows
        self._staged = 0

    def draft(self, tokens: Ids, hidden: Floats, rows: Ids, draft_tokens: int) -> Ids:
        assert hidden.shape[:2] == tokens.shape
        assert rows.shape == self.lengths.shape
        self._spend(0.5 * tokens.size + 2.0 * draft_tokens)
        return np.zeros((len(tokens), draft_tokens), np.int64)

    def reset(self) -> None:
        self.lengths[:] = 0

    def _spend(self, seconds: float) -> None:
        self.now += seconds + self._slow(self._calls)
        self._calls += 1


def measured(sequences: Pretended, most: int, room: int = 256) -> CycleCosts:
    answers = len(sequences.lengths)
    return measure_costs(sequences.engine(most, room), answers=answers, clock=lambda: sequences.now)


# Measuring


@pytest.mark.parametrize("most", [1, 3, 7, 8])
@pytest.mark.parametrize("room", [256, 16])
def test_every_part_is_measured_alone(most: int, room: int) -> None:
    """The pretended calls cost straight lines, so what lies between two measured widths is known too."""
    found = measured(Pretended(), most, room)
    assert found.verify == tuple(10.0 + rows for rows in range(1, most + 2))
    assert found.draft == tuple(1.0 + 2.0 * tokens for tokens in range(1, most + 1))
    assert (found.catch_up, found.commit) == (0.5, 3.0)


def test_what_answers_share_is_shared() -> None:
    """Four together: a run costs 10 and 1 a row, so each of them bears a quarter of the 10."""
    found = measured(Pretended(answers=4), 3)
    assert found.verify == tuple(2.5 + rows for rows in range(1, 5))
    assert found.draft == tuple(1.0 + 0.5 * tokens for tokens in range(1, 4))
    assert (found.catch_up, found.commit) == (0.5, 0.75)
    assert found.is_sound()


def test_a_disturbance_does_not_count() -> None:
    """One call of a round or two is slowed a thousandfold; three rounds or more have a median without it."""
    found = measured(Pretended(slow=lambda call: 1e4 if call in (30, 31) else 0.0), 3)
    assert found == measured(Pretended(), 3)
    always = measured(Pretended(slow=lambda call: 1e4), 3)
    assert always.verify[0] > 1e4, "control: what is always slow is seen"


def test_a_model_that_makes_no_numbers_of_these_tokens_is_measured_all_the_same() -> None:
    found = measured(Pretended(finite=False), 2)
    assert found.verify == (11.0, 12.0, 13.0)
    assert found.commit == 0.0, "nothing is staged, so nothing can be committed"


def test_wider_never_costs_less() -> None:
    sequences = Pretended()
    honest = sequences.verify
    sequences.verify = lambda tokens, logit_rows: honest(tokens[:, :1] if tokens.shape[1] == 3 else tokens, logit_rows)  # type: ignore[method-assign]
    assert measured(sequences, 3).verify == (11.0, 12.0, 12.0, 14.0)


@pytest.mark.parametrize("options", [{"max_model_len": 16, "draft_tokens": 8}, {"draft_tokens": 3, "mtp": False}])
def test_real_engines_are_measured(tmp_path: Path, options: dict[str, Any]) -> None:
    """The context of the first is too short for its widest verify behind a prompt; the second has no head."""
    out = build_bundle(markov_checkpoint(tmp_path / "c"), tmp_path / "b", **options)
    bundle, engine = opened(out)
    found = measure_costs(engine)
    assert found.is_sound()
    assert found.max_draft_tokens == bundle.manifest.limits.max_draft_tokens
    assert all(found.draft) if options.get("mtp", True) else not any(found.draft)


def test_whole_cycles_are_measured_as_they_run(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the extra `torch` is not installed")
    layers = ["linear_attention", "full_attention"]
    out = build_bundle(partial_checkpoint(tmp_path / "c", layer_types=layers), tmp_path / "b", draft_tokens=2)
    engine = load(out, options=EngineOptions(backend="torch", device="cpu", threads=1)).engine
    whole, parts = measure_costs(engine, whole=True), measure_costs(engine)
    assert whole.is_sound()
    assert parts.is_sound()
    assert (whole.draft, whole.commit) == ((0.0, 0.0), 0.0)
    assert all(parts.draft)


# Keeping


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Measuring gives made-up costs; one entry for each time."""
    times: list[bool] = []

    def pretend(engine: Engine, *, whole: bool, answers: int) -> CycleCosts:
        times.append(whole)
        return MADE_UP

    monkeypatch.setattr(cost_cache, "measure_costs", pretend)
    monkeypatch.setattr(cost_cache, "_is_busy", lambda: False)
    return times


def kept(place: Path) -> list[Path]:
    return sorted((place / MEASURED).iterdir())


def test_costs_are_measured_once_for_a_machine(place: Path, counted: list[bool]) -> None:
    bundle, engine = opened(place)
    assert costs_of(bundle, engine, ONE) == costs_of(bundle, engine, ONE) == MADE_UP
    assert counted == [False]
    costs_of(bundle, engine, ONE, whole=True)
    costs_of(bundle, engine, EngineOptions(threads=2))
    assert counted == [False, True, False], "control: something else is measured apart"
    assert len(kept(place)) == 3


def test_what_a_busy_machine_measured_is_measured_again_when_it_is_quiet(
    place: Path, counted: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, engine = opened(place)
    for busy, times in ((True, 1), (True, 1), (False, 2), (False, 2), (True, 2)):
        monkeypatch.setattr(cost_cache, "_is_busy", lambda busy=busy: busy)
        assert costs_of(bundle, engine, ONE) == MADE_UP
        assert len(counted) == times


def test_a_load_beyond_the_processors_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_cache.os, "sched_getaffinity", lambda process: {0, 1})
    for waiting, busy in ((0.1, False), (2.0, False), (5.0, True)):
        monkeypatch.setattr(cost_cache.os, "getloadavg", lambda waiting=waiting: (waiting, 0.0, 0.0))
        assert cost_cache._is_busy() is busy


def test_the_key_knows_all_that_costs_depend_on(place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bundle, engine = opened(place)
    before = key_of(bundle, engine, ONE)
    assert key_of(*opened(place), ONE) == before
    renamed = Bundle(place, replace(bundle.manifest, name="other"))
    keys = {
        key_of(renamed, engine, ONE),
        key_of(bundle, engine, ONE, whole=True),
        key_of(bundle, engine, ONE, answers=2),
        key_of(bundle, engine, EngineOptions(threads=2)),
        key_of(bundle, engine, EngineOptions(threads=1, backend="onnxruntime")),
    }
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Another CPU\n")
    with monkeypatch.context() as patched:
        patched.setattr(cost_cache, "_CPUINFO", cpuinfo)
        keys.add(key_of(bundle, engine, ONE))
    monkeypatch.setattr(cost_cache, "version", lambda name: "99")
    keys.add(key_of(bundle, engine, ONE))
    assert len(keys | {before}) == 8


def test_a_cuda_device_is_known_by_its_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gpus" / "0").mkdir(parents=True)
    (tmp_path / "gpus" / "0" / "information").write_text("Model: \t Some GPU\nIRQ: 5\n")
    monkeypatch.setattr(cost_cache, "_GPUS", tmp_path / "gpus")
    assert "Some GPU" in cost_cache._processors("sm_90")
    assert "Some GPU" not in cost_cache._processors("cpu")


def _cut(text: str) -> str:
    return text[:-20]


def _other_key(text: str) -> str:
    return text.replace('"key": "', '"key": "0')


def _not_a_number(text: str) -> str:
    return text.replace("0.125", "NaN")


def _free(text: str) -> str:
    return text.replace("1.5", "0.0")


def _too_few(text: str) -> str:
    content = json.loads(text)
    content["costs"]["verify"].pop()
    content["costs"]["draft"].pop()
    return json.dumps(content)


@pytest.mark.parametrize("damage", [lambda text: "", _cut, _other_key, _not_a_number, _free, _too_few])
def test_a_damaged_file_is_measured_again_and_written_anew(
    place: Path, counted: list[bool], damage: Callable[[str], str]
) -> None:
    bundle, engine = opened(place)
    costs_of(bundle, engine, ONE)
    (file,) = kept(place)
    good = file.read_text()
    file.write_text(damage(good))
    assert file.read_text() != good
    assert costs_of(bundle, engine, ONE) == MADE_UP
    assert len(counted) == 2
    assert file.read_text() == good
    assert costs_of(bundle, engine, ONE) == MADE_UP
    assert len(counted) == 2, "control: the mended file is read"


def test_a_bundle_that_cannot_be_written_is_measured_every_time(
    place: Path, counted: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, engine = opened(place)

    def read_only(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(cost_cache.tempfile, "mkstemp", read_only)
        assert costs_of(bundle, engine, ONE) == costs_of(bundle, engine, ONE) == MADE_UP
    assert (len(counted), kept(place)) == (2, [])
    (place / MEASURED).rmdir()
    (place / MEASURED).write_text("not a directory")
    assert costs_of(bundle, engine, ONE) == MADE_UP
    (place / MEASURED).unlink()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", read_only)
        costs_of(bundle, engine, ONE)
    assert kept(place) == [], "what was written aside is removed"
    costs_of(bundle, engine, ONE)
    assert len(kept(place)) == 1, "control: it is written where that is possible"


def test_writers_at_once_leave_one_whole_file(place: Path, counted: list[bool]) -> None:
    bundle, engine = opened(place)
    threads = [threading.Thread(target=costs_of, args=(bundle, engine, ONE)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (file,) = kept(place)
    assert json.loads(file.read_text())["costs"]["verify"] == list(MADE_UP.verify)
    count = len(counted)
    assert costs_of(bundle, engine, ONE) == MADE_UP
    assert len(counted) == count


def test_the_bundle_is_as_whole_with_its_costs_as_without(place: Path, counted: list[bool]) -> None:
    bundle, engine = opened(place)
    costs_of(bundle, engine, ONE)
    assert open_bundle(place, thorough=True).manifest == bundle.manifest
    refuse_foreign(place)
    (place / "notes").mkdir()
    (place / "notes" / "a.json").write_text("{}")
    with refused("also holds notes/a.json"):
        refuse_foreign(place)
