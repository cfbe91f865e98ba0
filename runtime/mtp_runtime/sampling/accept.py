"""Which draft tokens are kept when tokens are drawn: two rules, under both of which the output has the target's law.

Both take the rows of one verify. laws[i] is p_i, the target's law in the place of draft[i]; laws[K] follows the whole
draft. Rows are asked for one by one, up to the first rejection. At temperature 0 every law is one token, and both rules
keep the longest prefix that the target would have chosen itself.

`coupled` draws the target's token of each position from the seed alone and keeps a draft token that equals it. What it
promises: the output is a function of seed, prompt and options, and is the same for every K, drafter, way of drafting
and batch; so it is the target's law whatever the draft is.

`rejection` keeps more of a draft that was drawn. What it promises: the same seed with the same K in each cycle and the
same draft tokens and draft laws gives the same output; another K or drafter gives another output of the same law. For
point masses that law asks nothing of the drafter but to leave the draws of the purposes `ACCEPT` and `TOKEN` alone;
even a drawn token may pass as one. For draft laws it asks that

* each draft token was drawn from the very law that is handed in, by `drawn_draft` or `coupled_draft` with its own
  position;
* whether a position is drafted does not depend on the tokens drafted for it or after it, as it would if a draft that
  its drafter finds improbable were dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mtp_engines.errors import ContractError, NumericsError, RequestError
from mtp_runtime.sampling.law import Law, Laws
from mtp_runtime.sampling.stream import Purpose, Stream


class Verdict(NamedTuple):
    """What one cycle emits.

    Attributes:
        emitted: the accepted draft tokens and the bonus token: 1 to K + 1 ids. Without the bonus token where the row
            behind accepted tokens has no law.
        accepted: how many of them are draft tokens, 0 to K.
    """

    emitted: list[int]
    accepted: int


def coupled(laws: Laws, draft: Sequence[int], position: int, stream: Stream) -> Verdict:
    """Keep draft tokens while they equal the token that the target draws itself.

    A point-mass draft d is kept with probability p(d). Tokens of `coupled_draft` are kept with the sum over x of
    1 / sum over y of max(p(y) / p(x), q(y) / q(x)), which lies between (1 - t) / (1 + t) and 1 - t, t being the total
    variation between p and q (Daliri, Musco and Suresh, "Coupling without Communication and Drafter-Invariant
    Speculative Decoding", arXiv 2408.07978).

    Args:
        laws: K + 1 laws of the target.
        draft: K token ids, oldest first; K may be 0.
        position: tokens in the output before the first row.
        stream: the request's.

    Raises:
        ContractError: there is not one law more than draft tokens.
    """
    require_rows(laws, draft)
    emitted: list[int] = []
    for row, token in enumerate([*draft, None]):
        if (law := law_behind_accepted(laws, row)) is None:
            return Verdict(emitted, row)
        emitted.append(stream.race(law, position + row))
        if emitted[-1] != token:
            return Verdict(emitted, row)
    raise AssertionError("the row behind the draft has no draft token to equal")


def coupled_draft(law: Law, stream: Stream, position: int) -> int:
    """A draft token drawn from the drafter's law by the race that the target will run at that position."""
    return stream.race(law, position)


def drawn_draft(law: Law, stream: Stream, position: int) -> int:
    """A draft token drawn from the drafter's law by a number of its own, at the cost of one instead of a race."""
    return stream.draw(law, position, Purpose.DRAFT)


def rejection(
    laws: Laws,
    draft: Sequence[int],
    position: int,
    stream: Stream,
    draft_laws: Laws | None = None,
) -> Verdict:
    """Keep each draft token d with probability min(1, p(d) / q(d)); replace the first that is not kept.

    Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192,
    algorithm 1; Chen et al., arXiv 2302.01318. What replaces d is drawn from the normalised positive part of p - q; if
    all were kept, the bonus token is drawn from p_K. A point mass is kept with p(d) and replaced from p without d.

    Args:
        laws: K + 1 laws of the target.
        draft: K token ids, oldest first; K may be 0.
        position: tokens in the output before the first row.
        stream: the request's.
        draft_laws: K laws q_i; draft[i] was drawn from the i-th. None: the draft tokens are point masses.

    Raises:
        ContractError: the numbers of laws and tokens do not fit, or a draft token cannot have been drawn from its law.
    """
    require_rows(laws, draft)
    proposed: Laws = [Law.point(token) for token in draft] if draft_laws is None else draft_laws
    if len(proposed) != len(draft):
        raise ContractError(f"there are {len(proposed)} draft laws for {len(draft)} draft tokens; pass one for each.")
    emitted: list[int] = []
    for row, token in enumerate(draft):
        if (p := law_behind_accepted(laws, row)) is None:
            return Verdict(emitted, row)
        q = proposed[row]
        if q.of(token) == 0:
            raise ContractError(
                f"draft token {token} has probability 0 in its draft law; pass the law that it was drawn from."
            )
        if stream.uniform(position + row, Purpose.ACCEPT) * q.of(token) >= p.of(token):
            return Verdict([*emitted, stream.draw(p.beyond(q), position + row, Purpose.TOKEN)], row)
        emitted.append(token)
    last = len(draft)
    if (p := law_behind_accepted(laws, last)) is None:
        return Verdict(emitted, last)
    return Verdict([*emitted, stream.draw(p, position + last, Purpose.TOKEN)], last)


def law_behind_accepted(laws: Laws, row: int) -> Law | None:
    """The law of a row; None if it has none and a draft token before it was accepted.

    What was accepted may have ended the answer. If not, the row comes again as the first one of the next cycle, and
    fails there as in plain decoding, with everything before it said.

    Raises:
        RequestError, NumericsError: the first row has no law.
    """
    try:
        return laws[row]
    except (RequestError, NumericsError):
        if row == 0:
            raise
        return None


def require_rows(laws: Laws, draft: Sequence[int]) -> None:
    """Refuse rows that do not fit the draft.

    Raises:
        ContractError: there is not one law more than draft tokens.
    """
    if len(laws) != len(draft) + 1:
        raise ContractError(f"there are {len(laws)} laws for {len(draft)} draft tokens, expected one law more.")
