"""`python -m mtp_tools.neighbours`: turns, engines that fail, wrong tokens, with made-up engines. Asserts no time."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_engines.command import run_command as run_in_process
from mtp_tools.made_up.successors import Successors
from mtp_tools.neighbours import __main__ as tool
from mtp_tools.neighbours.contenders import Contender, Engine
from mtp_tools.neighbours.conversions import Job, Prepared
from mtp_tools.neighbours.process import DeadError, Worker
from mtp_tools.neighbours.protocol import NeighbourError, Question
from mtp_tools.neighbours.rounds import Case, Measured, Plan, measure
from mtp_tools.neighbours.starting import Absent, bring_up
from tests.support import refused

NEW, ROUNDS = 6, 3
PROMPT = (5, 6, 20)
HOST = Path(tool.__file__).parent / "workers" / "host.py"
FAKE = '''
"""A made-up engine: it counts on from the last token of the prompt, and takes the time that it is told."""
import os, subprocess, time

class Engine:
    def __init__(self, settings):
        self.draft_tokens, self.about = settings["draft_tokens"], {"fake": "1.0"}
        self.settings, self.asked = settings, 0
        if settings.get("serves"):
            self.note(f"child {subprocess.Popen(['sleep', '60']).pid}")

    def answer(self, prompt, new_tokens, draft_tokens):
        print("what a library prints must not reach the other end")
        self.asked += 1
        self.note(f"begin {self.settings['name']} {draft_tokens}")
        if self.asked == self.settings.get("dies_at"):
            print("out of luck", file=__import__("sys").stderr, flush=True)
            os._exit(7)
        if self.asked == self.settings.get("hangs_at"):
            time.sleep(60)
        if draft_tokens and draft_tokens == self.settings.get("refuses"):
            raise RuntimeError("no such draft")
        ids = [prompt[-1] + 1 + index for index in range(new_tokens)]
        if "wrong_at" in self.settings:
            ids[self.settings["wrong_at"]] += 1
        self.note(f"end {self.settings['name']} {draft_tokens}")
        total = self.settings.get("total_s", 2.0) / (1 + draft_tokens)
        return {"ids": ids, "first_s": 0.5 / (1 + draft_tokens), "total_s": total}

    def note(self, text):
        with open(self.settings["journal"], "a") as journal:
            print(text, file=journal)

def load(settings):
    if settings.get("broken"):
        raise ValueError("this model is not for me")
    return Engine(settings)
'''


class Contest:
    """Made-up engines and the journal that they write."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.journal = folder, folder / "journal.txt"
        self._worker = folder / "fake.py"
        self._worker.write_text(FAKE, encoding="utf-8")
        self.job = Job(folder, folder / "work", 1, 64, (1, 2), None, None, 0)

    def contender(self, name: str, group: str = "fp32", **settings: Any) -> Contender:
        """One that behaves as the settings say."""
        given = {"name": name, "journal": str(self.journal), "draft_tokens": [0], **settings}

        def prepare(job: Job, weights: str) -> Prepared:
            if "uninstallable" in settings:
                raise NeighbourError("it cannot be installed: the index is empty.")
            return Prepared(Path(sys.executable), given)

        return Contender(Engine(name, str(self._worker), {group: f"{group}-of-{name}"}, prepare), group)

    def run(self, *contenders: Contender, plan: Plan | None = None) -> tuple[Measured, list[Absent]]:
        """All of them, without pauses."""
        plan = plan or Plan(PROMPT, NEW, (1, 2), ROUNDS)
        entries, absent = bring_up(contenders, self.job, lambda line: None)
        try:
            return measure(entries, plan, pause=lambda seconds: None), absent
        finally:
            for entry in entries:
                entry.worker.close()

    def lines(self) -> list[str]:
        """What the engines noted."""
        return self.journal.read_text(encoding="utf-8").splitlines()


@pytest.fixture
def contest(tmp_path: Path) -> Contest:
    return Contest(tmp_path)


def by_name(measured: Measured, name: str, draft_tokens: int = 0) -> Case:
    return next(c for c in measured.cases if c.contender.engine.name == name and c.draft_tokens == draft_tokens)


def only_one_computes(lines: Sequence[str]) -> bool:
    """Every answer ends before the next begins."""
    pairs = [(lines[index].split(), lines[index + 1].split()) for index in range(0, len(lines), 2)]
    return all(a[0] == "begin" and b[0] == "end" and a[1:] == b[1:] for a, b in pairs)


def take_turns(lines: Sequence[str], cases: int) -> bool:
    """Every stretch of as many answers as there are cases has each of them once, and no two have the same order."""
    asked = [line for line in lines if line.startswith("begin")]
    rounds = [asked[start : start + cases] for start in range(0, len(asked), cases)]
    return all(len(set(r)) == cases for r in rounds) and len({tuple(r) for r in rounds[1:]}) == len(rounds) - 1


def test_engines_answer_in_turns_and_one_at_a_time(contest: Contest) -> None:
    a, b = contest.contender("a", draft_tokens=[0, 1, 2]), contest.contender("b")
    measured, absent = contest.run(a, b)
    lines = contest.lines()
    assert absent == []
    assert only_one_computes(lines)
    assert take_turns(lines, 4)
    assert len(lines) == 2 * 4 * (1 + ROUNDS), "the warm-up asks once, each round once more"
    assert [(case.contender.engine.name, case.draft_tokens, len(case.replies)) for case in measured.cases] == [
        ("a", 0, ROUNDS),
        ("a", 1, ROUNDS),
        ("a", 2, ROUNDS),
        ("b", 0, ROUNDS),
    ]


def test_control_the_checks_of_turns_see_other_orders() -> None:
    one, two = ["begin a 0", "end a 0"], ["begin b 0", "end b 0"]
    assert only_one_computes(one + two)
    assert not only_one_computes(["begin a 0", "begin b 0", "end a 0", "end b 0"])
    assert take_turns(one + two + one + two + two + one, 2)
    assert not take_turns(one + one + two + two, 2), "one engine after the other"
    assert not take_turns(3 * (one + two), 2), "always the same order"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [({"broken": True}, "this model is not for me"), ({"uninstallable": True}, "cannot be installed")],
)
def test_an_engine_that_does_not_come_up_is_named_and_the_others_go_on(
    contest: Contest, fault: dict[str, Any], reason: str
) -> None:
    measured, absent = contest.run(contest.contender("a", **fault), contest.contender("b"))
    assert [(missing.contender.engine.name, reason in missing.reason) for missing in absent] == [("a", True)]
    assert len(by_name(measured, "b").replies) == ROUNDS
    control, nobody = contest.run(contest.contender("a"), contest.contender("b"))
    assert nobody == []
    assert len(by_name(control, "a").replies) == ROUNDS


def test_an_engine_that_dies_keeps_its_rounds_and_the_others_go_on(contest: Contest) -> None:
    # Two cases: asked twice in the warm-up and twice a round, so the fourth question is within the first round.
    a = contest.contender("a", draft_tokens=[0, 1], dies_at=4)
    measured, _ = contest.run(a, contest.contender("b"))
    cases = [by_name(measured, "a"), by_name(measured, "a", 1)]
    assert sorted(len(case.replies) for case in cases) == [0, 1]
    assert all("it ended with 7: out of luck" in str(case.failure) for case in cases)
    assert all(len(case.rounds) == ROUNDS for case in cases), "rounds stay aligned"
    assert len(by_name(measured, "b").replies) == ROUNDS
    assert by_name(measured, "b").failure is None
    control, _ = contest.run(contest.contender("a", draft_tokens=[0, 1]))
    assert all(case.failure is None and len(case.replies) == ROUNDS for case in control.cases)


def test_a_k_that_fails_costs_only_that_k(contest: Contest) -> None:
    measured, _ = contest.run(contest.contender("a", draft_tokens=[0, 1, 2], refuses=1))
    assert "no such draft" in str(by_name(measured, "a", 1).failure)
    assert by_name(measured, "a", 1).replies == []
    assert [len(by_name(measured, "a", width).replies) for width in (0, 2)] == [ROUNDS, ROUNDS]


def test_wrong_tokens_are_marked_where_they_begin(contest: Contest) -> None:
    measured, _ = contest.run(contest.contender("ours"), contest.contender("b", wrong_at=4), contest.contender("c"))
    assert [case.wrong_at for case in measured.cases] == [None, 4, None]
    assert len(by_name(measured, "b").replies) == ROUNDS, "its speed is still measured"
    assert measured.expected_from == "ours fp32-of-ours, K = 0"


def test_a_known_answer_finds_every_engine_wrong_that_gives_another(contest: Contest) -> None:
    plan = Plan(PROMPT, NEW, (), 1, expected=tuple(range(21, 21 + NEW)))
    measured, _ = contest.run(contest.contender("ours", wrong_at=0), contest.contender("b"), plan=plan)
    assert [case.wrong_at for case in measured.cases] == [0, None]


def test_an_engine_that_hangs_is_given_up(contest: Contest) -> None:
    prepared = contest.contender("a", hangs_at=2).engine.prepare(contest.job, "")
    worker = Worker([sys.executable, str(HOST), str(contest.folder / "fake.py")], contest.folder / "log", 1)
    worker.start(prepared.settings)
    question = Question(PROMPT, NEW, 0)
    assert worker.ask(question).ids == tuple(range(21, 21 + NEW))
    with refused("did not answer within 0 s", error=DeadError):
        worker.ask(question, seconds=0.2)
    with refused("it ended with", error=DeadError):
        worker.ask(question)
    worker.close()


def is_alive(process: int) -> bool:
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("dies_at", [1, 99])
def test_what_an_engine_started_ends_with_it(contest: Contest, dies_at: int) -> None:
    a = contest.contender("a", serves=True, dies_at=dies_at)
    entries, _ = bring_up([a], contest.job, lambda line: None)
    child = int(contest.lines()[0].split()[1])
    measure(entries, Plan(PROMPT, NEW, (), 1), pause=lambda seconds: None)
    assert is_alive(child), "control: it does not end by itself"
    entries[0].worker.close()
    for _ in range(200):
        if not is_alive(child):
            return
        time.sleep(0.02)
    raise AssertionError("it is still there")


def small_checkpoint(folder: Path) -> Path:
    folder.mkdir()
    config = {"text_config": {"vocab_size": 64, "head_dim": 16}, "architectures": []}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def run_tool(monkeypatch: pytest.MonkeyPatch, contenders: list[Contender], *arguments: str | Path) -> int:
    monkeypatch.setattr(tool, "contenders_from", lambda only, weights: contenders)
    monkeypatch.setattr("mtp_tools.neighbours.rounds.PAUSE_S", 0.0)
    return run_in_process(tool.main, [str(argument) for argument in arguments])


def test_the_command_prints_the_tables_and_writes_everything(
    contest: Contest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    contenders = [
        contest.contender("ours", draft_tokens=[0, 2], total_s=1.5),
        contest.contender("slow", total_s=4.0),
        contest.contender("odd", wrong_at=1, total_s=2.0),
        contest.contender("gone", uninstallable=True),
    ]
    checkpoint, result = small_checkpoint(tmp_path / "checkpoint"), tmp_path / "result.json"
    options = ["--new-tokens", "6", "--prompt-tokens", "3", "--rounds", "2", "--json", str(result)]
    assert run_tool(monkeypatch, contenders, "--checkpoint", checkpoint, "--work", tmp_path / "w", *options) == 0
    printed = capsys.readouterr().out
    assert "| ours | fp32-of-ours | 2 | " in printed
    assert "**differ from token 1**" in printed
    assert "(odd fp32-of-odd)* |" in printed, "the fastest neighbour counts and is starred"
    assert "gone fp32-of-gone: it cannot be installed: the index is empty" in printed
    found = json.loads(result.read_text(encoding="utf-8"))
    plain = next(c for c in found["comparisons"] if c["what"] == "whole request, plain, s")
    assert plain["ratio"]["median"] == pytest.approx(2.0 / 1.5)
    best = next(c for c in found["comparisons"] if c["what"] == "whole request, best K, s")
    assert (best["ours"]["draft_tokens"], best["ratio"]["median"]) == (2, pytest.approx(2.0 / 0.5))
    assert found["did_not_run"] == ["gone fp32-of-gone: it cannot be installed: the index is empty."]


def test_preparing_alone_loads_nothing(
    contest: Contest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    contenders = [contest.contender("a"), contest.contender("gone", uninstallable=True)]
    options = ["--checkpoint", small_checkpoint(tmp_path / "checkpoint"), "--work", tmp_path / "w", "--prepare-only"]
    assert run_tool(monkeypatch, contenders, *options) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "gone fp32-of-gone: it cannot be installed: the index is empty."
    ]
    assert not contest.journal.exists()
    assert run_tool(monkeypatch, contenders[:1], *options) == 0
    assert capsys.readouterr().out == "all of them are prepared\n", "control"


def test_a_made_up_checkpoint_says_what_must_come(tmp_path: Path) -> None:
    job = Job(small_checkpoint(tmp_path / "c"), tmp_path, 1, 64, (), None, None, 3)
    asked = {"prompt_tokens": 4, "new_tokens": 5, "rounds": 1, "made_up_seed": 9}
    plan = tool.plan_of(job, asked)
    successors = Successors(64, 0.5, 9)
    chain = np.array([plan.prompt[-1], *(plan.expected or ())])
    assert successors.target(chain[:-1]).tolist() == chain[1:].tolist()
    assert tool.plan_of(job, {**asked, "made_up_seed": None}).expected is None
    assert tool.plan_of(job, {**asked, "made_up_seed": 8}).expected != plan.expected, "control"
