"""`mtp_tools.neighbours` in parts: figures, ratios, copies of checkpoints, environments, conversions."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from tokenizers import Tokenizer

from mtp_engines.errors import CheckpointError
from mtp_tools.neighbours import conversions, environments
from mtp_tools.neighbours.checkpoints import claim, read_config, write_copy, write_vision_copy
from mtp_tools.neighbours.contenders import NEIGHBOURS, OURS, Contender, Engine, contenders_from
from mtp_tools.neighbours.conversions import Job, Prepared, prepare_ours
from mtp_tools.neighbours.environments import ENVIRONMENTS, Environment, make_environment
from mtp_tools.neighbours.process import Worker
from mtp_tools.neighbours.protocol import NeighbourError, Question, Ready, Reply, ready_from, reply_from
from mtp_tools.neighbours.results import compare, rows_of
from mtp_tools.neighbours.rounds import Case, Entry
from mtp_tools.neighbours.workers.ours import load as load_ours
from tests.fixtures.checkpoints import partial_checkpoint
from tests.support import refused

HOST = Path(conversions.__file__).parent / "workers" / "host.py"
PROMPT = (5, 6, 20)
QUESTION = Question((1, 2), 3, 0)
ANSWER = {"ids": [3, 4, 5], "first_s": 0.5, "total_s": 1.5, "peak_bytes": 7}


class Silent:
    """A worker that is never asked."""

    def ask(self, question: Question) -> Reply:
        raise AssertionError("nobody asks")

    def close(self) -> None:
        """Nothing to end."""


def entry(engine: Engine, group: str) -> Entry:
    return Entry(Contender(engine, group), Silent(), Ready((0,), {}))


def case(of: Entry, draft_tokens: int, *totals: float | None) -> Case:
    """Answers of 11 tokens to a prompt of 10, the first after a tenth of the time."""
    replies = [None if total is None else Reply(tuple(range(11)), 10, total / 10, total, 1) for total in totals]
    return Case(of, draft_tokens, replies)


def test_figures_are_tokens_over_their_own_part_of_the_time() -> None:
    reply = reply_from(ANSWER, QUESTION)
    assert reply.prefill_tokens_per_s == pytest.approx(2 / 0.5)
    assert reply.decode_tokens_per_s == pytest.approx(2 / 1.0)
    later = reply_from({**ANSWER, "total_s": 2.5}, QUESTION)
    assert later.prefill_tokens_per_s == reply.prefill_tokens_per_s
    assert later.decode_tokens_per_s == pytest.approx(1.0), "control"


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"error": "no memory"}, "no memory"),
        ({"ids": None}, "no usable"),
        ({"first_s": 2.0}, "the first after 2.0 s"),
        ({"ids": [3]}, "it gave 1 tokens"),
    ],
)
def test_an_answer_without_sense_is_refused(change: dict[str, Any], part: str) -> None:
    assert reply_from(ANSWER, QUESTION).ids == (3, 4, 5), "control"
    with refused(part, error=NeighbourError):
        reply_from({**ANSWER, **change}, QUESTION)


def test_a_first_line_names_its_k_or_its_error() -> None:
    assert ready_from({"draft_tokens": [0, 1], "about": {}}).draft_tokens == (0, 1)
    with refused("must name its draft_tokens", error=NeighbourError):
        ready_from({"about": {}})
    with refused("not installed", error=NeighbourError):
        ready_from({"error": "not installed"})


def test_ratios_are_taken_round_by_round_and_against_the_best() -> None:
    ours, fast, slow = entry(OURS, "fp32"), entry(NEIGHBOURS[0], "fp32"), entry(NEIGHBOURS[1], "fp32")
    # The machine slows down threefold; round by round, ours takes half the time of the fast one and more.
    cases = [case(ours, 0, 1.0, 3.0, 3.0), case(ours, 2, 0.5, None, 1.5), case(fast, 0, 2.0, 6.0, 7.5)]
    cases.append(case(slow, 0, 8.0, 8.0, 8.0))
    found = {c.what: c for c in compare(rows_of(cases))}
    plain = found["whole request, plain, s"]
    assert plain.theirs.case.entry is fast
    assert plain.ratio.median == pytest.approx(2.0)
    assert (plain.ratio.least, plain.ratio.greatest) == pytest.approx((2.0, 2.5))
    best = found["whole request, best K, s"]
    assert best.ours.case.draft_tokens == 2
    assert (best.ratio.least, best.ratio.greatest) == pytest.approx((4.0, 5.0)), "the round that is missing has none"
    assert found["decode tok/s, plain"].ratio.median == pytest.approx(2.0), "more is better there"
    row = next(row for row in rows_of(cases) if row.case.draft_tokens == 2)
    assert row.over_plain is not None
    assert row.over_plain.median == pytest.approx(2.0)


def test_only_engines_of_one_group_are_compared() -> None:
    ours, other = entry(OURS, "int8"), entry(NEIGHBOURS[1], "int4")
    assert list(compare(rows_of([case(ours, 0, 1.0), case(other, 0, 2.0)]))) == []
    same = entry(NEIGHBOURS[1], "int8")
    assert {c.group for c in compare(rows_of([case(ours, 0, 1.0), case(same, 0, 2.0)]))} == {"int8"}, "control"


def checkpoint(folder: Path, **files: str) -> Path:
    folder.mkdir()
    text = {"vocab_size": 64, "head_dim": 16, "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 5}}
    config = {"architectures": ["XForConditionalGeneration"], "tie_word_embeddings": True, "text_config": text}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"weights")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content, encoding="utf-8")
    return folder


def test_a_copy_has_a_tokenizer_in_which_words_are_ids(tmp_path: Path) -> None:
    copy = write_copy(checkpoint(tmp_path / "c"), tmp_path / "copy")
    tokenizer = Tokenizer.from_file(str(copy / "tokenizer.json"))
    assert tokenizer.encode("t17 t0 t62").ids == [17, 0, 62]
    assert tokenizer.get_vocab_size() == 64
    assert (copy / "model.safetensors").is_symlink()
    config = read_config(copy)
    assert config["architectures"] == ["XForConditionalGeneration"]
    assert config["text_config"]["tie_word_embeddings"] is True
    assert config["text_config"]["rope_parameters"]["mrope_section"] == [2, 1, 1]
    assert config["text_config"]["rope_parameters"]["rope_theta"] == 5
    assert "mrope_section" not in (tmp_path / "c" / "config.json").read_text(encoding="utf-8"), "the original stays"
    write_copy(tmp_path / "c", copy)


def test_a_copy_of_the_text_alone_names_its_class(tmp_path: Path) -> None:
    config = read_config(write_copy(checkpoint(tmp_path / "c"), tmp_path / "copy", text_only=True))
    assert config["architectures"] == ["XForCausalLM"]
    assert (config["vocab_size"], "text_config" in config) == (64, False)


def test_a_tokenizer_of_the_checkpoint_is_kept(tmp_path: Path) -> None:
    copy = write_copy(checkpoint(tmp_path / "c", tokenizer="{}"), tmp_path / "copy")
    assert (copy / "tokenizer.json").read_text(encoding="utf-8") == "{}"


def test_a_directory_without_configuration_is_refused(tmp_path: Path) -> None:
    with refused("config.json", "give a checkpoint", error=CheckpointError):
        read_config(tmp_path)


def test_a_command_that_fails_says_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "log"
    program = "import sys\nfor i in range(9): print('line', i)\nsys.exit(int(sys.argv[1]))"
    with refused("it is stuck: line 6 line 7 line 8", error=NeighbourError):
        environments.run([sys.executable, "-c", program, "3"], "it is stuck", log)
    assert "line 0" in log.read_text(encoding="utf-8")
    environments.run([sys.executable, "-c", program, "0"], "control")
    with refused("it is stuck", "No such file", error=NeighbourError):
        environments.run([str(tmp_path / "nothing")], "it is stuck")


def test_an_environment_is_made_once_and_again_for_other_releases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def pretend(command: Sequence[str], failure: str, log: Path | None = None) -> None:
        ran.append(" ".join(command[1:4]))
        (tmp_path / "venvs" / "x").mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(environments, "run", pretend)
    make_environment(Environment("x", ("a==1",)), tmp_path)
    assert ran == ["-m venv --clear", "-m pip install"]
    make_environment(Environment("x", ("a==1",)), tmp_path)
    assert len(ran) == 2
    make_environment(Environment("x", ("a==2",), unwanted=("b",)), tmp_path)
    assert ran[2:] == ["-m venv --clear", "-m pip install", "-m pip uninstall"]


def test_every_environment_pins_what_is_measured() -> None:
    for environment in ENVIRONMENTS.values():
        pinned = {name.split("==")[0] for name in environment.requirements if "==" in name}
        assert "torch" in pinned, "a plain torch brings a GPU's libraries"
        assert len(pinned) > 1


def job(folder: Path) -> Job:
    return Job(folder / "checkpoint", folder / "work", 1, 64, (1, "auto"), None, None, 0)


def test_a_conversion_that_fails_leaves_nothing_and_one_that_is_done_is_kept(tmp_path: Path) -> None:
    wanted = tmp_path / "model"

    def program(code: str) -> Any:
        return lambda out: [sys.executable, "-c", code, str(out)]

    writes = "import sys, pathlib\npathlib.Path(sys.argv[1]).write_text('x')\n"
    with refused("its converter failed", "boom", error=NeighbourError):
        conversions._made(wanted, job(tmp_path), program(writes + "raise SystemExit('boom')"))
    assert not wanted.exists()
    conversions._made(wanted, job(tmp_path), program(writes))
    assert wanted.read_text(encoding="utf-8") == "x"
    conversions._made(wanted, job(tmp_path), program("raise SystemExit('it ran again')"))


def test_a_checkpoint_that_cannot_be_built_is_a_reason_and_no_crash(tmp_path: Path) -> None:
    with refused("the bundle cannot be built", error=NeighbourError):
        conversions.prepare_ours(job(tmp_path), "fp32")


def test_auto_is_asked_of_ours_alone(tmp_path: Path) -> None:
    assert job(tmp_path).fixed_draft_tokens == (1,)


def test_a_copy_with_images_has_a_tower_only_where_there_was_none(tmp_path: Path) -> None:
    given = checkpoint(tmp_path / "c")
    config = read_config(given) | {"model_type": "x"}
    config["text_config"]["hidden_size"] = 48
    (given / "config.json").write_text(json.dumps(config), encoding="utf-8")
    copied = read_config(write_vision_copy(given, tmp_path / "copy"))
    assert copied["vision_config"]["out_hidden_size"] == 48
    assert copied["architectures"] == ["XForConditionalGeneration"]
    marks = {name: token for name, token in copied.items() if name.endswith("_token_id")}
    assert len(set(marks.values())) == 4
    assert max(marks.values()) < 63, "the last token ends a text"
    (given / "config.json").write_text(json.dumps({**config, "vision_config": {"depth": 9}}), encoding="utf-8")
    assert read_config(write_vision_copy(given, tmp_path / "other"))["vision_config"] == {"depth": 9}, "control"


def test_a_copy_is_brought_up_to_date(tmp_path: Path) -> None:
    given = checkpoint(tmp_path / "c")
    write_copy(given, tmp_path / "copy")
    config = read_config(given) | {"tie_word_embeddings": False}
    (given / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert read_config(write_copy(given, tmp_path / "copy"))["text_config"]["tie_word_embeddings"] is False


def test_a_work_directory_serves_one_checkpoint(tmp_path: Path) -> None:
    given = checkpoint(tmp_path / "c")
    claim(tmp_path, given)
    claim(tmp_path, given)
    (given / "model.safetensors").write_bytes(b"other weights")
    with refused("holds models of another checkpoint", "--work", error=CheckpointError):
        claim(tmp_path, given)


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: contenders_from("nobody", None), "--only names 'nobody'"),
        (lambda: contenders_from(None, "fp7"), "--weights names 'fp7'"),
    ],
)
def test_unknown_names_are_refused(call: Callable[[], object], part: str) -> None:
    with pytest.raises(click.UsageError, match=part):
        call()


def test_names_choose_who_takes_part() -> None:
    names = [contender.name for contender in contenders_from("ours,llama.cpp", "int8,int4")]
    assert names == ["ours int8", "llama.cpp q8_0", "ours int4", "llama.cpp q4_0"]
    assert len(contenders_from(None, None)) > len(names)


@pytest.fixture
def ours(tmp_path: Path) -> Prepared:
    checkpoint = partial_checkpoint(tmp_path / "checkpoint")
    job = Job(checkpoint, tmp_path / "work", 1, 64, (2,), 1.0, None, 0)
    return prepare_ours(job, "fp32")


def test_our_own_worker_answers_and_forces_drafts(ours: Prepared, tmp_path: Path) -> None:
    worker = Worker([str(ours.python), str(HOST), str(HOST.parent / "ours.py")], tmp_path / "log", 1)
    try:
        assert worker.start(ours.settings).draft_tokens == (0, 2)
        plain, right = (worker.ask(Question(PROMPT, 13, width)) for width in (0, 2))
    finally:
        worker.close()
    assert plain.ids == right.ids
    assert right.accepted == right.drafted == 8, "12 tokens behind the first, three a cycle"
    assert plain.peak_bytes > 1 << 20
    wrong = load_ours({**ours.settings, "acceptance": 0.0}).answer(list(PROMPT), 13, 2)
    assert wrong["ids"] == list(plain.ids)
    assert wrong["accepted"] == 0, "control: the share is what decides"
