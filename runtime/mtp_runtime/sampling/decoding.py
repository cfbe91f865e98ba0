"""How the tokens of one request are chosen, settled and checked."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mtp_runtime.constraints.grammars import Grammar
from mtp_runtime.sampling.acceptors import AcceptRule
from mtp_runtime.sampling.options import SamplingOptions
from mtp_runtime.sampling.stream import Stream, derived_seed


@dataclass(frozen=True)
class Decoding:
    """All of a request that says how tokens are chosen and reported.

    Attributes:
        options: transforms and temperature; texts among the bad words are ids here.
        rule: which draft tokens are kept.
        completions: how many answers are drawn.
        logprobs: so many most probable tokens are told for each emitted one, besides that one; None tells nothing.
        prompt_logprobs: the same for the tokens of the prompt.
        constraint: what every answer must look like; None leaves it free.
    """

    options: SamplingOptions
    rule: AcceptRule
    completions: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Grammar | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the target's best token is taken, whatever the text is."""
        return self.options.is_plain and self.constraint is None

    @property
    def needs_logits(self) -> bool:
        """Whether ids that the graph chooses are not enough."""
        tells = self.logprobs is not None or self.prompt_logprobs is not None
        return tells or not self.is_plain or self.rule.is_lossy

    def seeded(self) -> Decoding:
        """With a seed, a fresh one if none was given, where anything is drawn; without one elsewhere."""
        seed = None if self.options.is_greedy else Stream.of(self.options.seed).seed
        return replace(self, options=replace(self.options, seed=seed))

    def seed_of(self, index: int) -> int | None:
        """The seed of one completion; None where nothing is drawn."""
        return None if self.options.seed is None else derived_seed(self.options.seed, index)
