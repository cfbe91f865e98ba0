"""An independent account of sampling: transforms one token at a time, the law of a text, a test of counts."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch

from mtp_runtime.sampling import SamplingOptions

Dense = list[float]


def dense_law(
    logits: Sequence[float],
    prompt: Sequence[int],
    output: Sequence[int],
    options: SamplingOptions,
    end_tokens: Collection[int] = (),
) -> Dense:
    """Probability of every token, by the order and formulae that the transforms promise."""
    text = [*prompt, *output]
    row = [float(value) + options.logit_bias.get(token, 0.0) for token, value in enumerate(logits)]
    for token in set(text):
        row[token] *= 1 / options.repetition_penalty if row[token] > 0 else options.repetition_penalty
    for token, count in Counter(output).items():
        row[token] -= options.frequency_penalty * count + options.presence_penalty
    if len(output) < options.min_new_tokens:
        for token in end_tokens:
            row[token] = -math.inf
    for *beginning, last in options.bad_words:
        if not beginning or text[-len(beginning) :] == beginning:
            row[last] = -math.inf
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    if options.temperature == 0:
        return [float(token == order[0]) for token in range(len(row))]
    weights = [math.exp((value - row[order[0]]) / options.temperature) for value in row]
    kept = order[: options.top_k]
    if options.top_p < 1:
        total, reached, count = sum(weights[token] for token in kept), 0.0, 0
        while reached < options.top_p * total and count < len(kept):
            reached += weights[kept[count]]
            count += 1
        kept = kept[:count]
    kept = [token for token in kept if weights[token] >= options.min_p * weights[order[0]]]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(row))]


def joint_law(law: Callable[[tuple[int, ...]], Dense], length: int) -> dict[tuple[int, ...], float]:
    """Probability of every text of a length, from the law after each prefix."""
    tokens = range(len(law(())))
    joint = {}
    for text in itertools.product(tokens, repeat=length):
        joint[text] = math.prod(law(text[:place])[text[place]] for place in range(length))
    return joint


def p_value(counts: Counter[tuple[int, ...]], joint: dict[tuple[int, ...], float]) -> float:
    """Chance of counts that lie as far from a law as these: Pearson's chi-square, rare texts pooled.

    0 if a text came that cannot.
    """
    if any(joint[text] == 0 for text in counts):
        return 0.0
    runs = counts.total()
    pooled_expected, pooled_found, statistic, cells = 0.0, 0, 0.0, 0
    for text, probability in sorted(joint.items(), key=lambda item: item[1]):
        expected, found = runs * probability + pooled_expected, counts[text] + pooled_found
        if expected < 10:
            pooled_expected, pooled_found = expected, found
            continue
        pooled_expected, pooled_found = 0.0, 0
        statistic += (found - expected) ** 2 / expected
        cells += 1
    assert cells > 2, "control: a law with one cell fits everything"
    halves = torch.tensor([(cells - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def random_tables(rng: np.random.Generator, vocab_size: int, sharpness: float, unlike: float) -> tuple[np.ndarray, ...]:
    """Logits of a target by newest token, float32[vocab_size, vocab_size], and of a drafter that resembles it."""
    target = sharpness * rng.standard_normal((vocab_size, vocab_size))
    drafter = target + unlike * rng.standard_normal((vocab_size, vocab_size))
    return target.astype(np.float32), drafter.astype(np.float32)
