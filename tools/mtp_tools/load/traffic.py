"""What is asked of the server, and when: prompts and answers of mixed lengths, Poisson arrivals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mtp_engines.contracts.manifest import Manifest
from mtp_engines.errors import RequestError
from mtp_runtime.prompts import Prompts
from mtp_tools.bench.prompts import prompts_of

_MATERIAL_TOKENS = 4096


@dataclass(frozen=True)
class Lengths:
    """A range of numbers of tokens, both ends included; drawn so that every doubling is as likely."""

    least: int
    most: int

    @classmethod
    def parsed(cls, text: str, name: str) -> Lengths:
        """From `8:96`, or `32`.

        Raises:
            RequestError: it is neither.
        """
        first, _, last = text.partition(":")
        if not (first.isdecimal() and (last or first).isdecimal() and 0 < int(first) <= int(last or first)):
            raise RequestError(f"{name} is {text!r}, expected a number, or two with a colon as in 8:96.")
        return cls(int(first), int(last or first))

    def draw(self, random: np.random.Generator) -> int:
        """One of them."""
        return int(np.exp(random.uniform(np.log(self.least), np.log(self.most + 1))))


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        number: tells it from the others of its block.
        prompt_ids: the prompt.
        new_tokens: of the answer, all of which come, since end tokens are ignored.
        options: further fields of the body.
    """

    number: int
    prompt_ids: tuple[int, ...]
    new_tokens: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def body(self, model: str, **more: Any) -> dict[str, Any]:
        """For POST /v1/completions."""
        return {
            "model": model,
            "prompt": list(self.prompt_ids),
            "max_tokens": self.new_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            **self.options,
            **more,
        }


def material_of(prompts: Prompts, manifest: Manifest, file: Path | None, seed: int) -> list[int]:
    """Token ids that prompts are cut from: those of a file, else of a text of ours, else made-up ones.

    Raises:
        RequestError: the file cannot be used.
    """
    given = prompts_of(prompts, manifest, file, None if file else _MATERIAL_TOKENS, seed)
    return [token for ids in given.ids for token in ids]


def draw_asks(material: list[int], count: int, prompt: Lengths, answer: Lengths, seed: int) -> list[Ask]:
    """Requests whose prompts begin anywhere in the material; the same seed gives the same ones."""
    random = np.random.default_rng(seed)
    asks = []
    for number in range(count):
        length = prompt.draw(random)
        start = int(random.integers(0, len(material)))
        ids = [material[(start + place) % len(material)] for place in range(length)]
        asks.append(Ask(number, tuple(ids), answer.draw(random)))
    return asks


def arrivals(count: int, rate: float, seed: int) -> Iterator[float]:
    """Seconds from the start at which requests arrive: a Poisson process with `rate` of them a second."""
    random = np.random.default_rng(seed)
    now = 0.0
    for _ in range(count):
        now += float(random.exponential(1 / rate))
        yield now
