"""`python -m mtp_tools.load` against real servers of the carried checkpoint, small enough for the suite."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mtp_engines.errors import RequestError
from mtp_tools.load.acts import SHARES
from mtp_tools.load.cli import main
from mtp_tools.load.expected import known_answers
from mtp_tools.load.processes import ServerError, ServerProcess
from mtp_tools.load.soak import SoakPlan, soak
from mtp_tools.load.tampering import FAULTS
from mtp_tools.load.traffic import Lengths
from tests.support import build_bundle, refused

ROOT = Path(__file__).resolve().parents[2]
CARRIED = ROOT / "checkpoints" / "tiny-mtp"
SMALL = ("--prompt-tokens", "4:16", "--new-tokens", "8:16", "--threads", "1")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The carried checkpoint with two slots."""
    return build_bundle(CARRIED, tmp_path_factory.mktemp("load") / "tiny", max_model_len=160, max_batch_size=2)


def load(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the tool."""
    command = [sys.executable, "-m", "mtp_tools.load", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_a_measurement_compares_the_three_policies_in_turn(bundle: Path, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    done = load(bundle, "--concurrency", "1,4", "--requests", "4", "--blocks", "2", *SMALL, "--json", result)
    assert done.returncode == 0, done.stderr
    record = json.loads(result.read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == record, "the last line is the result"
    assert [level["concurrency"] for level in record["levels"]] == [1, 4]
    for level in record["levels"]:
        assert list(level["policies"]) == ["off", "fixed", "auto"]
        for name, one in level["policies"].items():
            assert one["requests"] == 2 * 4
            assert one["errors"] == []
            assert one["tokens_per_s"]["least"] > 0
            assert one["tokens_per_cpu_s"]["least"] > 0
            assert one["first_token_ms"]["p99"] >= one["first_token_ms"]["p50"] > 0
            assert (one["acceptance_rate"] is None) == (one["drafted"] == 0)
            assert one["drafted"] == 0 if name == "off" else name == "auto" or one["drafted"] > 0
        assert len({one["tokens"] for one in level["policies"].values()}) == 1, "all gave the same answers"
        assert level["answers_that_differ"] == []
        assert level["auto_over_better"]["better"] in ("off", "fixed")
    assert "the limit is 0.95" in done.stdout
    assert re.search(r"^\| 4 \| auto \| \d", done.stdout, re.MULTILINE)


def test_a_soak_survives_a_kill_and_finds_nothing(bundle: Path) -> None:
    done = load(bundle, "--soak", "6", "--kills", "1", "--concurrency", "4", *SMALL)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["failures"] == []
    assert record["counts"]["kills"] == 1
    assert {name for name in SHARES if record["counts"].get(name)} >= {"stream", "leave"}, "control: it did something"
    assert record["right_answer_after"]["kill"]["times"] == 1
    assert len(record["memory"]) == 2, "one entry for each life of the server"


def test_control_a_soak_whose_server_changes_a_token_fails(bundle: Path) -> None:
    done = load(bundle, "--soak", "3", "--kills", "0", "--concurrency", "2", "--fault", "change-token", *SMALL)
    assert done.returncode == 1
    assert "wrong from place" in done.stderr
    assert json.loads(done.stdout)["failures"]


def test_a_server_that_does_not_come_back_is_a_failure(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, start = [], ServerProcess.start

    def once(server: ServerProcess) -> str:
        starts.append(server)
        if len(starts) > 1:
            raise ServerError("it does not come back.")
        return start(server)

    monkeypatch.setattr(ServerProcess, "start", once)
    plan = SoakPlan(2.0, 1, 2, Lengths(4, 8), Lengths(8, 8), 0)
    outcome = asyncio.run(soak(bundle, list(range(5, 60)), plan, [], tmp_path / "log", lambda note: None))
    assert outcome.failures == ["it does not come back."]


def test_the_known_answers_are_of_many_kinds(bundle: Path) -> None:
    known = known_answers(bundle, list(range(5, 60)), 12, Lengths(4, 12), Lengths(16, 24), 0)
    kinds = {str(one.ask.options.get("draft_tokens")) for one in known}
    assert {"0", "1", "2", "3", "auto"} <= kinds
    assert {one.reason for one in known} == {"length", "stop"}
    assert any("seed" in one.ask.options for one in known)
    assert all(len(one.token_ids) == one.ask.new_tokens for one in known if one.reason == "length")


def test_a_server_that_cannot_start_says_where_its_reason_is(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with refused("ended before it was ready", str(log), error=ServerError):
        ServerProcess(tmp_path / "nothing", [], log).start()
    assert "does not exist" in log.read_text()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--url", "http://10.0.0.1:8000"), ("is not this machine", "--allow-remote")),
        (("--url", "http://127.0.0.1:1", "--soak", "5"), ("a soak kills its server", "--url")),
        (("--concurrency", "0"), ("--concurrency is '0'",)),
        (("--concurrency", "1,1000"), ("from 1 to 256",)),
        (("--prompt-tokens", "9:3"), ("--prompt-tokens is '9:3'",)),
        (("--new-tokens", "16:200"), ("do not fit into the 160",)),
        (("--fault", "change-token"), ("--fault goes with --soak",)),
        (("--soak", "5", "--fault", "dance"), ("--fault is 'dance'", *FAULTS)),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(
    bundle: Path, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    with refused(*parts, error=RequestError):
        main.main([str(bundle), *arguments], standalone_mode=False)


def test_lengths_that_are_none_are_refused_by_their_option() -> None:
    with refused("--new-tokens is 'x'", error=RequestError):
        Lengths.parsed("x", "--new-tokens")
