"""Rules that keep more draft tokens than the target's law allows: faster output of another law.

A draft token that is not kept is replaced by a draw of the target, by the race of `coupled`. A token that the target's
law does not have (masked, or outside top-k, top-p or min-p) is never kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mtp_runtime.sampling.accept import Verdict, law_behind_accepted, require_rows
from mtp_runtime.sampling.law import Law, Laws
from mtp_runtime.sampling.stream import Stream


def lossy_relaxed(
    laws: Laws,
    draft: Sequence[int],
    position: int,
    stream: Stream,
    *,
    top_k: int,
    delta: float,
    judges: Laws | None = None,
) -> Verdict:
    """Keep a draft token among the `top_k` most probable of the target and within `delta` of the best probability.

    As TensorRT-LLM's relaxed acceptance. Equally probable tokens at the border of `top_k` all count as among them.

    Args:
        laws: K + 1 laws, which replacements are drawn from.
        draft: K token ids, oldest first; K may be 0.
        position: tokens in the output before the first row.
        stream: the request's.
        top_k: 1 or more.
        delta: a difference of probabilities, 0 to 1.
        judges: K or more laws, which the draft is judged by; None takes `laws`. At temperature 0 those are one token
            each and keep nothing else, so hand in laws of temperature 1.

    Raises:
        ContractError: there is not one law more than draft tokens.
    """

    def keeps(law: Law, token: int) -> bool:
        probability, best = law.of(token), float(law.probabilities.max())
        better = int(np.count_nonzero(law.probabilities > probability))
        return probability >= best - delta and better < top_k

    return _judged(laws, draft, position, stream, laws if judges is None else judges, keeps)


def lossy_typical(
    laws: Laws,
    draft: Sequence[int],
    position: int,
    stream: Stream,
    *,
    epsilon: float,
    delta: float,
    judges: Laws | None = None,
) -> Verdict:
    """Keep a draft token x with p(x) > min(epsilon, delta * exp(-H(p))), H being the entropy in nats.

    "Typical acceptance" of Cai et al., "Medusa", arXiv 2401.10774: epsilon is the threshold that a token must pass
    where the target is sure, delta scales the lower one where it is not. Unlike there, the first draft token has to
    pass too, since the pending token was emitted before. The other arguments are those of `lossy_relaxed`.

    Raises:
        ContractError: there is not one law more than draft tokens.
    """

    def keeps(law: Law, token: int) -> bool:
        entropy = -float(np.sum(law.probabilities * np.log(law.probabilities)))
        return law.of(token) > min(epsilon, delta * float(np.exp(-entropy)))

    return _judged(laws, draft, position, stream, laws if judges is None else judges, keeps)


def _judged(
    laws: Laws,
    draft: Sequence[int],
    position: int,
    stream: Stream,
    judges: Laws,
    keeps: Callable[[Law, int], bool],
) -> Verdict:
    require_rows(laws, draft)
    kept = 0
    while kept < len(draft):
        judge = law_behind_accepted(judges, kept)
        if judge is None or not (judge.of(draft[kept]) > 0 and keeps(judge, draft[kept])):
            break
        kept += 1
    law = law_behind_accepted(laws, kept)
    bonus = [] if law is None else [stream.race(law, position + kept)]
    return Verdict([*draft[:kept], *bonus], kept)
