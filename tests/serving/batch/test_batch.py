"""`mtp-run batch`: every line is answered once, whatever stops the program in between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from filelock import FileLock

from mtp_engines.errors import RequestError
from mtp_runtime import Model
from mtp_runtime.api import load
from mtp_runtime.batching.scheduler import Scheduler
from mtp_runtime.request import Request
from mtp_serving.batch.answers import answers
from mtp_serving.batch.cli import batch
from mtp_serving.batch.clusters import Answers
from mtp_serving.batch.files import Output, digest_of
from tests.runtime.conftest import CARRIED
from tests.support import build_bundle, refused

LINES = [
    {"prompt": "def add(a, b):", "max_new_tokens": 12, "id": "one"},
    {"prompt_ids": [1, 2, 3], "max_new_tokens": 20, "draft_tokens": 0},
    {"prompt": "The list", "max_new_tokens": 7, "temperature": 1.0, "seed": 3},
    {"prompt": "x = ", "max_new_tokens": 9, "temperature": 0.8, "seed": 4, "n": 3, "id": 7},
    {"prompt": "for i in", "max_new_tokens": 24, "draft_tokens": 2, "stop": "\n"},
]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("batch") / "bundle"
    build_bundle(CARRIED, place, max_model_len=256, max_batch_size=4)
    return place


@pytest.fixture(scope="module")
def model(bundle: Path) -> Model:
    return load(bundle)


def written(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(bundle: Path, source: Path, output: Path, *more: str) -> tuple[int, str]:
    """The command in this process: its exit code, and what it said or was refused with."""
    result = CliRunner().invoke(
        batch, [str(bundle), "--input", str(source), "--output", str(output), *more], standalone_mode=False
    )
    if result.exception is not None:
        assert isinstance(result.exception, RequestError), result.exception
        return 1, str(result.exception)
    return int(result.return_value), result.stderr


def records(path: Path) -> dict[int, dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    counts = Counter(record["line"] for record in found)
    assert set(counts.values()) <= {1}, f"lines answered more than once: {counts}"
    return {record["line"]: record for record in found}


def ids_of(record: dict[str, Any]) -> list[list[int]]:
    return [one["token_ids"] for one in record.get("answers", [record])]


def test_every_line_has_the_answers_that_it_has_alone(bundle: Path, model: Model, tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", LINES)
    code, said = run(bundle, source, tmp_path / "out.jsonl")
    assert (code, "5 lines answered" in said) == (0, True)
    found = records(tmp_path / "out.jsonl")
    for number, line in enumerate(LINES, 1):
        alone = model.complete_all(Request(**line))
        assert ids_of(found[number]) == [list(answer.token_ids) for answer in alone]
        assert found[number].get("id") == line.get("id")
        assert found[number]["digest"] == digest_of(json.dumps(line))


def test_lines_that_cannot_be_answered_say_why_and_the_others_go_on(bundle: Path, tmp_path: Path) -> None:
    wrong = [
        LINES[0],
        {"prompt": ""},
        {"prompt": "a", "tempature": 1},
        [],
        {"prompt": "b", "draft_tokens": 99},
        LINES[1],
    ]
    source = written(tmp_path / "in.jsonl", wrong)
    source.write_text(source.read_text() + "\n\n{not json\n")
    code, said = run(bundle, source, tmp_path / "out.jsonl")
    found = records(tmp_path / "out.jsonl")
    assert (code, "5 have an error, line 2: the prompt has no tokens" in said) == (1, True)
    assert sorted(found) == [1, 2, 3, 4, 5, 6, 9], "blank lines are no prompts"
    assert {number for number, record in found.items() if "error" in record} == {2, 3, 4, 5, 9}
    assert "tempature" in found[3]["error"]
    assert found[2]["error"] == "the prompt has no tokens; give at least one."


def test_started_again_it_goes_on_and_asks_errors_again_only_if_told(bundle: Path, tmp_path: Path) -> None:
    source, output = written(tmp_path / "in.jsonl", [LINES[0], {"prompt": ""}, LINES[1]]), tmp_path / "out.jsonl"
    run(bundle, source, output)
    before = records(output)
    code, said = run(bundle, source, output)
    assert (code, "all 3 lines were answered before; 1 have an error, line 2" in said) == (1, True)
    assert said.rstrip().endswith("--retry-errors asks them again")
    code, said = run(bundle, source, output, "--retry-errors")
    assert (code, "1 lines answered, 2 were there" in said) == (1, True)
    assert {number: ids_of(record) for number, record in records(output).items() if number != 2} == {
        number: ids_of(record) for number, record in before.items() if number != 2
    }


def test_what_a_kill_left_of_a_line_is_cut_off(bundle: Path, tmp_path: Path) -> None:
    source, output = written(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    run(bundle, source, output)
    whole = records(output)
    data = output.read_bytes()
    for length in (1, len(data) - 1, data.index(b"\n") + 1, data.index(b"\n") + 5):
        output.write_bytes(data[:length])
        run(bundle, source, output)
        assert {number: ids_of(record) for number, record in records(output).items()} == {
            number: ids_of(record) for number, record in whole.items()
        }


def test_a_killed_program_has_lost_and_doubled_nothing(bundle: Path, model: Model, tmp_path: Path) -> None:
    """Killed again and again at different times, until it ends by itself."""
    lines = [{"prompt_ids": [number, 5], "max_new_tokens": 30, "ignore_eos": True} for number in range(1, 25)]
    source, output = written(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    program = (sys.executable, "-c", "from mtp_runtime.cli import main; main()", "batch", str(bundle))
    kills, seen = 0, 0
    while True:
        child = subprocess.Popen([*program, "--input", str(source), "--output", str(output)], stderr=subprocess.DEVNULL)
        try:
            while child.poll() is None and not (output.exists() and output.stat().st_size > seen and kills < 4):
                time.sleep(0.005)
        finally:
            if child.poll() is None:
                os.kill(child.pid, signal.SIGKILL)
            code = child.wait()
        if code == 0:
            break
        assert code == -signal.SIGKILL
        kills, seen = kills + 1, output.stat().st_size
    assert kills >= 2, "control: it was killed in the middle"
    found = records(output)
    assert sorted(found) == list(range(1, 25))
    for number in (1, 12, 24):
        assert ids_of(found[number]) == [list(model.complete(Request(**lines[number - 1])).token_ids)]


def test_control_an_output_that_forgets_what_is_done_is_seen(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = written(tmp_path / "in.jsonl", LINES[:2]), tmp_path / "out.jsonl"
    run(bundle, source, output)
    monkeypatch.setattr("mtp_serving.batch.cli.require_same", lambda *parts: False)
    run(bundle, source, output)
    with pytest.raises(AssertionError, match="more than once"):
        records(output)


def test_what_is_refused_before_a_model_is_loaded(tmp_path: Path, bundle: Path) -> None:
    source, output = written(tmp_path / "in.jsonl", LINES[:2]), tmp_path / "out.jsonl"
    run(bundle, source, output)
    nowhere = tmp_path / "no-bundle"
    written(source, [LINES[1], LINES[0]])
    assert "line 1 is not the one that the output answers" in run(nowhere, source, output)[1]
    assert "cannot be read" in run(nowhere, tmp_path / "absent", output)[1]
    (tmp_path / "other").write_text('{"text": "mine"}\n')
    assert "line 1 is no answer of" in run(nowhere, source, tmp_path / "other")[1]
    assert (tmp_path / "other").read_text() == '{"text": "mine"}\n'
    with FileLock(f"{output}.lock"):
        assert "is being written by another process" in run(nowhere, source, output)[1]
    assert "is no file" in run(nowhere, source, tmp_path)[1]
    assert "there is no directory" in run(nowhere, source, tmp_path / "absent" / "out.jsonl")[1]
    (tmp_path / "empty").write_text("\n")
    assert "has no prompts" in run(nowhere, tmp_path / "empty", tmp_path / "new.jsonl")[1]


def test_options_that_no_line_could_use_are_refused_before_anything_is_written(bundle: Path, tmp_path: Path) -> None:
    source, output = written(tmp_path / "in.jsonl", LINES[:2]), tmp_path / "out.jsonl"
    code, said = run(bundle, source, output, "--draft-tokens", "99")
    assert (code, "draft_tokens is 99" in said) == (1, True)
    assert output.read_bytes() == b""


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = Output(tmp_path / "out.jsonl")
    output.add(1, "a", {"token_ids": []})

    class Full:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def write(self, data: bytes) -> int:
            self._inner.write(data[: len(data) // 2])
            raise OSError(28, "No space left on device")

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    whole, right = output._file, (tmp_path / "out.jsonl").read_bytes()
    output._file = Full(whole)
    with refused("cannot be written: No space left on device", error=RequestError):
        output.add(2, "b", {"token_ids": []})
    output._file = whole
    output.close()
    assert (tmp_path / "out.jsonl").read_bytes() == right
    again = Output(tmp_path / "out.jsonl")
    again.close()
    assert again.done == {1: digest_of("a")}


def test_lines_are_read_as_slots_become_free(model: Model) -> None:
    scheduler, taken = Scheduler(model), 0

    def lines() -> Any:
        nonlocal taken
        for number in range(1, 41):
            taken += 1
            yield number, json.dumps({"prompt_ids": [number], "max_new_tokens": 3})

    scheduler.start()
    try:
        found, ahead = {}, []
        for number, record in answers(scheduler, lines(), {}):
            found[number] = record
            ahead.append(taken - len(found))
    finally:
        scheduler.close()
    assert sorted(found) == list(range(1, 41))
    assert max(ahead) < 2 * scheduler.slots


def test_a_worker_of_a_cluster_answers_its_rows_in_their_order(bundle: Path, model: Model) -> None:
    requests = [json.dumps(line) for line in (*LINES, {"prompt": ""}, *LINES[::-1])]
    worker = Answers(bundle, {"draft_tokens": 2})
    try:
        found = worker({"key": np.arange(11), "request": np.array(requests, object)})
    finally:
        worker.close()
    assert found["key"].tolist() == list(range(11))
    for text, answer in zip(requests, found["answer"].tolist(), strict=True):
        record = json.loads(answer)
        if "error" in record:
            assert json.loads(text) == {"prompt": ""}
        else:
            alone = model.complete_all(Request(**json.loads(text)))
            assert ids_of(record) == [list(one.token_ids) for one in alone]


@pytest.mark.parametrize("content", ['{"prompt": "abc"}', "my notes", '{"line', "{"])
def test_a_file_that_is_not_its_own_is_left_alone(content: str, bundle: Path, tmp_path: Path) -> None:
    """Without an end of line too, where a kill may have left a part of an answer."""
    source, output = written(tmp_path / "in.jsonl", LINES[:1]), tmp_path / "mine"
    output.write_text(content)
    code, said = run(bundle, source, output)
    if '{"line": '.startswith(content):
        assert code == 0, "the beginning of an answer"
    else:
        assert (code, "ends in what is no answer" in said) == (1, True)
        assert output.read_text() == content
    assert "--input and --output are both" in run(bundle, source, source)[1]
    assert source.read_text() == json.dumps(LINES[0]) + "\n"
    assert "is no file" in run(bundle, source, Path("/dev/null"))[1]
