"""From logits and the tokens before them to the law that the next token is drawn from.

The order, and where the formulae are written down:

1. `logit_bias` is added to the logits (OpenAI's API reference, "logit_bias").
2. `repetition_penalty` r, for each token of prompt or output once: a logit above 0 is divided by r, another multiplied
   (Keskar et al., "CTRL", arXiv 1909.05858, section 4.1, with the rule for the sign of Transformers'
   `RepetitionPenaltyLogitsProcessor`).
3. `frequency_penalty` f and `presence_penalty` a, from the output only: logit -= f * count + a * (count > 0) (OpenAI's
   API guide, "Frequency and presence penalties").
4. `min_new_tokens` masks the end tokens while the output is shorter.
5. `bad_words` masks the last token of each sequence whose other tokens are the end of prompt and output.
6. The constraint masks every token that its grammar does not allow next (`mtp_runtime.constraints`).
7. `temperature` T: softmax(logits / T); at 0 all probability is on the best token, and steps 8 to 10 have no effect.
8. `top_k` keeps the k best tokens (Fan et al., "Hierarchical Neural Story Generation", arXiv 1805.04833).
9. `top_p` keeps the fewest best tokens of what is left whose probabilities sum to p or more (Holtzman et al., "The
   Curious Case of Neural Text Degeneration", arXiv 1904.09751).
10. `min_p` keeps tokens with at least min_p times the probability of the best (Nguyen et al., "Turning Up the Heat",
   arXiv 2407.01082).

Equal tokens at a border, and equal best ones, are taken by lowest id. The law is float64. A logit of minus infinity is
a token that cannot occur.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtp_engines.errors import NumericsError, RequestError
from mtp_runtime.sampling.context import Context
from mtp_runtime.sampling.law import Doubles, Ids, Law
from mtp_runtime.sampling.options import SamplingOptions

Row = NDArray[np.floating[Any]]
# How many tokens are sorted for top_p before all are; the nucleus of a language model is rarely larger.
_SORTED_FIRST = 4096


def target_law(logits: Row, context: Context, options: SamplingOptions, end_tokens: Collection[int] = ()) -> Law:
    """The law of the token after `context`.

    Args:
        logits: float32[vocab_size] of the row that the context's newest token made; it is not changed.
        context: prompt and output up to that token.
        options: what to do to the logits.
        end_tokens: ids that `min_new_tokens` masks.

    Raises:
        RequestError: every token is masked.
        NumericsError: a logit is not a number, or infinite.
    """
    return law_from_logits(adjusted(logits, context, options, end_tokens), options)


class Rows:
    """The laws of a verify's rows, each made when it is asked for; the context is left as it was found.

    Row i sees the context and the first i draft tokens, since it counts only if those were accepted.
    """

    def __init__(
        self,
        logits: Sequence[Row],
        draft: Sequence[int],
        context: Context,
        options: SamplingOptions,
        end_tokens: Collection[int] = (),
    ) -> None:
        """`logits` are K + 1 rows of float32[vocab_size], `draft` has K token ids; the rest is as in `target_law`."""
        self._logits, self._draft, self._context = logits, list(draft), context
        self._options, self._end_tokens = options, end_tokens

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._logits)

    def __getitem__(self, row: int, /) -> Law:
        """The law of row 0 to K; asking again makes it again."""
        return law_behind(self._logits[row], self._draft[:row], self._context, self._options, self._end_tokens)


def law_behind(
    logits: Row,
    draft: Sequence[int],
    context: Context,
    options: SamplingOptions,
    end_tokens: Collection[int] = (),
) -> Law:
    """The law of the token after the context and a draft, as in `target_law`; the context is left as it was found."""
    context.advance(draft)
    try:
        return target_law(logits, context, options, end_tokens)
    finally:
        context.roll_back(len(draft))


def adjusted(logits: Row, context: Context, options: SamplingOptions, end_tokens: Collection[int] = ()) -> Row:
    """The logits after bias, penalties and masks: float64[vocab_size], or the logits themselves if there are none.

    Raises:
        RequestError: the grammar engine gave up.
    """
    allowed = None if context.constraint is None else context.constraint.allowed()
    if not options.changes_logits and allowed is None:
        return logits
    row = logits.astype(np.float64)
    if options.logit_bias:
        row[list(options.logit_bias)] += list(options.logit_bias.values())
    if options.repetition_penalty != 1:
        seen = row[context.seen.ids]
        penalty = options.repetition_penalty
        row[context.seen.ids] = np.where(seen > 0, seen / penalty, seen * penalty)
    if options.frequency_penalty or options.presence_penalty:
        row[context.output.ids] -= options.frequency_penalty * context.output.counts + options.presence_penalty
    if context.output_length < options.min_new_tokens:
        row[list(end_tokens)] = -np.inf
    for word in options.bad_words:
        if context.ends_with(word[:-1]):
            row[word[-1]] = -np.inf
    if allowed is not None:
        row[~allowed] = -np.inf
    return row


def law_from_logits(row: Row, options: SamplingOptions) -> Law:
    """Temperature, top-k, top-p and min-p alone, for a drafter's logits too.

    Raises:
        RequestError: every token is masked.
        NumericsError: a logit is not a number, or infinite.
    """
    best = float(row.max())  # NaN if any is.
    if np.isnan(best) or best == np.inf:
        raise NumericsError("a logit is infinite or not a number, expected finite ones; check the model's numerics.")
    if best == -np.inf:
        raise RequestError(
            "every token is masked at this position, expected one that is left; loosen logit_bias, bad_words, "
            "min_new_tokens or the constraint."
        )
    if options.is_greedy:
        return Law.point(int(row.argmax()))
    if options.top_k is None or options.top_k >= len(row):
        ids: Ids = np.arange(len(row))
        weights: Doubles = row.astype(np.float64)
    else:
        ids = largest(row, options.top_k)
        weights = row[ids].astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):  # A tiny temperature makes minus infinity, which is its limit.
        weights -= best
        weights /= options.temperature
        np.exp(weights, out=weights)
    if options.top_p < 1:
        kept = _nucleus(weights, options.top_p)
        ids, weights = ids[kept], weights[kept]
    if options.min_p > 0:
        weights[weights < options.min_p] = 0.0  # The best token weighs 1.
    return Law.of_weights(ids, weights)


def largest(values: Row, count: int) -> Ids:
    """The places of the `count` largest values, ascending; of equal ones at the border the first."""
    if count == 0:
        return np.zeros(0, np.int64)
    if count >= len(values):
        return np.arange(len(values))
    return _down_to(values, np.partition(values, len(values) - count)[len(values) - count], count)


def _nucleus(weights: Doubles, share: float) -> Ids:
    """The places, ascending, of the fewest largest weights that hold a share of the sum; of equal ones the first."""
    wanted = share * weights.sum()
    for sorted_ones in (_SORTED_FIRST, len(weights)):
        start = max(0, len(weights) - sorted_ones)
        best_first = np.sort(np.partition(weights, start)[start:] if start else weights)[::-1]
        sums = np.cumsum(best_first)
        if sums[-1] >= wanted:
            break
    # Rounding can leave even the sum of all below a share next to 1.
    count = min(int(np.searchsorted(sums, wanted)) + 1, len(sums))
    return _down_to(weights, best_first[count - 1], count)


def _down_to(values: Row, border: Any, count: int) -> Ids:
    """The places of `count` values, ascending: all above the border, and the first of those that equal it."""
    places = np.flatnonzero(values >= border)
    surplus = len(places) - count
    if surplus:
        equal = np.flatnonzero(values[places] == border)
        places = np.delete(places, equal[len(equal) - surplus :])
    return places
