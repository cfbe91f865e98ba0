"""What a request may ask of sampling, and what is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from mtp_engines.errors import RequestError

# A seed is one word of the generator's key.
SEED_BITS = 64
# Within these a float32 logit stays finite in float64, whatever is asked for together and however often a token came.
_LEAST, _MOST = 1e-30, 1e30


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is drawn; the defaults change nothing and take the most probable one.

    Attributes:
        temperature: divides the logits; 0 is greedy. This and every number below that is no share has a greatest
            value of 1e30, and where it divides a least one of 1e-30.
        top_k: keep this many most probable tokens; None keeps all.
        top_p: keep the fewest most probable tokens that hold this share of the probability; 1 keeps all.
        min_p: keep tokens at least this fraction as probable as the best one; 0 keeps all.
        repetition_penalty: above 1 makes tokens of prompt and output less likely; 1 changes nothing.
        frequency_penalty: taken off a logit for each time its token stands in the output.
        presence_penalty: taken off a logit once if its token stands in the output.
        logit_bias: added to the logits of these token ids; minus infinity bans a token.
        min_new_tokens: end tokens are masked until the output has this many tokens.
        bad_words: sequences of token ids that the output must not complete.
        seed: 0 to 2**64 - 1; None takes a fresh one.

    Raises:
        RequestError: names the option, its value and what was expected.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_new_tokens: int = 0
    bad_words: Sequence[Sequence[int]] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        """Check every value, and keep copies of the containers that nobody else can change."""
        if self.temperature != 0 or isinstance(self.temperature, bool):
            _number("temperature", self.temperature, _LEAST, _MOST, f"0 to decode greedily, or {_LEAST} to {_MOST}")
        _number("top_p", self.top_p, 0.0, 1.0, "more than 0 and at most 1; 1 keeps all tokens", above=True)
        _number("min_p", self.min_p, 0.0, 1.0, "0 to 1; 0 keeps all tokens")
        divided = f"{_LEAST} to {_MOST}; 1 changes nothing"
        _number("repetition_penalty", self.repetition_penalty, _LEAST, _MOST, divided)
        for name in ("frequency_penalty", "presence_penalty"):
            _number(name, getattr(self, name), -_MOST, _MOST, f"{-_MOST} to {_MOST}; 0 changes nothing")
        if self.top_k is not None:
            _whole("top_k", self.top_k, 1, "1 or more; leave it out to keep all tokens")
        _whole("min_new_tokens", self.min_new_tokens, 0, "0 or more")
        if self.seed is not None:
            _whole("seed", self.seed, 0, "0 to 2**64 - 1; leave it out for a fresh one", 2**SEED_BITS - 1)
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        object.__setattr__(self, "bad_words", _sequences(self.bad_words))

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is taken, after bias, penalties and masks."""
        return self.temperature == 0

    @property
    def changes_logits(self) -> bool:
        """Whether anything is done to the logits before the temperature."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return penalties != (1, 0, 0) or bool(self.logit_bias or self.min_new_tokens or self.bad_words)

    @property
    def is_plain(self) -> bool:
        """Whether the result is the argmax of the raw logits, so that nothing of this package is needed."""
        return self.is_greedy and not self.changes_logits

    def require_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids that a vocabulary does not have.

        Raises:
            RequestError: names the option, the id and the limit.
        """
        named = [("logit_bias", token) for token in self.logit_bias]
        named += [("bad_words", token) for word in self.bad_words for token in word]
        for name, token in named:
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"{name} has the token id {token}, the model knows 0 to {vocab_size - 1}; use this bundle's "
                    "tokenizer."
                )


def _number(name: str, value: Any, least: float, most: float, expected: str, *, above: bool = False) -> None:
    # A whole number may have more digits than a float can hold, so it is compared as it is.
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not least <= value <= most or (above and value == least):
        raise RequestError(f"{name} is {_shown(value)}, expected a finite number, {expected}.")


def _whole(name: str, value: Any, least: int, expected: str, most: int | None = None) -> None:
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        raise RequestError(f"{name} is {_shown(value)}, expected a whole number, {expected}.")


def _shown(value: Any) -> str:
    # Python writes no whole number of more than 4,300 digits.
    huge = isinstance(value, int) and value.bit_length() > 256
    return f"a whole number of {value.bit_length()} bits" if huge else repr(value)


def _bias(given: Any) -> dict[int, float]:
    if not isinstance(given, Mapping):
        raise RequestError(f"logit_bias is {given!r}, expected token ids, each with the number to add to its logit.")
    for token, value in given.items():
        _whole("a token id of logit_bias", token, 0, "0 or more")
        if value != -math.inf:
            banned = f"{-_MOST} to {_MOST}, or minus infinity to ban the token"
            _number(f"logit_bias of token {token}", value, -_MOST, _MOST, banned)
    return {int(token): float(value) for token, value in given.items()}


def _sequences(given: Any) -> tuple[tuple[int, ...], ...]:
    lists = isinstance(given, Sequence) and not isinstance(given, str)
    if not lists or any(not isinstance(word, Sequence) or isinstance(word, str) for word in given):
        raise RequestError(f"bad_words is {given!r}, expected a list of lists of token ids.")
    for word in given:
        if not word:
            raise RequestError("bad_words has an empty sequence, which would mask nothing; leave it out.")
        for token in word:
            _whole("a token id of bad_words", token, 0, "0 or more")
    return tuple(tuple(int(token) for token in word) for word in given)
