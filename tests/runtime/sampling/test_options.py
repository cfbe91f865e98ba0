"""What sampling options are refused, by name and with the value."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mtp_engines.errors import RequestError
from mtp_runtime.sampling import SamplingOptions

WRONG: list[tuple[str, Any, str]] = [
    ("temperature", -0.5, "temperature is -0.5, expected a finite number, 0 to decode greedily, or 1e-30 to 1e.30"),
    ("temperature", 1e-320, "temperature is 1e-320"),
    ("temperature", 1e300, "temperature is 1e.300"),
    ("temperature", 10**400, "temperature is a whole number of 1329 bits, expected a finite number"),
    ("temperature", math.nan, "temperature is nan"),
    ("temperature", math.inf, "temperature is inf"),
    ("temperature", "hot", "temperature is 'hot'"),
    ("temperature", True, "temperature is True"),
    ("top_k", 0, "top_k is 0, expected a whole number, 1 or more"),
    ("top_k", -1, "top_k is -1"),
    ("top_k", 2.5, "top_k is 2.5"),
    ("top_p", 0.0, "top_p is 0.0, expected a finite number, more than 0 and at most 1"),
    ("top_p", 1.01, "top_p is 1.01"),
    ("min_p", -0.1, "min_p is -0.1"),
    ("min_p", 1.5, "min_p is 1.5"),
    ("repetition_penalty", 0, "repetition_penalty is 0"),
    ("repetition_penalty", 1e-320, "repetition_penalty is 1e-320, expected a finite number, 1e-30 to 1e.30; 1 changes"),
    ("repetition_penalty", 1e300, "repetition_penalty is 1e.300"),
    ("frequency_penalty", math.inf, "frequency_penalty is inf"),
    ("frequency_penalty", -1e308, "frequency_penalty is -1e.308, expected a finite number, -1e.30 to 1e.30; 0 changes"),
    ("presence_penalty", None, "presence_penalty is None"),
    ("presence_penalty", 1e308, "presence_penalty is 1e.308"),
    ("logit_bias", [3], "logit_bias is .3., expected token ids"),
    ("logit_bias", {"3": 1.0}, "a token id of logit_bias is '3'"),
    ("logit_bias", {3: math.inf}, "logit_bias of token 3 is inf"),
    ("logit_bias", {3: 1e308}, "logit_bias of token 3 is 1e.308, expected .* 1e.30, or minus infinity to ban"),
    ("logit_bias", {3: -(10**400)}, "logit_bias of token 3 is a whole number of 1329 bits, expected"),
    ("logit_bias", {3: math.nan}, "logit_bias of token 3 is nan"),
    ("min_new_tokens", -1, "min_new_tokens is -1"),
    ("bad_words", "abc", "bad_words is 'abc', expected a list of lists"),
    ("bad_words", [3], "bad_words is .3., expected a list of lists"),
    ("bad_words", [[]], "bad_words has an empty sequence"),
    ("bad_words", [[1, -1]], "a token id of bad_words is -1"),
    ("seed", -1, "seed is -1, expected a whole number, 0 to 2..64 - 1"),
    ("seed", 2**64, "seed is 18446744073709551616"),
    ("seed", 10**400, "seed is a whole number of 1329 bits, expected"),
    ("seed", 1.0, "seed is 1.0"),
]
CHANGES: list[tuple[str, Any]] = [
    ("repetition_penalty", 1.1),
    ("frequency_penalty", -0.1),
    ("presence_penalty", 0.1),
    ("logit_bias", {1: 1}),
    ("min_new_tokens", 1),
    ("bad_words", [[1]]),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG, ids=[name for name, _, _ in WRONG])
def test_a_wrong_value_is_named(name: str, value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingOptions(**{name: value})


def test_a_number_that_python_does_not_write_is_named_all_the_same() -> None:
    with pytest.raises(RequestError, match="temperature is a whole number of 16610 bits, expected"):
        SamplingOptions(temperature=10**5000)


def test_values_at_the_borders_and_numbers_of_numpy_are_taken() -> None:
    SamplingOptions(0, 1, 1, 0, 0.1, -2, 2, {0: -math.inf}, 0, [[0]], 0)
    SamplingOptions(1e-30, 1, 1, 0, 1e30, -1e30, 1e30, {0: -1e30, 1: 1e30})
    SamplingOptions(1e30, repetition_penalty=1e-30)
    SamplingOptions(np.float32(0.5), np.int64(3), 1e-9, 1, seed=2**64 - 1)


def test_the_defaults_change_nothing() -> None:
    assert SamplingOptions().is_plain
    assert SamplingOptions(top_k=3, top_p=0.5, min_p=0.1, seed=4).is_plain, "greedy takes the best of any choice"
    assert not SamplingOptions(temperature=0.1).is_greedy


@pytest.mark.parametrize(("name", "value"), CHANGES)
def test_greedy_with_other_logits_is_not_plain(name: str, value: Any) -> None:
    options = SamplingOptions(**{name: value})
    assert options.is_greedy
    assert not options.is_plain


def test_containers_are_copies() -> None:
    bias, words = {1: 2.0}, [[3, 4]]
    options = SamplingOptions(logit_bias=bias, bad_words=words)
    bias[5], words[0][0] = 1.0, 9
    assert options == SamplingOptions(logit_bias={1: 2.0}, bad_words=((3, 4),))
    assert replace(options, temperature=1).bad_words == ((3, 4),)


@pytest.mark.parametrize(("name", "value"), [("logit_bias", {8: 1}), ("bad_words", [[1], [2, 8]])])
def test_token_ids_outside_the_vocabulary_are_named(name: str, value: Any) -> None:
    options = SamplingOptions(**{name: value})
    options.require_vocabulary(9)
    with pytest.raises(RequestError, match=f"{name} has the token id 8, the model knows 0 to 7"):
        options.require_vocabulary(8)
