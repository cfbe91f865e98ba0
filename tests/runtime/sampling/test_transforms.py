"""Laws from logits: against an account that goes token by token, and at the edges."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mtp_engines.errors import NumericsError, RequestError
from mtp_runtime.sampling import Context, Law, Rows, SamplingOptions, law_from_logits, target_law
from mtp_runtime.sampling.transforms import largest
from tests.runtime.sampling.oracle import dense_law

VOCAB, ENDS = 40, (7, 8)
PROMPT, OUTPUT = [3, 3, 5, 9], [4, 4, 4, 9, 11]


def random_options(rng: np.random.Generator) -> SamplingOptions:
    """Any mixture of transforms, each left out half of the time."""
    choices: dict[str, Any] = {
        "top_k": int(rng.integers(1, VOCAB + 5)),
        "top_p": float(rng.uniform(0.05, 1)),
        "min_p": float(rng.uniform(0, 0.5)),
        "repetition_penalty": float(rng.uniform(0.5, 2)),
        "frequency_penalty": float(rng.uniform(-1, 1)),
        "presence_penalty": float(rng.uniform(-1, 1)),
        "logit_bias": {int(rng.integers(VOCAB)): float(rng.uniform(-3, 3)), 2: -math.inf},
        "min_new_tokens": int(rng.integers(0, 10)),
        "bad_words": [[1], [9, 11, 6], [11, 12], [4, 13], [5, 9, 4, 4, 4, 9, 11, 14]],
    }
    kept = {name: value for name, value in choices.items() if rng.random() < 0.5}
    return SamplingOptions(temperature=float(rng.choice([0, 0.2, 0.7, 1, 1.8])), **kept)


def context(output: list[int] = OUTPUT) -> Context:
    """The context of most tests."""
    made = Context(PROMPT, VOCAB)
    made.advance(output)
    return made


def dense(law: Law, size: int = VOCAB) -> np.ndarray:
    """A law as one number for each token."""
    row = np.zeros(size)
    row[law.ids] = law.probabilities
    return row


def random_row(rng: np.random.Generator) -> np.ndarray:
    """Logits of few different values, some of them minus infinity, so that every border has equal ones."""
    row = np.round(2 * rng.standard_normal(VOCAB)) / 2
    row[rng.random(VOCAB) < 0.1] = -np.inf
    row[20] = 1.0  # One that nothing masks.
    return row.astype(np.float32)


def test_every_mixture_equals_the_token_by_token_account() -> None:
    rng = np.random.default_rng(5)
    for _ in range(400):
        row, options = random_row(rng), random_options(rng)
        before = row.copy()
        law = target_law(row, context(), options, ENDS)
        wanted = np.array(dense_law(row.tolist(), PROMPT, OUTPUT, options, ENDS))
        np.testing.assert_array_equal(row, before)
        np.testing.assert_array_equal(dense(law) > 0, wanted > 0, err_msg=str(options))
        np.testing.assert_allclose(dense(law), wanted, rtol=1e-12, err_msg=str(options))
        assert law.probabilities.dtype == np.float64
        assert np.all(np.diff(law.ids) > 0)


@pytest.mark.parametrize(
    "change",
    [
        {"repetition_penalty": 1.001},
        {"frequency_penalty": 0.001},
        {"presence_penalty": 0.001},
        {"logit_bias": {20: 0.001}},
        {"bad_words": [[11, 20]]},
        {"min_new_tokens": 6},
        {"top_k": VOCAB - 6},
        {"top_p": 0.99},
        {"min_p": 0.1},
        {"temperature": 0.999},
    ],
)
def test_control_the_comparison_sees_every_transform(change: dict[str, Any]) -> None:
    row = np.random.default_rng(6).standard_normal(VOCAB).astype(np.float32)
    options = SamplingOptions(temperature=1.0)
    wanted = dense_law(row.tolist(), PROMPT, OUTPUT, replace(options, **change), ENDS)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(dense(target_law(row, context(), options, ENDS)), wanted, rtol=1e-12)


def test_penalties_count_what_they_say() -> None:
    row = np.zeros(VOCAB, np.float32)
    row[[3, 4, 9]] = 2.0, 2.0, -2.0

    def change(**options: float) -> np.ndarray:
        law = target_law(row, context(), SamplingOptions(temperature=1, **options))
        logits = np.log(dense(law))
        return np.asarray(logits - logits[20])[[3, 4, 5, 9]]

    np.testing.assert_allclose(change(repetition_penalty=2), [1, 1, 0, -4], atol=1e-12)
    np.testing.assert_allclose(change(frequency_penalty=1), [2, -1, 0, -3], atol=1e-12)
    np.testing.assert_allclose(change(presence_penalty=1), [2, 1, 0, -3], atol=1e-12)


def test_equal_tokens_at_a_border_are_taken_by_lowest_id() -> None:
    row = np.array([0, 1, 1, 1, 0, 1], np.float32)
    assert law_from_logits(row, SamplingOptions(temperature=1, top_k=2)).ids.tolist() == [1, 2]
    assert law_from_logits(row, SamplingOptions(temperature=1, top_k=5)).ids.tolist() == [0, 1, 2, 3, 5]
    assert law_from_logits(row, SamplingOptions(temperature=1, top_p=0.4)).ids.tolist() == [1, 2]
    assert law_from_logits(row, SamplingOptions()).ids.tolist() == [1]
    assert law_from_logits(row, SamplingOptions(temperature=1, min_p=1)).ids.tolist() == [1, 2, 3, 5]


@pytest.mark.parametrize("sharpness", [0.1, 4.0])
def test_the_nucleus_of_a_large_vocabulary_is_that_of_a_full_sort(sharpness: float) -> None:
    row = (sharpness * np.random.default_rng(7).standard_normal(30_000)).astype(np.float32)
    row[:2000] = row[2000:4000]
    law = law_from_logits(row, SamplingOptions(temperature=1, top_p=0.9))
    weights = np.exp(row.astype(np.float64))
    order = np.argsort(-weights, kind="stable")
    count = int(np.searchsorted(np.cumsum(weights[order]), 0.9 * weights.sum())) + 1
    assert (count > 4096) == (sharpness < 1), "control: a small nucleus and one that needs the full sort"
    np.testing.assert_array_equal(law.ids, np.sort(order[:count]))


def test_the_largest_are_those_of_a_stable_sort() -> None:
    rng = np.random.default_rng(8)
    for _ in range(100):
        values = rng.integers(0, 5, 30).astype(np.float32)
        for count in (0, 1, 7, 29, 30, 31):
            assert largest(values, count).tolist() == sorted(np.argsort(-values, kind="stable")[:count].tolist())


def test_a_tiny_temperature_is_greedy() -> None:
    row = np.random.default_rng(9).standard_normal(VOCAB).astype(np.float32)
    law = law_from_logits(row, SamplingOptions(temperature=1e-30))
    assert law.ids.tolist() == [int(row.argmax())]


def test_no_numbers_that_are_taken_lead_out_of_float64() -> None:
    """The borders of the options, all at once, on the largest logits that float32 has."""
    row = np.linspace(-3.4e38, 3.4e38, VOCAB).astype(np.float32)
    for sign in (-1, 1):
        for penalty, temperature in ((1e30, 1e30), (1e30, 1e-30), (1e-30, 1e30), (1e-30, 1e-30)):
            added = {"frequency_penalty": sign * 1e30, "presence_penalty": sign * 1e30}
            bias = dict.fromkeys(range(VOCAB), sign * 1e30)
            options = SamplingOptions(temperature, repetition_penalty=penalty, logit_bias=bias, **added)
            law = target_law(row, context(OUTPUT * 1000), options)
            assert np.isfinite(law.probabilities).all()


def test_control_a_penalty_beyond_what_is_taken_leads_out_of_float64() -> None:
    options = SamplingOptions()
    object.__setattr__(options, "frequency_penalty", -1e308)
    with np.errstate(over="ignore"), pytest.raises(NumericsError, match="infinite or not a number"):
        target_law(np.zeros(VOCAB, np.float32), context(), options)


def test_a_row_without_a_token_is_refused() -> None:
    row = np.full(VOCAB, -np.inf, np.float32)
    row[7] = 1.0
    for options in (SamplingOptions(min_new_tokens=9), SamplingOptions(temperature=1, min_new_tokens=9)):
        with pytest.raises(RequestError, match=r"every token is masked at this position.*loosen logit_bias"):
            target_law(row, context(), options, ENDS)
    assert target_law(row, context(), SamplingOptions(temperature=1), ENDS).ids.tolist() == [7]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_no_number_is_refused(value: float) -> None:
    row = np.zeros(VOCAB, np.float32)
    row[5] = value
    for temperature in (0, 1):
        with pytest.raises(NumericsError, match="infinite or not a number"):
            law_from_logits(row, SamplingOptions(temperature=temperature))


def test_a_context_that_was_rolled_back_is_as_if_nothing_had_come() -> None:
    rng = np.random.default_rng(10)
    options = SamplingOptions(0.8, repetition_penalty=1.5, frequency_penalty=0.3, bad_words=[[4, 4], [9, 11, 2]])
    row = rng.standard_normal(VOCAB).astype(np.float32)
    kept: list[int] = []
    moving = Context(PROMPT, VOCAB)
    for _ in range(100):
        draft = rng.integers(0, VOCAB, rng.integers(0, 6)).tolist()
        accepted = int(rng.integers(0, len(draft) + 1))
        moving.advance(draft)
        moving.roll_back(len(draft) - accepted)
        kept += draft[:accepted]
        fresh = context(kept)
        assert moving.output_length == fresh.output_length == len(kept)
        for mine, theirs in ((moving.seen, fresh.seen), (moving.output, fresh.output)):
            assert mine.ids.tolist() == theirs.ids.tolist()
            assert mine.counts.tolist() == theirs.counts.tolist()
        np.testing.assert_array_equal(dense(target_law(row, moving, options)), dense(target_law(row, fresh, options)))
    assert len(set(kept)) > 30, "control: nearly all tokens came"


def test_rows_see_the_draft_before_them_and_leave_the_context() -> None:
    rng = np.random.default_rng(11)
    options = SamplingOptions(1, presence_penalty=2, bad_words=[[11, 6, 30]], min_new_tokens=7)
    logits, draft = rng.standard_normal((4, VOCAB)).astype(np.float32), [6, 30, 6]
    moving = context()
    rows = Rows(logits, draft, moving, options, ENDS)
    assert len(rows) == 4
    for row in (3, 0, 1, 2):
        wanted = target_law(logits[row], context(OUTPUT + draft[:row]), options, ENDS)
        blind = target_law(logits[row], context(), options, ENDS)
        np.testing.assert_array_equal(dense(rows[row]), dense(wanted))
        assert (row == 0) == np.array_equal(dense(wanted), dense(blind)), "control: the draft matters"
        assert moving.output_length == len(OUTPUT)
    with pytest.raises(RequestError):
        Rows(np.full((1, VOCAB), -np.inf, np.float32), [], moving, options)[0]
    assert moving.output_length == len(OUTPUT)
