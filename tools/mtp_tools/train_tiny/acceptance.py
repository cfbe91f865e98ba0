"""Greedy acceptance, simulated: what the cycle loop would accept on the target's own greedy text."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from mtp_tools.train_tiny.model import ChainKeys, TinyModel

MAX_DRAFT_TOKENS = 3


@dataclass(frozen=True)
class Acceptance:
    """Counts over all cycles of all prompts at one K."""

    draft_tokens: int
    histogram: tuple[int, ...]
    """How many cycles accepted 0, 1, .. K draft tokens."""

    @property
    def cycles(self) -> int:
        """Return how many verifies there were."""
        return sum(self.histogram)

    @property
    def acceptance_rate(self) -> float:
        """Return accepted / drafted."""
        accepted = sum(count * kept for kept, count in enumerate(self.histogram))
        return accepted / (self.draft_tokens * self.cycles)

    @property
    def emitted_per_verify(self) -> float:
        """Return the mean emitted length: accepted plus the bonus token."""
        return 1 + self.draft_tokens * self.acceptance_rate

    @property
    def by_position(self) -> tuple[float, ...]:
        """Return, for each draft position, the share of cycles that kept it."""
        return tuple(sum(self.histogram[i + 1 :]) / self.cycles for i in range(self.draft_tokens))


@torch.no_grad()
def greedy_text(model: TinyModel, prompts: Tensor, count: int) -> Tensor:
    """Append `count` greedy tokens to int64[batch, length] prompts, one at a time."""
    cache = DynamicCache(config=model.language_model.config)
    ids, fed = prompts, prompts
    for _ in range(count):
        output = model.language_model(input_ids=fed, cache=cache, use_cache=True)
        fed = model.logits(output.last_hidden_state[:, -1:]).argmax(-1)
        ids = torch.cat([ids, fed], 1)
    return ids


@torch.no_grad()
def drafts(model: TinyModel, ids: Tensor) -> Tensor:
    """Return what the head drafts from every row of int64[batch, length] text.

    Returns:
        int64[MAX_DRAFT_TOKENS, batch, length - 1]; element [j, b, t] is draft token j of a cycle
        whose pending token is t + 1, so it proposes token t + 2 + j. Every chained step reads the
        draft token before it, as the real loop does.
    """
    hidden, tokens = model.hidden(ids)[:, :-1], ids[:, 1:]
    chain: ChainKeys = ()
    proposed = []
    for _ in range(MAX_DRAFT_TOKENS):
        hidden, chain = model.chain_step(tokens, hidden, chain)
        tokens = model.logits(hidden).argmax(-1)
        proposed.append(tokens)
    return torch.stack(proposed)


def measure(model: TinyModel, prompts: Tensor, emitted: int) -> tuple[Acceptance, ...]:
    """Run the cycle loop over `emitted` greedy tokens of each prompt, for K = 1, 2, 3.

    Args:
        prompts: int64[batch, length].
    """
    # The last cycle may reach past the end: it is scored in full, against real greedy tokens.
    ids = greedy_text(model, prompts, emitted + MAX_DRAFT_TOKENS)
    proposed, text, first = drafts(model, ids).tolist(), ids.tolist(), prompts.shape[1]
    results = []
    for draft_tokens in range(1, MAX_DRAFT_TOKENS + 1):
        histogram = [0] * (draft_tokens + 1)
        for row, tokens in enumerate(text):
            pending = first  # the prompt's own run emitted this token
            while pending + 1 < first + emitted:
                kept = _kept([p[row] for p in proposed[:draft_tokens]], tokens, pending)
                histogram[kept] += 1
                pending += kept + 1
        results.append(Acceptance(draft_tokens, tuple(histogram)))
    return tuple(results)


def _kept(proposed: Sequence[Sequence[int]], tokens: Sequence[int], pending: int) -> int:
    """Return how many draft tokens agree with the text after the pending one, up to the first miss."""
    for j, draft in enumerate(proposed):
        if draft[pending - 1] != tokens[pending + 1 + j]:
            return j
    return len(proposed)
