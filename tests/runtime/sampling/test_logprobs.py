"""Log-probabilities of the raw logits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mtp_engines.errors import NumericsError
from mtp_runtime.sampling import token_logprobs


def test_they_are_the_log_softmax_in_float64() -> None:
    row = (3 * np.random.default_rng(1).standard_normal(5000)).astype(np.float32)
    exact = [math.exp(float(value)) for value in row]
    total = math.fsum(exact)
    found = token_logprobs(row, 77, 3)
    assert found.token == 77
    assert found.logprob == pytest.approx(math.log(exact[77] / total), abs=1e-12)
    best = np.argsort(-row)[:3].tolist()
    assert [token for token, _ in found.top] == best
    assert [value for _, value in found.top] == pytest.approx([math.log(exact[t] / total) for t in best], abs=1e-12)
    # A float32 softmax misses by far more than the tolerance.
    single = np.log(np.exp(row, dtype=np.float32).sum(dtype=np.float32))
    assert abs(float(row[77] - single) - found.logprob) > 1e-9


def test_equal_ones_come_by_lowest_id_and_best_first() -> None:
    row = np.array([0, 2, 1, 2, 1, 1], np.float32)
    assert [token for token, _ in token_logprobs(row, 0, 4).top] == [1, 3, 2, 4]
    assert token_logprobs(row, 0).top == ()
    assert len(token_logprobs(row, 0, 99).top) == 6


def test_tokens_that_the_model_excludes_are_not_told() -> None:
    row = np.array([0, -np.inf, 0], np.float32)
    found = token_logprobs(row, 1, 3)
    assert found.logprob == -math.inf
    assert found.top == ((0, pytest.approx(math.log(0.5))), (2, pytest.approx(math.log(0.5))))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_no_law_is_refused(value: float) -> None:
    row = np.full(4, value, np.float32)
    with pytest.raises(NumericsError, match=f"the largest logit is {value}"):
        token_logprobs(row, 0)
