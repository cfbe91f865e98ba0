"""The command `mtp-run acceptance`: what it prints and draws, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import click
import pytest

from mtp_engines.costs import CycleCosts
from mtp_tools.acceptance import cli, plot
from mtp_tools.acceptance.report import report
from mtp_tools.acceptance.results import Setting, record_of, results_of, warnings_of
from mtp_tools.acceptance.study import OWN, REFERENCE, Domain
from tests.fixtures.checkpoints import markov_checkpoint, tinytext_tokenizer
from tests.fixtures.dense_markov import plain_markov_checkpoint
from tests.support import build_bundle, command_refused, refused, run_command

K = 3
PIECES = tuple("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .")
LINES: tuple[dict[str, Any], ...] = (
    {"prompt": "ef", "domain": "code", "id": 7},
    {"prompt_ids": [7], "domain": "talk", "continuation": "ijk1"},
    {"prompt_ids": [6], "max_new_tokens": 12},
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("command")
    checkpoint = markov_checkpoint(place / "c", draft="third", tokenizer=tinytext_tokenizer(PIECES))
    return build_bundle(checkpoint, place / "third", draft_tokens=K)


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("command")
    return build_bundle(markov_checkpoint(place / "c", draft="wrong"), place / "wrong", draft_tokens=K)


def written(folder: Path, lines: Sequence[dict[str, Any]]) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


def run(bundle: Path, prompts: Path, *arguments: str | Path) -> None:
    words = [str(bundle), "--prompts", str(prompts), "--threads", "1", "--new-tokens", "20", *map(str, arguments)]
    cli.acceptance.main(words, "mtp-run acceptance", standalone_mode=False)


def as_json(bundle: Path, folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    run(bundle, written(folder, LINES), "--json", *arguments)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    found: dict[str, Any] = json.loads(lines[0])
    return found


# What it says


def test_the_json_object_has_every_figure(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(bundle, tmp_path, capsys)
    assert [domain["domain"] for domain in found["domains"]] == ["code", "talk", "untagged", "all domains"]
    assert (found["drafter"], found["draft_tokens"], found["missing_coverage"]) == ("mtp", [1, 2, 3], None)
    for domain in found["domains"]:
        free = domain["free_running"]
        assert sum(free["emitted_histogram"].values()) == free["cycles"]
        emitted = sum(int(length) * count for length, count in free["emitted_histogram"].items())
        assert free["emitted_per_cycle"] == pytest.approx(emitted / free["cycles"])
        for share in free["conditional"]:
            assert share["interval"][0] <= share["rate"] <= share["interval"][1]
        assert [one["draft_tokens"] for one in domain["expected"]] == [0, 1, 2, 3]
        assert domain["best_draft_tokens"] in range(4)
    code, talk, untagged, everything = found["domains"]
    assert [taught["teacher"] for taught in code["teacher_forced"]] == [OWN]
    assert [taught["teacher"] for taught in talk["teacher_forced"]] == [REFERENCE]
    assert [taught["teacher"] for taught in everything["teacher_forced"]] == [OWN, REFERENCE]
    # Behind 8, 9, 10 the reference goes on with 9, 10 and 53; the head is wrong behind 9.
    assert [share["kept"] for share in talk["teacher_forced"][0]["top_1"]] == [1, 0, 0]
    assert [share["trials"] for share in talk["teacher_forced"][0]["top_1"]] == [3, 2, 1]
    assert untagged["teacher_forced"][0]["top_1"][0]["trials"] == 11
    assert found["warnings"] == []


def test_the_costs_are_those_of_the_bundle(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(bundle, tmp_path, capsys)
    costs = found["cycle_costs_s"]
    assert (len(costs["verify"]), len(costs["draft"])) == (K + 1, K)
    for domain in found["domains"]:
        rates = [share["rate"] for share in domain["free_running"]["conditional"]]
        one = domain["expected"][1]
        assert one["tokens_per_cycle"] == pytest.approx(1 + rates[0])
        seconds = costs["draft"][0] + costs["verify"][1] + (1 - rates[0]) * costs["commit"]
        assert one["cycle_s"] == pytest.approx(seconds)
        assert one["speedup"] == pytest.approx((1 + rates[0]) * costs["verify"][0] / seconds)


def test_tables_for_each_domain_and_a_summary(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(bundle, written(tmp_path, LINES), "--draft-tokens", "3,1")
    printed = capsys.readouterr().out
    assert re.findall(r"^== (.+?): (\d) prompts?, \d+ cycles$", printed, re.MULTILINE) == [
        ("code", "1"), ("talk", "1"), ("untagged", "1"), ("all domains", "3"),
    ]  # fmt: skip
    assert printed.count("free-running, drafter mtp, K = 3") == 4
    assert printed.count(f"teacher-forced, teacher: {OWN}") == 3
    assert printed.count(f"teacher-forced, teacher: {REFERENCE}") == 2
    assert len(re.findall(r"^\| 1 \| \d\.\d\d \|", printed, re.MULTILINE)) == 4
    assert not re.findall(r"^\| 2 \| \d\.\d\d \|", printed, re.MULTILINE), "K = 2 was not asked for"
    summary = printed.split("| domain |")[1].splitlines()
    assert [line.split(" | ")[0] for line in summary[2:6]] == ["| code", "| talk", "| untagged", "| all domains"]
    for line in printed.split("\n\n"):
        rows = [row for row in line.splitlines() if row.startswith("|")]
        assert len({row.count("|") for row in rows}) <= 1, f"a table whose rows differ: {rows}"


def test_answers_too_short_to_draft_in_have_no_rate(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(bundle, written(tmp_path, [{"prompt_ids": [5], "max_new_tokens": 1}]))
    printed = capsys.readouterr().out
    assert "| 1 | n/a | n/a | n/a |" in printed
    assert "emitted by a cycle: n/a; mean n/a" in printed
    assert "best K: 0" in printed
    assert "WARNING" not in printed, "nothing was drafted, so nothing is broken"


def test_a_head_that_is_never_right_is_called_broken(
    wrong: Path, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = written(tmp_path, [{"prompt_ids": [5]}])
    run(wrong, prompts)
    printed = capsys.readouterr().out
    assert "WARNING: none of " in printed
    assert "looks broken" in printed
    assert "| 2 | 0 | 0 | n/a |" in printed
    run(bundle, prompts)
    assert "WARNING" not in capsys.readouterr().out, "control: a head that is right sometimes"


def test_fifteen_drafted_tokens_are_too_few_to_call_it_broken() -> None:
    setting = Setting("b", "mtp", [K], 20, CycleCosts((1.0,) * 4, (0.1,) * 3, 0.0, 0.0), None)
    for cycles, count in ((5, 0), (6, 1)):
        domain = Domain("code", 1)
        for _ in range(cycles):
            domain.stats.add_cycle(K, 0, 1)
        results = results_of([domain], setting)
        assert len(warnings_of(results[-1], setting)) == count
        assert len(record_of(results, setting)["warnings"]) == count
        assert sum("looks broken" in line for line in report(results, setting)) == count


def test_a_lookup_says_why_it_has_no_coverage(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(bundle, written(tmp_path, [{"prompt_ids": [5, 6, 7, 8, 5, 6]}]), "--drafter", "ngram")
    printed = capsys.readouterr().out
    assert "no coverage: a lookup copies from the text" in printed
    assert "teacher-forced, teacher" not in printed


# What it draws


class _Page(HTMLParser):
    """Elements, and what they would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]


def test_pictures_of_both_types_are_written(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")
    prompts = written(tmp_path, LINES)
    png, page = tmp_path / "out.PNG", tmp_path / "out.html"
    run(bundle, prompts, "--plot", png)
    assert png.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    run(bundle, prompts, "--plot", page)
    content = page.read_text(encoding="utf-8")
    seen = _Page()
    seen.feed(content)
    assert {"svg", "pre", "h1"} <= set(seen.elements)
    assert "script" not in seen.elements
    assert [place for place in seen.fetched if not place.startswith("#")] == [], "it fetches nothing"
    assert "== code: 1 prompt" in content
    assert "== code: 1 prompt" in capsys.readouterr().out, "the tables are printed all the same"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.PNG", "out.html", "prompts.jsonl"]


def test_the_lines_drawn_are_the_figures() -> None:
    domain = Domain("code", 1)
    for accepted in (3, 1, 0, 0):
        domain.stats.add_cycle(K, accepted, accepted + 1)
    costs = CycleCosts((1.0, 1.1, 1.2, 1.3), (0.1, 0.2, 0.3), 0.0, 0.0)
    (result,) = results_of([domain], Setting("b", "mtp", [1, 3], 20, costs, None))
    places, values, below, above = plot.acceptance_line(result)
    assert (places, values) == ([1, 2, 3], [0.5, 0.5, 1.0])
    assert all(value >= 0 for value in (*below, *above))
    assert above[2] == 0
    assert below[2] > below[0] > 0, "one trial says less than four"
    assert plot.speed_line(result)[:2] == ([0, 1, 3], pytest.approx([1.0, 1.5 / 1.2, 2.0 / 1.6]))


def test_a_picture_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with refused("out.png", "No space left", "another --plot"):
        run(bundle, written(tmp_path, LINES), "--plot", tmp_path / "out.png")
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("out.pdf", ["out.pdf", ".png or .html"]),
        ("out", [".png or .html"]),
        ("missing/out.png", ["cannot be written"]),
        ("folder.html", ["cannot be written"]),
    ],
)
def test_a_picture_of_another_type_or_place_is_refused_before_anything_runs(
    tmp_path: Path, name: str, parts: list[str]
) -> None:
    (tmp_path / "folder.html").mkdir()
    with refused("--plot is", *parts):
        run(tmp_path / "no bundle", tmp_path / "no file", "--plot", tmp_path / name)


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtp_tools.bench.plot.find_spec", lambda name: None)
    with refused("matplotlib", "mtp-export[bench]"):
        run(tmp_path / "no bundle", tmp_path / "no file", "--plot", tmp_path / "out.png")


# What it refuses


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ({"domain": 5}, ["line 2", "domain = 5", "a text"]),
        ({"domain": " "}, ["line 2", "domain"]),
        ({"domain": None}, ["line 2", "domain = None"]),
        ({"draft_tokens": 2}, ["line 2", "draft_tokens", "--draft-tokens"]),
        ({"drafter": "ngram"}, ["line 2", "drafter", "--drafter"]),
        ({"verify": "step"}, ["line 2", "verify"]),
        ({"draft_confidence": 0.5}, ["line 2", "draft_confidence"]),
        ({"continuation": "ab", "continuation_ids": [1]}, ["line 2", "both given"]),
        ({"continuation": 5}, ["line 2", "continuation is 5"]),
        ({"continuation": ""}, ["line 2", "continuation has no tokens"]),
        ({"continuation_ids": []}, ["line 2", "continuation_ids has no tokens"]),
        ({"continuation_ids": [1.5]}, ["line 2", "integers"]),
        ({"continuation_ids": [[1], 2]}, ["line 2", "integers"]),
        ({"continuation_ids": [64]}, ["line 2", "the token id 64", "0 to 63"]),
        ({"continuation_ids": [1] * 64}, ["line 2", "64 tokens", "max-model-len"]),
        ({"topic": "code"}, ["line 2", "'topic'"]),
        ({"prompt": "a"}, ["line 2", "exactly one"]),
        ({"max_new_tokens": -1}, ["line 2", "max_new_tokens"]),
    ],
)
def test_a_line_that_cannot_be_studied_is_named(
    bundle: Path, tmp_path: Path, line: dict[str, Any], parts: list[str]
) -> None:
    prompts = written(tmp_path, [{"prompt_ids": [5], "domain": "x"}, {"prompt_ids": [5], **line}])
    with refused(str(prompts), *parts):
        run(bundle, prompts)


def test_a_text_needs_a_tokenizer(wrong: Path, tmp_path: Path) -> None:
    with refused("line 1", "no tokenizer", "continuation_ids"):
        run(wrong, written(tmp_path, [{"prompt_ids": [5], "continuation": "a"}]))


@pytest.mark.parametrize(("widths", "found"), [("1,x", "'1,x'"), ("", "''"), ("0,1", "0,1"), ("-1", "-1")])
def test_a_bad_list_of_k_is_bad_usage(bundle: Path, tmp_path: Path, widths: str, found: str) -> None:
    with pytest.raises(click.UsageError, match=found) as caught:
        run(bundle, written(tmp_path, LINES), "--draft-tokens", widths)
    assert caught.value.message.endswith(".")


def test_a_bundle_without_a_head_is_refused(tmp_path: Path) -> None:
    headless = build_bundle(plain_markov_checkpoint(tmp_path / "c"), tmp_path / "headless", draft_tokens=K)
    prompts = written(tmp_path, [{"prompt_ids": [5]}])
    with refused("line 1", "without an MTP head", "ngram"):
        run(headless, prompts)
    run(headless, prompts, "--drafter", "ngram")  # Control: what the sentence proposes.


def test_refusals_of_the_command_are_one_sentence(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    empty = run_command("mtp-run", "acceptance", bundle, "--prompts", tmp_path / "empty.jsonl")
    command_refused(empty, "empty.jsonl has no prompts")
    prompts = written(tmp_path, LINES)
    wide = run_command("mtp-run", "acceptance", bundle, "--prompts", prompts, "--draft-tokens", "1,4")
    command_refused(wide, "asks for 4", "built for 0 to 3")
    usage = run_command("mtp-run", "acceptance", bundle, "--prompts", prompts, "--draft-tokens", "often")
    command_refused(usage, "'often'", code=2)
