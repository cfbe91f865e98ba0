"""What a request may ask for: prompts, ids, K, options, files of JSON lines, and the command that takes them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_engines.backends import EngineOptions
from mtp_engines.errors import ContractError, RequestError
from mtp_runtime import Model, Request
from mtp_runtime.cli import requests_from_file
from tests.fixtures.checkpoints import (
    markov_checkpoint,
    partial_checkpoint,
    random_checkpoint,
    tinytext_tokenizer,
    write_tokenizer,
)
from tests.oracles.float64 import Oracle, load_checkpoint
from tests.runtime.conftest import Models
from tests.runtime.parts import plain, play, streamed
from tests.support import build_bundle, command_refused, generate, ids_of, load_model, refused, run_command

PIECES = ("A", "bc", "dS", "TO", "P!", "ef", "gh")
PROMPT = [5, 6, 20]
# What other tools take and this release does not have: RT-24, RT-26, RT-39, RT-53, SV-07.
FOREIGN: dict[str, Any] = {
    "response_format": {"type": "json_object"},
    "top_logprobs": 2,
    "echo": True,
    "min_tokens": 5,
    "stop_token_ids": [9],
    "best_of": 2,
    "num_beams": 2,
    "cache_prompt": True,
    "prefix": [1, 2],
    "session": "a",
    "max_tokens": 5,
    "stream": True,
    "adapter": "a",
}


# RT-43: empty prompts


def test_a_prompt_without_tokens_is_refused(markov: Models) -> None:
    """RT-43: no text, spaces only, text that the tokenizer does not know, no ids; the next request works."""
    model = markov(pieces=PIECES)
    for options in (
        {"prompt": ""},
        {"prompt": "   "},
        {"prompt": "xyz"},
        {"prompt_ids": []},
        {"prompt_ids": np.zeros(0, np.int64)},
    ):
        for draft_tokens in (0, 3):
            with refused("the prompt has no tokens", error=RequestError):
                model.complete(max_new_tokens=4, draft_tokens=draft_tokens, **options)
        assert list(model.complete(prompt="A", max_new_tokens=4).token_ids) == [1, 2, 3, 4]


def test_a_tokenizer_that_puts_a_token_in_front_makes_a_prompt_of_nothing(tmp_path: Path) -> None:
    """RT-43: with BOS the empty text, spaces and unknown text have one token, and generation starts from it."""
    checkpoint = markov_checkpoint(tmp_path / "c")
    write_tokenizer(checkpoint, tinytext_tokenizer(["#", "!", "a"]), bos=1, prepend_bos=True)
    model = load_model(build_bundle(checkpoint, tmp_path / "b"))
    for text in (" ", "xyz", ""):
        done = model.complete(prompt=text, max_new_tokens=3, draft_tokens=1)
        assert (done.prompt_tokens, list(done.token_ids)) == (1, [2, 3, 4])


# EN-06, RT-44, RT-45: the context


def test_the_limits_of_a_bundle_are_named(tmp_path: Path) -> None:
    """EN-06: built for 32 tokens, K = 2 and one sequence: a longer prompt, a larger K, a second sequence; 32 fit."""
    model = load_model(
        build_bundle(markov_checkpoint(tmp_path / "c"), tmp_path / "b", max_model_len=32, draft_tokens=2)
    )
    with refused("33 tokens", "may have 32", "--max-model-len"):
        generate(model, range(33), 1, 2)
    with refused("draft_tokens is 4", "0 to 2", "--draft-tokens"):
        generate(model, [5], 8, 4)
    with refused("2 sequences", "1 to 1", "--max-batch-size"):
        model.engine.sequences(2)
    cut = generate(model, range(30), 8, 2)
    assert (list(cut.token_ids), cut.finish_reason) == ([30, 31], "length")
    whole = generate(model, range(20), 12, 2)
    assert (list(whole.token_ids), whole.finish_reason) == (list(range(20, 32)), "length")


@pytest.mark.parametrize("draft_tokens", [0, 4])
def test_the_longest_prompt_does_not_depend_on_k(hybrid: Models, draft_tokens: int) -> None:
    """RT-44: prompts of 64 - K - 1 to 64 + K + 1 tokens: from 64 on refused with both numbers, before that exact."""
    model = hybrid(seed=37)
    ids = np.random.default_rng(37).integers(0, 112, 80).tolist()
    for length in range(59, 70):
        prompt = ids[:length]
        if length < 64:
            expected = plain(model, prompt, 64 - length).ids
            assert len(expected) == 64 - length
            assert ids_of(model, prompt, 20, draft_tokens) == expected
        else:
            with refused(f"{length} tokens", "may have 64", error=RequestError):
                generate(model, prompt, 20, draft_tokens)
            assert len(generate(model, PROMPT, 3, draft_tokens).token_ids) == 3


@pytest.mark.parametrize("kind", ["hybrid", "full"])
def test_nothing_is_drafted_past_the_last_position(tmp_path: Path, kind: str) -> None:
    """RT-45: context and positions of exactly 32, a prompt of 20: 12 tokens, equal for K = 0 to 8 and in float64."""
    layers = {} if kind == "hybrid" else {"layer_types": ["full_attention"] * 3}
    checkpoint = partial_checkpoint(tmp_path / "c", max_position_embeddings=32, **layers)
    model = load_model(build_bundle(checkpoint, tmp_path / "b", max_model_len=32, draft_tokens=8))
    prompt = np.random.default_rng(5).integers(0, 64, 20).tolist()
    expected = Oracle(load_checkpoint(checkpoint)).greedy(prompt, 12)
    for draft_tokens in range(9):
        run = streamed(model, prompt_ids=prompt, max_new_tokens=100, draft_tokens=draft_tokens)
        assert (run.ids, run.finished.finish_reason) == (expected, "length")
    # The control: a loop that does not know where the context ends is stopped by the engine.
    with pytest.raises(ContractError, match="leave the context of 32 tokens"):
        play(model, prompt, 100, 8)


# RT-41: K


def test_k_outside_the_bundle_is_refused_by_its_limit(markov: Models) -> None:
    """RT-41: every K from 0 to the limit, none outside; what is left out takes 3, or the limit if that is less."""
    model = markov(build={"draft_tokens": 4})
    for draft_tokens in range(5):
        assert ids_of(model, [5], 20, draft_tokens) == list(range(6, 26))
    for draft_tokens in (5, 100, -1):
        with refused(f"draft_tokens is {draft_tokens}", "0 to 4"):
            generate(model, [5], 20, draft_tokens)
    for value in ("3", 3.0, True):
        with refused("draft_tokens", repr(value)):
            model.complete(prompt_ids=[5], draft_tokens=value)
    assert model.complete(prompt_ids=[5], max_new_tokens=9).stats.emitted_histogram == {4: 2}
    small = markov(build={"draft_tokens": 1})
    assert small.complete(prompt_ids=[5], max_new_tokens=9).stats.emitted_histogram == {2: 4}


def test_speculation_without_a_head_is_refused(tmp_path: Path) -> None:
    """RT-41: a bundle built with --no-mtp takes K = 0 only; leaving K out is plain decoding."""
    model = load_model(build_bundle(markov_checkpoint(tmp_path / "c"), tmp_path / "b", mtp=False))
    with refused("draft_tokens is 2", "without an MTP head", "use 0"):
        generate(model, [5], 4, 2)
    for draft_tokens in (0, None):
        done = model.complete(prompt_ids=[5], max_new_tokens=4, draft_tokens=draft_tokens)
        assert (list(done.token_ids), done.stats.drafted) == ([6, 7, 8, 9], 0)


# Kinds of ids


def test_ids_of_every_integer_kind_are_the_same_prompt(hybrid: Models) -> None:
    """RT-43: lists, tuples, ranges and arrays of any integer width; the ids say the same."""
    model = hybrid(seed=37)
    expected = ids_of(model, [5, 6, 7], 8, 3)
    kinds: list[Any] = [(5, 6, 7), range(5, 8), [np.int32(5), np.uint8(6), np.int64(7)]]
    kinds += [np.array([5, 6, 7], kind) for kind in ("i1", "u1", "i2", "i4", "u4", "i8", "u8", ">i4")]
    kinds += [np.array([5, 0, 6, 0, 7])[::2]]
    for ids in kinds:
        done = model.complete(prompt_ids=ids, max_new_tokens=8, draft_tokens=3)
        assert (list(done.token_ids), done.prompt_tokens) == (expected, 3)
    assert ids_of(model, [5, 7, 6], 8, 3) != expected


@pytest.mark.parametrize(
    "ids",
    [
        [5.0],
        ["5"],
        "5",
        5,
        [True],
        [None],
        {5: 6},
        [[5, 6]],
        [[5, 6], [7]],
        np.ones(2),
        np.ones((1, 2), np.int64),
        [2**70, True],
    ],
    ids=repr,
)
def test_ids_that_are_no_row_of_integers_are_refused(markov: Models, ids: Any) -> None:
    """RT-43 and P1: one sentence that says what was found."""
    with refused("token ids must be", error=RequestError):
        markov().complete(prompt_ids=ids, max_new_tokens=1)


def test_ids_outside_the_vocabulary_are_refused(markov: Models) -> None:
    """RT-43: the id and the range are named, wherever it stands."""
    for ids in ([64], [5, 64], [5, -1, 6], [2**40], [10**30, 5], [2**64 - 1, 1]):
        bad = next(token for token in ids if not 0 <= token < 64)
        with refused(f"token id {bad}", "0 to 63"):
            generate(markov(), ids, 1, 0)
    assert ids_of(markov(), [63], 1) == [0]


def test_exactly_one_kind_of_prompt_is_taken(markov: Models) -> None:
    """P1: none and several are refused, with what was found."""
    model = markov(pieces=PIECES)
    messages = [{"role": "user", "content": "A"}]
    for options, found in (
        ({}, "none of them"),
        ({"prompt": "A", "prompt_ids": [5]}, "prompt and prompt_ids"),
        ({"prompt_ids": [5], "messages": messages}, "prompt_ids and messages"),
    ):
        with refused("exactly one of prompt, prompt_ids and messages", found):
            model.complete(max_new_tokens=1, **options)


# P3: options that this release does not have


@pytest.mark.parametrize("name", FOREIGN)
def test_an_option_that_does_not_exist_is_refused_by_name(markov: Models, tmp_path: Path, name: str) -> None:
    """RT-24, RT-26, RT-39, RT-53, SV-07 and P3: by the Python API and in a file of JSON lines."""
    with refused(repr(name), "does not have", error=RequestError):
        markov().generate(prompt_ids=[5], max_new_tokens=1, **{name: FOREIGN[name]})
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt_ids": [5]}, {"prompt_ids": [5], name: FOREIGN[name]}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with refused(repr(name), f"{file} line 2", error=RequestError):
        requests_from_file(file, {})
    # The control: the same lines without the option are two requests.
    file.write_text(json.dumps(lines[0]) + "\n" + json.dumps(lines[0]) + "\n")
    assert [request.prompt_ids for request in requests_from_file(file, {})] == [[5], [5]]


@pytest.mark.parametrize("options", [{"best_of": 2}, {"max_new_tokens": "x"}, {"draft_tokens": 1.5}], ids=repr)
def test_changes_to_a_request_are_refused_like_requests(markov: Models, options: dict[str, Any]) -> None:
    """P3: a request object with further fields by name raises the error that the documentation names."""
    request = Request(prompt_ids=[5], max_new_tokens=2)
    assert list(markov().complete(request, max_new_tokens=3).token_ids) == [6, 7, 8]
    with refused(*options, error=RequestError):
        markov().complete(request, **options)


def test_a_seed_changes_nothing_in_greedy_decoding(partial: Model) -> None:
    """RT-28: the same ids for every seed and K, before and after other requests; a seed that is none is refused."""
    expected = plain(partial, PROMPT, 24).ids
    for seed in (None, 0, 1, 49):
        for draft_tokens in (0, 3):
            partial.complete(prompt_ids=[seed or 2], max_new_tokens=5, draft_tokens=3)
            assert ids_of(partial, PROMPT, 24, draft_tokens, seed=seed) == expected
    with refused("seed", "'x'"):
        partial.complete(prompt_ids=PROMPT, seed="x")


# Files of JSON lines


def test_a_file_of_requests_keeps_order_defaults_and_ids(markov: Models, tmp_path: Path) -> None:
    """P2: each line is a request with its own options over the defaults; empty lines are no requests."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "A", "id": "first"}\n\n'
        '{"prompt_ids": [3], "max_new_tokens": 2, "id": 7}\r\n'
        '{"prompt": "A", "stop": "STOP", "draft_tokens": 0}\n'
        '{"prompt": "A", "stop": ["S", "x"], "ignore_eos": true}'
    )
    requests = requests_from_file(file, {"max_new_tokens": 6, "draft_tokens": 2})
    assert [request.id for request in requests] == ["first", 7, None, None]
    assert [request.max_new_tokens for request in requests] == [6, 2, 6, 6]
    assert [request.draft_tokens for request in requests] == [2, 2, 0, 2]
    results = [markov(pieces=PIECES).complete(request) for request in requests]
    assert [result.text for result in results] == ["bcdSTOP!efgh", "P!ef", "bcd", "bcd"]
    assert [result.finish_reason for result in results] == ["length", "length", "stop", "stop"]


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("", ["no prompts"]),
        ("\n", ["no prompts"]),
        (" \n\t\n", ["no prompts"]),
        ("A\n", ["line 1", "not a JSON object"]),
        ('{"prompt": "A"}\n[1]\n', ["line 2", "not a JSON object"]),
        ('{"prompt": "A"}\n\n"A"\n', ["line 3", "not a JSON object"]),
        ('{"prompt": "A"', ["line 1", "not a JSON object"]),
        ('{"prompt": 5}', ["line 1", "prompt"]),
        ('{"prompt_ids": [1.5]}', ["line 1", "prompt_ids"]),
        ('{"prompt_ids": [true]}', ["line 1", "prompt_ids"]),
        ('{"prompt_ids": "1"}', ["line 1", "prompt_ids"]),
        ('{"prompt_ids": [1], "max_new_tokens": "4"}', ["line 1", "max_new_tokens"]),
        ('{"prompt_ids": [1], "stop": [5]}', ["line 1", "stop"]),
        ('{"prompt_ids": [1], "chat": 1}', ["line 1", "chat"]),
        ('{"prompt_ids": [1]}\n{"id": 1}', ["line 2", "exactly one of prompt, prompt_ids and messages"]),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, content: str, parts: list[str]) -> None:
    """RT-43 and P1: the file and the line, before any engine is loaded."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with refused(str(file), *parts, error=RequestError):
        requests_from_file(file, {})


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """P1: missing, a directory, not UTF-8."""
    (tmp_path / "latin").write_bytes(b'{"prompt": "\xe9"}')
    reasons = {"missing": "No such file", "": "Is a directory", "latin": "not UTF-8 text"}
    for name, reason in reasons.items():
        with refused(str(tmp_path / name), reason, error=RequestError):
            requests_from_file(tmp_path / name, {})


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"], ids=["u2028", "u2029", "u0085"])
def test_a_line_ends_at_a_newline_only(tmp_path: Path, separator: str) -> None:
    """RT-43: JSON allows these characters unescaped inside a text, and many writers leave them so."""
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"A{separator}b"}, {"prompt": "A"}]
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    assert [request.prompt for request in requests_from_file(file, {})] == [f"A{separator}b", "A"]


# The command


@pytest.fixture(scope="module")
def bundle(markov: Models) -> Path:
    """The chain of text pieces as a directory."""
    return markov(pieces=PIECES).bundle.directory


def test_the_command_counts_and_reports_each_line(bundle: Path, tmp_path: Path) -> None:
    """RT-06, RT-19, BM-01: results of a fresh process, with usage that counts what was delivered."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "A", "stop": "STOP", "id": "a"}\n{"prompt": "A"}\n{"prompt": "A", "draft_tokens": 0}\n')
    arguments = ("--prompts", file, "--max-new-tokens", "6", "--draft-tokens", "4", "--json")
    result = run_command("mtp-run", "generate", bundle, *arguments)
    assert (result.returncode, result.stderr) == (0, "")
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record.get("id") for record in records] == ["a", None, None]
    assert [record["text"] for record in records] == ["bcd", "bcdSTOP!efgh", "bcdSTOP!efgh"]
    assert [record["token_ids"] for record in records] == [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]]
    assert [record["finish_reason"] for record in records] == ["stop", "length", "length"]
    assert [record["usage"] for record in records] == [
        {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": count + 1} for count in (4, 6, 6)
    ]
    assert [record["stats"]["acceptance_rate"] for record in records] == [0.75, 1.0, None]


def test_the_command_streams_text_and_says_how_it_went(bundle: Path) -> None:
    """RT-41: plain decoding has no acceptance, shown as n/a; the text is all there is on stdout."""
    result = run_command("mtp-run", "generate", bundle, "--prompt", "A", "--max-new-tokens", "6", "--draft-tokens", "0")
    assert (result.returncode, result.stdout) == (0, "bcdSTOP!efgh\n")
    assert "[6 tokens, length; 5 cycles, acceptance n/a" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (["--prompt", "A", "--max-new-tokens", "x"], 2, ["--max-new-tokens", "x"]),
        (["--prompt", "A", "--num-beams", "2"], 2, ["--num-beams"]),
        (["--prompt", "A", "--prompt-ids", "5"], 2, ["exactly one", "--prompt, --prompt-ids"]),
        (["--prompt", ""], 1, ["the prompt has no tokens"]),
        (["--prompt-ids", ",".join(["5"] * 65)], 1, ["65 tokens", "64"]),
        (["--prompt-ids", "5", "--draft-tokens", "9"], 1, ["draft_tokens is 9", "0 to 8"]),
    ],
    ids=["limit", "unknown", "two prompts", "empty", "too long", "K"],
)
def test_the_command_refuses_in_one_line(bundle: Path, arguments: list[str], code: int, parts: list[str]) -> None:
    """RT-07, RT-32, RT-41, RT-43, RT-44: exit code 2 for bad usage, 1 for what the bundle cannot do."""
    result = run_command("mtp-run", "generate", bundle, *arguments)
    command_refused(result, *parts, code=code)
    assert result.stdout == ""


def test_the_command_ends_with_130_when_interrupted(tmp_path: Path) -> None:
    """RT-54: SIGINT while text streams: no traceback, and only whole characters came out."""
    pieces = [*("\u65e5".encode()[i : i + 1] for i in range(3)), "a"]
    checkpoint = markov_checkpoint(tmp_path / "c", target=_by_fours, tokenizer=tinytext_tokenizer(pieces))
    bundle = build_bundle(checkpoint, tmp_path / "b", max_model_len=4096)
    command = [str(Path(sys.executable).with_name("mtp-run")), "generate", str(bundle), "--prompt-ids", "3"]
    command += ["--max-new-tokens", "4000", "--draft-tokens", "0", "--threads", "1"]
    # A runner in the background of a shell ignores SIGINT, and its children would inherit that.
    default = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=default) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        start = os.read(process.stdout.fileno(), 64)
        process.send_signal(signal.SIGINT)
        text, errors = start + process.stdout.read(), process.stderr.read()
        code = process.wait(120)
    # The command line library ends the line that a terminal broke with ^C; nothing else is said.
    assert (code, errors) == (130, b"\n")
    shown = text.decode()
    assert set(shown) <= {"\u65e5", "a", "\n"}
    assert 0 < len(shown) < 1900


def test_a_second_request_in_one_process_is_that_of_a_fresh_process(tmp_path: Path) -> None:
    """RT-19 and RT-39: no state is kept between requests: alone in a process and after another, the same ids."""
    bundle = build_bundle(random_checkpoint(tmp_path / "c", seed=38), tmp_path / "b")
    file = tmp_path / "prompts.jsonl"
    requests = [{"prompt_ids": PROMPT, "max_new_tokens": 30}, {"prompt_ids": [*PROMPT, 7], "max_new_tokens": 30}]
    results = []
    for lines in (requests, requests[1:]):
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        output = run_command("mtp-run", "generate", bundle, "--prompts", file, "--json").stdout
        results.append([json.loads(line)["token_ids"] for line in output.splitlines()])
    assert results[0][1] == results[1][0]
    # The control: the two requests say different things, so a mix-up would be seen.
    assert results[0][0] != results[0][1]


def _by_fours(token: int) -> int:
    return (token + 1) % 4


def test_a_large_bundle_says_that_it_is_loading(
    markov: Models, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mtp_runtime import cli

    bundle = markov().bundle.directory
    cli.open_model(bundle, EngineOptions(threads=1))
    assert capsys.readouterr().err == "", "control: a small one says nothing"
    monkeypatch.setattr(cli, "_SLOW_BYTES", 0)
    cli.open_model(bundle, EngineOptions(threads=1))
    assert capsys.readouterr().err.startswith("loading 0.0 GB")
