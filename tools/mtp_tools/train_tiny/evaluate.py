"""Every figure that the checkpoint's README states, computed from the stored, rounded weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from mtp_tools.train_tiny.acceptance import MAX_DRAFT_TOKENS, Acceptance, greedy_text, measure
from mtp_tools.train_tiny.checkpoint import load_checkpoint, transformers_difference
from mtp_tools.train_tiny.objective import losses
from mtp_tools.train_tiny.prompts import prompt_ids, read_prompts

BURST_TOKENS = 12
RUN_TOKENS = 96
WINDOW_TOKENS = 256
WINDOWS_AT_ONCE = 16
SAMPLES = 3


@dataclass(frozen=True)
class Figures:
    """Held-out measurements."""

    loss_nats: float
    agreement: tuple[float, ...]
    bursts: tuple[Acceptance, ...]
    runs: tuple[Acceptance, ...]
    distinct_share: float
    """Distinct 4-grams of the long runs over all their 4-grams; low when greedy text loops."""
    samples: tuple[tuple[str, str], ...]
    transformers_difference: float


def evaluate(folder: Path, tokenizer: Tokenizer, held_out: Tensor) -> Figures:
    """Measure the checkpoint in a folder.

    Args:
        held_out: int64[tokens], the held-out documents in one stream.
    """
    model = load_checkpoint(folder)
    prompts = read_prompts(folder / "heldout.jsonl")
    ids = prompt_ids(prompts, tokenizer)
    continued = greedy_text(model, ids, RUN_TOKENS)[:, ids.shape[1] :]
    texts = tokenizer.decode_batch(continued[:SAMPLES].tolist())
    with torch.no_grad():
        totals = [
            losses(model, windows, MAX_DRAFT_TOKENS) for windows in _windows(held_out, WINDOW_TOKENS + MAX_DRAFT_TOKENS)
        ]
    return Figures(
        loss_nats=_mean([loss.text.item() for loss in totals]),
        agreement=tuple(_mean([loss.agreement[j] for loss in totals]) for j in range(MAX_DRAFT_TOKENS)),
        bursts=measure(model, ids, BURST_TOKENS),
        runs=measure(model, ids, RUN_TOKENS),
        distinct_share=_mean([_distinct_share(row) for row in continued.tolist()]),
        samples=tuple((prompts[i].prompt, texts[i]) for i in range(SAMPLES)),
        transformers_difference=transformers_difference(model, folder, ids[:2]),
    )


def _windows(tokens: Tensor, length: int) -> Tensor:
    """Cut int64[groups, WINDOWS_AT_ONCE, length] side by side; equal groups, so means are exact."""
    groups = len(tokens) // (length * WINDOWS_AT_ONCE)
    return tokens[: groups * WINDOWS_AT_ONCE * length].view(groups, WINDOWS_AT_ONCE, length)


def _distinct_share(tokens: Sequence[int]) -> float:
    grams = [tuple(tokens[at : at + 4]) for at in range(len(tokens) - 3)]
    return len(set(grams)) / len(grams)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
