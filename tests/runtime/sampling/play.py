"""Generation with made-up laws: the cycles of the loop over tables of logits, with places where a fault can be put."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from mtp_runtime.sampling import (
    Context,
    Law,
    Rows,
    SamplingOptions,
    Stream,
    Verdict,
    coupled,
    coupled_draft,
    drawn_draft,
    rejection,
)
from tests.runtime.sampling.oracle import dense_law, joint_law, random_tables

Prefix = tuple[int, ...]
PROMPT = (1, 2, 2)
END_TOKENS = (0,)


@dataclass
class World:
    """A target and a drafter over a few tokens; logits depend on the newest token alone, laws on more."""

    options: SamplingOptions
    vocab_size: int = 6
    seed: int = 1
    sharpness: float = 1.5
    unlike: float = 1.0
    prompt: Prefix = PROMPT
    drafter_options: SamplingOptions | None = None
    """What the drafter's laws are made with, if it differs."""
    target_options: SamplingOptions | None = None
    """What the target's laws are made with, where a control makes them wrong."""
    ignores_draft: bool = False
    """A fault: the context of every row is that of the cycle's first."""
    _known: dict[object, Law] = field(default_factory=dict)

    @cached_property
    def tables(self) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng(self.seed)
        return random_tables(rng, self.vocab_size, self.sharpness, self.unlike)

    def p(self, output: Prefix, draft: Prefix) -> Law:
        """The target's law behind a draft, made by `Rows` as a verify makes it."""
        return self._law(0, self.target_options or self.options, output, draft)

    def q(self, output: Prefix, draft: Prefix) -> Law:
        """The drafter's law, with the transforms of the request."""
        return self._law(1, self.drafter_options or self.options, output, draft)

    def expected(self, length: int) -> dict[Prefix, float]:
        """The target's law of the first tokens, by the oracle."""
        table = self.tables[0]

        def law(output: Prefix) -> list[float]:
            newest = [*self.prompt, *output][-1]
            return dense_law(table[newest].tolist(), self.prompt, output, self.options, END_TOKENS)

        return joint_law(law, length)

    def _law(self, which: int, options: SamplingOptions, output: Prefix, draft: Prefix) -> Law:
        key = (which, output, draft)
        if key not in self._known:
            context = Context(self.prompt, self.vocab_size)
            context.advance(output)
            logits = self.tables[which][[[*self.prompt, *output][-1], *draft]]
            if self.ignores_draft:
                self._known[key] = Rows(logits[-1:], (), context, options, END_TOKENS)[0]
            else:
                self._known[key] = Rows(logits, draft, context, options, END_TOKENS)[len(draft)]
        return self._known[key]


@dataclass(frozen=True)
class Way:
    """How drafts are made and judged."""

    accept: str = "rejection"
    draw: str = "drawn"
    """`drawn`, `coupled`, or `best` for a point mass on the most probable token."""
    told: Callable[[World, Prefix, Prefix], Law] | None = World.q
    """The draft law that the acceptor is told; None for point masses."""
    least: float = 0.0
    """A draft ends before a token that its drafter finds less probable."""


WAYS = {
    "coupled, coupled drafts": Way("coupled", "coupled"),
    "coupled, drawn drafts": Way("coupled", "drawn"),
    "coupled, best drafts": Way("coupled", "best"),
    "rejection, drawn drafts": Way("rejection", "drawn"),
    "rejection, coupled drafts": Way("rejection", "coupled"),
    "rejection, best drafts": Way("rejection", "best", told=None),
}


def play(world: World, way: Way, stream: Stream, draft_tokens: Sequence[int], length: int) -> tuple[Prefix, list[int]]:
    """Generate; cycle i drafts draft_tokens[i], in turn. The first tokens, and how many drafts each cycle kept."""
    output: Prefix = ()
    accepted = []
    while len(output) < length:
        verdict = _cycle(world, way, stream, draft_tokens[len(accepted) % len(draft_tokens)], output)
        output += tuple(verdict.emitted)
        accepted.append(verdict.accepted)
    return output[:length], accepted


def _cycle(world: World, way: Way, stream: Stream, count: int, output: Prefix) -> Verdict:
    draft: Prefix = ()
    for row in range(count):
        q, position = world.q(output, draft), len(output) + row
        if way.draw == "best":
            token = int(q.ids[np.argmax(q.probabilities)])
        else:
            token = {"drawn": drawn_draft, "coupled": coupled_draft}[way.draw](q, stream, position)
        if q.of(token) < way.least:
            break
        draft += (token,)
    laws = [world.p(output, draft[:row]) for row in range(len(draft) + 1)]
    if way.accept == "coupled":
        return coupled(laws, draft, len(output), stream)
    told = way.told and [way.told(world, output, draft[:row]) for row in range(len(draft))]
    return rejection(laws, draft, len(output), stream, told)


def counted(
    world: World,
    way: Way,
    draft_tokens: Sequence[int],
    length: int,
    runs: int = 1500,
    stream: Callable[[int], Stream] = Stream,
) -> Counter[Prefix]:
    """How often each text came, over as many seeds."""
    return Counter(play(world, way, stream(seed), draft_tokens, length)[0] for seed in range(runs))
