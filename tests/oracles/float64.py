"""A float64 loop over a Qwen3.5 dense checkpoint: target, head, greedy decoding, speculation.

Written from the family's equations in NumPy only. It shares no code with the product, works one row
at a time where that is simplest, and can be broken on purpose so that a test can show that it
would notice.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from tests.oracles.float64_checkpoint import Array, Checkpoint, load_checkpoint, subset
from tests.oracles.float64_layers import (
    FullState,
    LayerState,
    LinearState,
    empty_state,
    run_layer,
    zero_centred_norm,
)

__all__ = [
    "FAULTS",
    "Checkpoint",
    "Forward",
    "FullState",
    "HeadForward",
    "LinearState",
    "Oracle",
    "Speculation",
    "load_checkpoint",
]

# One deliberate fault for each convention that is easy to get wrong.
FAULTS = {
    "swap_concat": "the head projects [hidden, embedding]",
    "pre_norm_hidden": "the head gets the residual stream before the target's final norm",
    "plain_gain": "every zero-centred norm multiplies by w, not by 1 + w",
    "flat_q_gate": "q_proj is split into two halves, not per head",
    "linear_norm_zero_centred": "linear_attn.norm multiplies by 1 + w",
    "unshifted_ids": "row p of the head pairs t_p, not t_{p+1}, with h_p",
    "l2norm_eps_outside": "x / (sqrt(sum) + eps)",
    "q_unscaled": "the delta net's query is not scaled by key_head_dim ** -0.5",
    "repeat_not_interleave": "key heads are tiled over the value heads",
    "conv_state_post_silu": "the conv state keeps convolved rows; seen only across two runs",
    "read_before_update": "the delta net reads the state before the row's own update",
    "no_decay": "the delta net never forgets",
    "mtp_rejected_rows_kept": "the head's cache keeps the rows of rejected drafts",
    "chained_rows_kept": "the head's cache keeps the rows made from its own output; needs K >= 2",
    "hidden_row_off_by_one": "row p of the head gets h_{p-1}",
    "position_zero_masked": "the head zeroes the embedding at position 0",
    "state_not_rolled_back": "recurrent and conv states stay where the whole verify left them",
    "rope_full": "RoPE rotates the whole head",
    "unscaled_scores": "attention scores are not scaled by head_dim ** -0.5",
    "state_bf16": "the recurrent state is rounded to bfloat16 after every row",
}


@dataclass(frozen=True)
class Forward:
    """The target over T rows.

    embeddings, pre_norm (before the final norm), hidden (after it): float64[T, hidden_size].
    layers: the residual stream after every layer, each float64[T, hidden_size].
    logits: float64[T, vocab_size].
    states: the state of every layer after the last row.
    """

    embeddings: Array
    layers: list[Array]
    pre_norm: Array
    hidden: Array
    logits: Array
    states: list[LayerState]


@dataclass(frozen=True)
class HeadForward:
    """The MTP head over T rows.

    out: float64[T, hidden_size], after mtp.norm.
    logits: float64[T, vocab_size].
    key, value: float64[positions, num_key_value_heads, head_dim], older rows of a cache included.
    stages: every intermediate by name, float64[T, hidden_size] (concatenation: twice as wide).
    """

    out: Array
    logits: Array
    key: Array
    value: Array
    stages: dict[str, Array]

    @property
    def cache(self) -> FullState:
        """The head's state after these rows."""
        return FullState("full", self.key, self.value)


@dataclass(frozen=True)
class Speculation:
    """Emitted ids, and per cycle: how many drafts were made, how many delivered, and which."""

    ids: list[int]
    drafted: list[int]
    accepted: list[int]
    drafts: list[list[int]]


class Oracle:
    """The float64 model of one checkpoint, right or with one named fault."""

    def __init__(self, checkpoint: Checkpoint, broken: str | None = None) -> None:
        if broken is not None and broken not in FAULTS:
            raise ValueError(f"Unknown fault {broken!r}; the known ones are {sorted(FAULTS)}.")
        self.checkpoint, self.config, self.broken = checkpoint, checkpoint.config, broken
        self._layers = [subset(checkpoint.target, f"layers.{i}.") for i in range(len(self.config.layer_types))]

    def forward(self, ids: Sequence[int]) -> Forward:
        """The target over a whole text."""
        return self.extend(ids, self.initial_states(), 0)

    def initial_states(self) -> list[LayerState]:
        """The state of every layer before the first row."""
        return [empty_state(kind, self.config) for kind in self.config.layer_types]

    def extend(self, ids: Sequence[int], states: list[LayerState], start: int) -> Forward:
        """The target over `ids`, the first at position `start`, after what `states` has seen."""
        if len(ids) == 0:
            raise ValueError("There are no rows to run: ids is empty.")
        embeddings = self.checkpoint.target["embed_tokens.weight"][np.asarray(ids)]
        rows, layers, after = embeddings, [], []
        for weights, state in zip(self._layers, states, strict=True):
            run = run_layer(rows, weights, self.config, state, start, self.broken)
            rows = run.second_residual
            layers.append(rows)
            after.append(run.state)
        hidden = self._norm(rows, self.checkpoint.target["norm.weight"])
        logits = hidden @ self.checkpoint.lm_head.T
        return Forward(embeddings, layers, rows, hidden, logits, after)

    def head(
        self,
        next_ids: Sequence[int],
        hidden: Array,
        cache: FullState | None = None,
        start: int = 0,
    ) -> HeadForward:
        """The head over rows (t_{p+1}, h_p), p counted from `start`; RoPE uses position p."""
        weights = self.checkpoint.head
        if weights is None:
            raise ValueError("The checkpoint has no mtp.* tensors, so there is no head to run.")
        embedding = self.checkpoint.target["embed_tokens.weight"][np.asarray(next_ids)]
        if self.broken == "position_zero_masked" and start == 0:
            embedding = np.concatenate([np.zeros_like(embedding[:1]), embedding[1:]])
        embedding_norm = self._norm(embedding, weights["pre_fc_norm_embedding.weight"])
        hidden_norm = self._norm(hidden, weights["pre_fc_norm_hidden.weight"])
        # Embedding first: both halves are equally wide, so the swap runs and drafts noise.
        halves = [embedding_norm, hidden_norm]
        concatenation = np.concatenate(halves[::-1] if self.broken == "swap_concat" else halves, axis=1)
        projection = concatenation @ weights["fc.weight"].T
        state = empty_state("full_attention", self.config) if cache is None else cache
        layer = subset(weights, "layers.0.")
        run = run_layer(projection, layer, self.config, state, start, self.broken)
        out = self._norm(run.second_residual, weights["norm.weight"])
        stages = {
            "embedding_norm": embedding_norm,
            "hidden_norm": hidden_norm,
            "concatenation": concatenation,
            "projection": projection,
            **{name: value for name, value in vars(run).items() if name != "state"},
            "output": out,
        }
        _, key, value = run.state
        return HeadForward(out, out @ self.checkpoint.lm_head.T, key, value, stages)

    def head_over(self, ids: Sequence[int]) -> HeadForward:
        """The head over all T - 1 rows of a text, fed by the target as in speculation."""
        rows = self.head_input(self.forward(ids))[:-1]
        return self.head(*self.pair(list(ids), rows))

    def head_input(self, forward: Forward) -> Array:
        """The target's rows that the head consumes: exactly what the output head consumes."""
        return forward.pre_norm if self.broken == "pre_norm_hidden" else forward.hidden

    def pair(self, tokens: list[int], hidden: Array) -> tuple[list[int], Array]:
        """Head rows p = 0..len(tokens) - 2 as (token p + 1, hidden p).

        hidden: float64[len(tokens) - 1, hidden_size], the target's rows.
        """
        if self.broken == "hidden_row_off_by_one":
            hidden = np.concatenate([hidden[:1], hidden[:-1]])
        return (tokens[:-1] if self.broken == "unshifted_ids" else tokens[1:]), hidden

    def greedy(self, prompt_ids: Sequence[int], max_new_tokens: int, eos: Collection[int] = ()) -> list[int]:
        """Plain decoding, one token at a time; the lowest id wins a tie, an end id is emitted."""
        if max_new_tokens < 1:
            return []
        row = self.forward(prompt_ids)
        ids = [best(row.logits[-1])]
        while len(ids) < max_new_tokens and ids[-1] not in eos:
            row = self.extend(ids[-1:], row.states, len(prompt_ids) + len(ids) - 1)
            ids.append(best(row.logits[-1]))
        return ids

    def speculate(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        draft_tokens: int,
        eos: Collection[int] = (),
    ) -> Speculation:
        """Greedy decoding with drafts of the head, verified by the target.

        The prefill emits token 1 and a cycle emits accepted + 1. No draft is made that the limit
        could not let out. An end id cuts the emitted block, and `accepted` with it.
        """
        result = Speculation([], [], [], [])
        if max_new_tokens < 1:
            return result
        prefill = self.forward(prompt_ids)
        tokens, hidden, states = list(prompt_ids), self.head_input(prefill), prefill.states
        result.ids.append(best(prefill.logits[-1]))
        drafter = _Drafter(self)
        while len(result.ids) < max_new_tokens and result.ids[-1] not in eos:
            count = min(draft_tokens, max_new_tokens - len(result.ids) - 1)
            known = tokens + result.ids
            draft = drafter.draft(known, hidden, count) if count else []
            rows = self._verify([known[-1], *draft], states, len(known) - 1)
            chosen = [best(row.logits[-1]) for row in rows]
            kept = matching(draft, chosen)
            states = self._commit(rows, kept)
            hidden = np.concatenate([hidden, *map(self.head_input, rows[: kept + 1])])
            # Where a draft was right it is the target's own choice, so `chosen` holds it too.
            delivered = cut(chosen[: kept + 1], eos)
            result.ids.extend(delivered)
            result.drafted.append(count)
            result.accepted.append(min(kept, len(delivered)))
            result.drafts.append(draft)
            drafter.rejected = (chosen, draft, rows, kept)
        return result

    def _norm(self, rows: Array, weight: Array) -> Array:
        return zero_centred_norm(rows, weight, self.config.rms_norm_eps, self.broken)

    def _verify(self, block: list[int], states: list[LayerState], start: int) -> list[Forward]:
        """One run a row, so that the state after every row exists and any can be committed."""
        rows: list[Forward] = []
        for i, token in enumerate(block):
            rows.append(self.extend([token], rows[-1].states if rows else states, start + i))
        return rows

    def _commit(self, rows: list[Forward], kept: int) -> list[LayerState]:
        """The target's states after the pending token and `kept` drafts."""
        if self.broken != "state_not_rolled_back":
            return rows[kept].states
        # Attention rows are cut by their length; only what cannot be cut goes wrong.
        return [
            last if isinstance(last, LinearState) else right
            for right, last in zip(rows[kept].states, rows[-1].states, strict=True)
        ]


class _Drafter:
    """The head with its cache over the committed text."""

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.cache: FullState | None = None
        self.length = 0
        # (chosen, draft, rows, kept) of the last verify; only a fault reads it.
        self.rejected: tuple[list[int], list[int], list[Forward], int] | None = None

    def draft(self, tokens: list[int], hidden: Array, count: int) -> list[int]:
        """Propose `count` tokens after `tokens`; hidden: the target's len(tokens) - 1 rows."""
        oracle = self.oracle
        next_ids, rows = oracle.pair(tokens, hidden)
        # New rows always come from the target's hidden rows, never from the head's own output.
        run = oracle.head(next_ids[self.length :], rows[self.length :], self.cache, self.length)
        self.length = len(next_ids)
        self.cache = cache = self._with_rejected_rows(run.cache)
        draft = [best(run.logits[-1])]
        while len(draft) < count:
            position = self.length + len(draft) - 1
            run = oracle.head(draft[-1:], run.out[-1:], cache, position)
            cache = run.cache
            draft.append(best(run.logits[-1]))
        if oracle.broken == "chained_rows_kept":
            self.cache = cache
        return draft

    def _with_rejected_rows(self, cache: FullState) -> FullState:
        if self.oracle.broken != "mtp_rejected_rows_kept" or self.rejected is None:
            return cache
        chosen, draft, rows, kept = self.rejected
        next_ids = [*draft, chosen[-1]][kept + 1 :]
        if not next_ids:
            return cache
        hidden = np.concatenate([self.oracle.head_input(row) for row in rows[kept + 1 :]])
        return self.oracle.head(next_ids, hidden, cache, self.length).cache


def best(logits: Array) -> int:
    """The id of the greatest logit, the lowest one of a tie."""
    return int(np.argmax(logits))


def matching(draft: Sequence[int], chosen: Sequence[int]) -> int:
    """How many leading drafts are the target's own choice."""
    kept = 0
    while kept < len(draft) and draft[kept] == chosen[kept]:
        kept += 1
    return kept


def cut(block: list[int], eos: Collection[int]) -> list[int]:
    """The block up to and with its first end id."""
    for i, token in enumerate(block):
        if token in eos:
            return block[: i + 1]
    return block
