"""The options of `mtp-run generate` that say how tokens are chosen and reported."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from mtp_runtime.sampling.acceptors import ACCEPTORS
from mtp_runtime.verification import VERIFY_MODES

_NUMBERS: dict[str, tuple[type, str]] = {
    "temperature": (float, "Divides the logits; 0 is greedy.  [default: 0]"),
    "top-k": (int, "Keep so many most probable tokens.  [default: all]"),
    "top-p": (float, "Keep the fewest tokens with this share.  [default: 1, all]"),
    "min-p": (float, "Keep tokens at least so probable beside the best.  [default: 0, all]"),
    "repetition-penalty": (float, "Above 1: fewer tokens of prompt and answer again.  [default: 1]"),
    "frequency-penalty": (float, "Off a logit for each time in the answer.  [default: 0]"),
    "presence-penalty": (float, "Off a logit once in the answer.  [default: 0]"),
    "draft-confidence": (float, "Least product of the head's best probabilities.  [default: 0]"),
    "draft-branches": (int, "Further drafts from the first places on.  [default: 0]"),
    "min-new-tokens": (int, "End tokens are masked before.  [default: 0]"),
    "seed": (int, "Of the draws.  [default: a fresh one, reported]"),
    "n": (int, "Answers to draw.  [default: 1]"),
    "logprobs": (int, "With --json: log-probabilities of tokens and of so many best."),
    "prompt-logprobs": (int, "With --json: the same for the prompt."),
    "relaxed-top-k": (int, "Of the acceptor relaxed.  [default: 10]"),
    "relaxed-delta": (float, "Of the acceptor relaxed.  [default: 0.6]"),
    "typical-epsilon": (float, "Of the acceptor typical.  [default: 0.09]"),
    "typical-delta": (float, "Of the acceptor typical.  [default: 0.3]"),
}


class BiasParameter(click.ParamType[tuple[int, float]]):
    """A token id and the number to add to its logit."""

    name = "id=number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        """From the text of the command line."""
        try:
            token, number = str(value).split("=")
            return int(token), float(number)
        except ValueError:
            self.fail(f"{value!r} is not a token id, =, and a number.", param, ctx)


class IdsParameter(click.ParamType[list[int]]):
    """Token ids with commas."""

    name = "ids"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """From the text of the command line."""
        try:
            return [int(part) for part in str(value).split(",")]
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers with commas.", param, ctx)


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command, which takes those that were given as one `sampling`, under their names in JSON."""

    @functools.wraps(command)
    def with_sampling(
        *args: Any,
        logit_bias: tuple[tuple[int, float], ...],
        bad_words: tuple[str, ...],
        bad_word_ids: tuple[list[int], ...],
        acceptor: str | None,
        verify: str | None,
        **others: Any,
    ) -> Any:
        names = [name.replace("-", "_") for name in _NUMBERS]
        given = {name: others.pop(name) for name in names} | {
            "logit_bias": dict(logit_bias) or None,
            "bad_words": [*bad_words, *bad_word_ids] or None,
            "acceptor": acceptor,
            "verify": verify,
        }
        return command(*args, sampling={name: value for name, value in given.items() if value is not None}, **others)

    options = [
        click.option("--verify", type=click.Choice(VERIFY_MODES), help="Rows at once, or one by one.  [default: rows]"),
        click.option("--acceptor", type=click.Choice(ACCEPTORS), help="What keeps drafts.  [default: coupled]"),
        click.option("--bad-word-ids", multiple=True, type=IdsParameter(), help="The same as ids; may repeat."),
        click.option("--bad-words", multiple=True, help="Text that may not come; may repeat."),
        click.option("--logit-bias", multiple=True, type=BiasParameter(), help="Added to a logit; may repeat."),
    ]
    for name, (kind, text) in reversed(_NUMBERS.items()):
        options.append(click.option(f"--{name}", type=kind, help=text))
    for option in options:
        with_sampling = option(with_sampling)
    return with_sampling
