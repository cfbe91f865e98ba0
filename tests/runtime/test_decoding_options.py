"""Options of sampling from outside: refusals by name, JSON lines, the command, and what every output says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mtp_engines.errors import RequestError
from mtp_runtime import Model, Request
from mtp_runtime.cli import requests_from_file
from mtp_runtime.records import footer_of, record_of
from tests.runtime.conftest import Models
from tests.runtime.decoding import PROMPT, said
from tests.support import command_refused, refused, run_command

PIECES = ("A", "bc", "dS", "TO", "P!", "ef", "gh")
OUT_OF_RANGE: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"temperature": -1.0}, ("temperature is -1.0", "0 to decode greedily, or 1e-30 to 1e+30")),
    ({"temperature": math.nan}, ("temperature is nan", "finite")),
    ({"temperature": math.inf}, ("temperature is inf", "finite")),
    ({"temperature": 1e-320}, ("temperature is 1e-320", "1e-30 to 1e+30")),
    ({"temperature": 10**400}, ("temperature",)),
    ({"temperature": "1"}, ("temperature", "'1'")),
    ({"top_k": 0}, ("top_k is 0", "leave it out")),
    ({"top_k": 1.5}, ("top_k", "1.5")),
    ({"top_p": 0.0}, ("top_p is 0.0", "more than 0 and at most 1")),
    ({"top_p": 1.5}, ("top_p is 1.5",)),
    ({"min_p": -0.1}, ("min_p is -0.1",)),
    ({"repetition_penalty": 0.0}, ("repetition_penalty is 0.0", "1 changes nothing")),
    ({"frequency_penalty": math.inf}, ("frequency_penalty is inf",)),
    ({"frequency_penalty": -1e308}, ("frequency_penalty is -1e+308", "-1e+30 to 1e+30")),
    ({"presence_penalty": math.nan}, ("presence_penalty is nan",)),
    ({"logit_bias": {"x": 1.0}}, ("logit_bias", "token ids as keys")),
    ({"logit_bias": {6: 1.0}}, ("logit_bias has the token id 6", "0 to 5")),
    ({"logit_bias": {1: math.nan}}, ("logit_bias of token 1 is nan",)),
    ({"logit_bias": {1: 1e308}}, ("logit_bias of token 1 is 1e+308", "-1e+30 to 1e+30", "to ban the token")),
    ({"bad_words": [[]]}, ("bad_words has an empty sequence",)),
    ({"bad_words": [[7]]}, ("bad_words has the token id 7", "0 to 5")),
    ({"bad_words": ["a"]}, ("bad_words has the text 'a'", "no tokenizer", "token ids")),
    ({"bad_words": [" "]}, ("bad_words has the text ' '", "leave it out")),
    ({"min_new_tokens": -1}, ("min_new_tokens is -1",)),
    ({"min_new_tokens": 9}, ("min_new_tokens is 9", "max_new_tokens, which is 8")),
    ({"min_new_tokens": 2, "ignore_eos": True}, ("min_new_tokens", "ignore_eos", "leave one")),
    ({"seed": -1}, ("seed is -1", "2**64 - 1")),
    ({"seed": 2**64}, (f"seed is {2**64}",)),
    ({"n": 0}, ("n is 0", "1 or more")),
    ({"n": 2}, ("n is 2", "the temperature is 0", "the same answer every time")),
    ({"logprobs": -1}, ("logprobs is -1", "0 to 6")),
    ({"prompt_logprobs": 7}, ("prompt_logprobs is 7", "0 to 6")),
    ({"acceptor": "greedy"}, ("acceptor", "'greedy'", "coupled, rejection, relaxed, typical")),
    ({"relaxed_top_k": 3}, ("relaxed_top_k is 3", "the acceptor is 'coupled'", "lossy acceptor 'relaxed'")),
    ({"acceptor": "relaxed", "typical_delta": 0.5}, ("typical_delta is 0.5", "lossy acceptor 'typical'")),
    ({"acceptor": "relaxed", "relaxed_top_k": 0}, ("relaxed_top_k is 0", "1 or more")),
    ({"acceptor": "relaxed", "relaxed_delta": 1.5}, ("relaxed_delta is 1.5", "0 to 1")),
    ({"acceptor": "typical", "typical_epsilon": -1.0}, ("typical_epsilon is -1.0", "0 to 1")),
    ({"acceptor": "typical", "typical_delta": math.nan}, ("typical_delta is nan", "0 or more")),
]


@pytest.mark.parametrize(("options", "parts"), OUT_OF_RANGE, ids=[repr(options) for options, _ in OUT_OF_RANGE])
def test_values_out_of_range_are_refused_by_name_whatever_k_is(
    world: Model, options: dict[str, Any], parts: tuple[str, ...]
) -> None:
    """P1: at once, before anything is generated."""
    for draft_tokens in (0, 3):
        with refused(*parts, error=RequestError):
            world.generate(prompt_ids=PROMPT, draft_tokens=draft_tokens, **{"max_new_tokens": 8, **options})
    assert len(world.complete(prompt_ids=PROMPT, max_new_tokens=8, ignore_eos=True).token_ids) == 8


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1},
        {"temperature": 1e-9, "seed": 0},
        {"temperature": 2.0, "top_k": 10**9, "top_p": 1.0, "min_p": 1.0},
        {"logit_bias": {"5": 1, "4": -math.inf}},
        {"bad_words": [[1], [2, 3]], "repetition_penalty": 0.5},
        {"seed": 2**64 - 1, "temperature": 1.0, "n": 1},
        {"logprobs": 6, "prompt_logprobs": 0},
        {"acceptor": "typical", "typical_epsilon": 0.5, "typical_delta": 9.0},
        {"top_k": 2, "top_p": 0.5, "min_p": 0.5},
    ],
    ids=repr,
)
def test_values_at_the_border_are_taken(world: Model, options: dict[str, Any]) -> None:
    """Whole numbers for any number, keys of JSON for ids; top-k and the like keep the best token at temperature 0."""
    for draft_tokens in (0, 2):
        assert len(said(world, PROMPT, 6, draft_tokens, **options).token_ids) == 6


def test_an_answer_in_which_every_token_is_masked_ends_with_what_to_loosen(world: Model) -> None:
    options = {"prompt_ids": PROMPT, "max_new_tokens": 4, "bad_words": [[token] for token in range(6)]}
    for temperature, draft_tokens in ((0.0, 0), (1.0, 3)):
        with refused("every token is masked", "loosen", error=RequestError):
            world.complete(temperature=temperature, draft_tokens=draft_tokens, **options)


def test_several_answers_are_not_one(world: Model) -> None:
    with refused("n is 3", "use complete_all", error=RequestError):
        world.complete(prompt_ids=PROMPT, n=3, temperature=1.0)
    with refused("n is 2", "use complete_all", error=RequestError):
        world.complete(Request(prompt_ids=PROMPT, n=2, temperature=1.0))


def test_bad_words_are_banned_as_they_stand_and_behind_a_space(markov: Models) -> None:
    model = markov(pieces=PIECES)
    prepared = model.prompts.prepare(Request(prompt="A", bad_words=["dS", "dSTO", [9, 10]]), model.manifest)
    # This tokenizer writes no space, so both forms of a text are one.
    assert prepared.decoding.options.bad_words == ((2,), (2, 3), (9, 10))
    with refused("bad_words has the text 'xyz'", "cannot write"):
        model.complete(prompt="A", bad_words=["xyz"])


def test_json_lines_take_every_option(world: Model, tmp_path: Path) -> None:
    """P2: over the flags, each line for itself."""
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt_ids": PROMPT, "temperature": 0.5, "logit_bias": {"3": -1}, "bad_words": [[1, 2]], "seed": 3},
        {"prompt_ids": PROMPT, "top_k": 2, "acceptor": "rejection", "logprobs": 1},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second = requests_from_file(file, {"temperature": 1.0, "seed": 4, "max_new_tokens": 6})
    assert (first.temperature, first.seed, first.logit_bias, first.bad_words) == (0.5, 3, {3: -1.0}, [[1, 2]])
    assert (second.temperature, second.seed, second.top_k, second.acceptor) == (1.0, 4, 2, "rejection")
    for request in (first, second):
        assert len(world.complete(request, ignore_eos=True).token_ids) == 6


@pytest.mark.parametrize("acceptor", ["coupled", "rejection", "relaxed", "typical"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_output_says_whether_the_acceptor_is_lossy(world: Model, acceptor: str, temperature: float) -> None:
    lossy = acceptor in ("relaxed", "typical")
    request = Request(prompt_ids=PROMPT, acceptor=acceptor, temperature=temperature, max_new_tokens=8, seed=2)
    answer = world.complete(request)
    record, footer = record_of(request, answer), footer_of(answer)
    assert (record["lossy"], answer.completion.lossy, "LOSSY" in footer) == (lossy, lossy, lossy)
    assert record["acceptor"] == (acceptor if lossy or temperature else "greedy")
    assert record["seed"] == (2 if temperature else None)
    assert ("seed 2" in footer) == bool(temperature)


def test_a_lossy_acceptor_keeps_more_and_says_other_things(world: Model) -> None:
    """At temperature 0 too, where it judges by the law of temperature 1."""
    for acceptor, temperature in (("relaxed", 0.0), ("typical", 0.0), ("relaxed", 1.0), ("typical", 1.0)):
        options = {"temperature": temperature, "seed": 1}
        exact = said(world, PROMPT, 40, 3, **options)
        found = said(world, PROMPT, 40, 3, acceptor=acceptor, **options)
        assert found.stats.accepted > exact.stats.accepted
        assert found.token_ids != exact.token_ids
        assert said(world, PROMPT, 40, 0, acceptor=acceptor, **options).token_ids == exact.token_ids


def test_the_record_tells_scores_seeds_and_places(world: Model) -> None:
    request = Request(
        prompt_ids=PROMPT, id="a", n=2, temperature=1.0, seed=3, logprobs=1, prompt_logprobs=0, max_new_tokens=4
    )
    records = [record_of(request, answer) for answer in world.complete_all(request)]
    assert [(record["id"], record["index"]) for record in records] == [("a", 0), ("a", 1)]
    for record in records:
        assert json.loads(json.dumps(record, allow_nan=False)) == record
        assert [entry["token_id"] for entry in record["logprobs"]] == record["token_ids"]
        assert [len(entry["top"]) for entry in record["logprobs"]] == [1] * len(record["token_ids"])
        assert record["prompt_logprobs"][0] is None
        assert [entry["token_id"] for entry in record["prompt_logprobs"][1:]] == PROMPT[1:]
    plain = record_of(Request(prompt_ids=PROMPT), world.complete(prompt_ids=PROMPT, max_new_tokens=2))
    assert not {"index", "logprobs", "prompt_logprobs"} & set(plain)


def test_the_command_takes_every_option(markov: Models) -> None:
    bundle = markov(pieces=PIECES).bundle.directory
    arguments = ["--prompt", "A", "--max-new-tokens", "5", "--temperature", "8", "--top-k", "50", "--top-p", "0.9"]
    arguments += ["--min-p", "0.001", "--repetition-penalty", "1.1", "--frequency-penalty", "0.1", "--seed", "5"]
    arguments += ["--presence-penalty", "0.1", "--min-new-tokens", "2", "--logit-bias", "3=-inf", "--logit-bias", "4=1"]
    arguments += ["--bad-words", "dS", "--bad-word-ids", "5,6", "--n", "2", "--logprobs", "1", "--prompt-logprobs", "0"]
    arguments += ["--acceptor", "relaxed", "--relaxed-top-k", "5", "--relaxed-delta", "0.5"]
    shown = run_command("mtp-run", "generate", bundle, *arguments, "--json")
    assert shown.returncode == 0, shown.stderr
    records = [json.loads(line) for line in shown.stdout.splitlines()]
    options = {"top_k": 50, "top_p": 0.9, "min_p": 0.001, "repetition_penalty": 1.1, "frequency_penalty": 0.1}
    options |= {"presence_penalty": 0.1, "min_new_tokens": 2, "logit_bias": {3: -math.inf, 4: 1.0}, "n": 2, "seed": 5}
    options |= {"bad_words": ["dS", [5, 6]], "acceptor": "relaxed", "relaxed_top_k": 5, "relaxed_delta": 0.5}
    answers = markov(pieces=PIECES).complete_all(prompt="A", max_new_tokens=5, temperature=8.0, **options)
    assert [tuple(record["token_ids"]) for record in records] == [answer.token_ids for answer in answers]
    assert [record["lossy"] for record in records] == [True, True]


def test_the_command_numbers_answers_and_refuses_scores_without_json(markov: Models) -> None:
    bundle = markov(pieces=PIECES).bundle.directory
    run = ["mtp-run", "generate", bundle, "--prompt", "A", "--max-new-tokens", "3"]
    shown = run_command(*run, "--temperature", "9", "--n", "2", "--acceptor", "typical", "--typical-delta", "0.2")
    assert "--- answer 1 of 2" in shown.stdout
    assert "--- answer 2 of 2" in shown.stdout
    assert shown.stderr.count("LOSSY acceptor typical") == 2
    command_refused(run_command(*run, "--logprobs", "1"), "logprobs is 1", "--json", code=2)
    command_refused(run_command(*run, "--logit-bias", "x"), "'x' is not a token id", code=2)
    command_refused(run_command(*run, "--top-p", "0"), "top_p is 0.0")
