"""What is minimised: next-token loss, and the MTP head's distance to the backbone when chained."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mtp_tools.train_tiny.model import ChainKeys, TinyModel

# Greedy acceptance asks for the same best token, not for the same distribution: part of the
# head's target is therefore the backbone's choice alone.
CHOICE_SHARE = 0.3


@dataclass(frozen=True)
class Losses:
    """Scalars of one batch; draft losses and agreements are one a chained step, first step first."""

    text: Tensor
    drafts: tuple[Tensor, ...]
    agreement: tuple[float, ...]

    def total(self, draft_weight: float) -> Tensor:
        """Return the text loss plus the weighted mean of the draft losses."""
        if not self.drafts:
            return self.text
        return self.text + draft_weight * torch.stack(self.drafts).mean()


def losses(model: TinyModel, ids: Tensor, chained_steps: int) -> Losses:
    """Compute the losses of int64[batch, length + chained_steps] windows of text.

    Row t of chained step j reads token t + 1 + j of the text and is compared with what the
    backbone says after that token: both predict token t + 2 + j.
    """
    length = ids.shape[1] - max(chained_steps, 1)
    hidden = model.hidden(ids[:, :length])
    logits = model.logits(hidden)
    log_probs = logits.log_softmax(-1)
    text = F.nll_loss(log_probs.flatten(0, 1), ids[:, 1 : length + 1].flatten())
    wanted, choice = _draft_target(log_probs.detach())
    drafts: list[Tensor] = []
    agreement: list[float] = []
    chain: ChainKeys = ()
    for j in range(chained_steps):
        hidden, chain = model.chain_step(ids[:, 1 + j : length + 1 + j], hidden, chain)
        rows = length - 1 - j  # the last rows predict tokens that the backbone did not score
        draft_logits = model.logits(hidden[:, :rows])
        drafts.append(F.cross_entropy(draft_logits.flatten(0, 1), wanted[:, 1 + j :].flatten(0, 1)))
        agreement.append((draft_logits.argmax(-1) == choice[:, 1 + j :]).float().mean().item())
    return Losses(text, tuple(drafts), tuple(agreement))


def _draft_target(log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distribution [batch, length, vocab_size] to draft from, and its best tokens."""
    choice = log_probs.argmax(-1)
    wanted = log_probs.exp().mul_(1 - CHOICE_SHARE)
    best = torch.full_like(choice, CHOICE_SHARE, dtype=wanted.dtype)
    return wanted.scatter_add_(-1, choice.unsqueeze(-1), best.unsqueeze(-1)), choice
