"""A float64 loop over MiMo, EAGLE-1 and EAGLE-3 drafts and plain dense targets.

Written from the families' equations in NumPy only. It shares no code with the product and has the
methods of the Qwen3.5 oracle, of which it is one. Speculation keeps no cache: every draft runs
target and head again over the whole text. It can be broken on purpose.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from tests.oracles.dense_checkpoint import DenseCheckpoint, DenseConfig, Head, load_dense_checkpoint
from tests.oracles.dense_layers import HeadRun, norm, run_dense_layer, run_eagle, run_eagle3, run_mimo
from tests.oracles.float64 import Forward, HeadForward, Oracle, Speculation, best, cut, matching
from tests.oracles.float64_checkpoint import Array, subset
from tests.oracles.float64_layers import FullState, LayerState

__all__ = [
    "FAULTS",
    "FAULT_KINDS",
    "DenseCheckpoint",
    "DenseOracle",
    "Forward",
    "HeadForward",
    "Speculation",
    "load_dense_checkpoint",
    "open_dense_oracle",
]

# One deliberate fault for each convention that is easy to get wrong.
FAULTS = {
    "swap_concat": "the two halves that the head joins are exchanged",
    "post_norm_hidden": "the head gets the rows after the target's final norm",
    "pre_norm_hidden": "the head gets the residual stream before the target's final norm",
    "unshifted_ids": "row p of the head pairs t_p, not t_{p+1}, with its hidden row",
    "hidden_row_off_by_one": "row p of the head gets the hidden row of p - 1",
    "chain_pre_norm": "a MiMo chain, or the next depth, takes rows before final_layernorm",
    "chain_post_norm": "an EAGLE-3 chain takes rows after the draft's norm",
    "chain_position_kept": "chained rows keep the position of the row before them",
    "depth_reused": "depth 0 does the work of the later depths",
    "position_zero_masked": "the head zeroes the embedding at position 0",
    "d2t_as_index": "an entry of d2t is the target id, not its distance from the row",
    "d2t_ignored": "a row of the draft's output head is the target id",
    "aux_layers_shifted": "EAGLE-3 reads the outputs of its layers, not their inputs",
    "fc_on_chain": "EAGLE-3 sends chained rows through fc too; the draft has the target's width",
    "residual_normed": "EAGLE-3 starts its residual stream at the other one of row and normed row",
    "input_norm_added": "EAGLE-1 norms what its attention reads",
    "final_norm_added": "EAGLE-1 applies the target's final norm before the output head",
    "one_plus_gain": "every norm multiplies by 1 + w, not by w",
    "no_bias": "biases are left out; the checkpoint has some",
    "query_norms_ignored": "Qwen3's norms of query and key are left out",
    "rope_none": "nothing is rotated",
    "rope_interleaved": "RoPE pairs neighbours, not halves",
    "rope_partial": "RoPE rotates a quarter of each head",
    "rope_scaling_ignored": "RoPE is not scaled; the configuration asks for it",
    "unscaled_scores": "attention scores are not scaled by head_dim ** -0.5",
}
_DRAFTED = frozenset({"mimo", "eagle", "eagle3"})
_NARROWER = {
    "swap_concat": _DRAFTED,
    "post_norm_hidden": {"mimo", "eagle"},
    "pre_norm_hidden": {"mimo", "eagle"},
    "unshifted_ids": _DRAFTED,
    "hidden_row_off_by_one": _DRAFTED,
    "chain_pre_norm": {"mimo"},
    "chain_post_norm": {"eagle3"},
    "chain_position_kept": _DRAFTED,
    "depth_reused": {"mimo"},
    "position_zero_masked": _DRAFTED,
    "d2t_as_index": {"eagle3"},
    "d2t_ignored": {"eagle3"},
    "aux_layers_shifted": {"eagle3"},
    "fc_on_chain": {"eagle3"},
    "residual_normed": {"eagle3"},
    "input_norm_added": {"eagle"},
    "final_norm_added": {"eagle"},
}
# Where a fault means anything; elsewhere it would be a control that cannot fail, and is refused.
FAULT_KINDS = {name: frozenset(_NARROWER.get(name, _DRAFTED | {"plain"})) for name in FAULTS}
# The target's rows that the published code of a family feeds to its head.
DEFAULT_TAPS = {"mimo": "pre_norm", "eagle": "post_norm"}


def open_dense_oracle(
    directory: str | Path,
    draft: str | Path | None = None,
    broken: str | None = None,
    hidden_tap: str | None = None,
) -> DenseOracle:
    """The oracle of a checkpoint directory, with the EAGLE draft at `draft`.

    hidden_tap: "pre_norm" or "post_norm", the target's rows for a MiMo or EAGLE-1 head; None is
        pre_norm for MiMo and post_norm for EAGLE-1.
    """
    return DenseOracle(load_dense_checkpoint(directory, draft), broken, hidden_tap)


class DenseOracle(Oracle):
    """The float64 model of one dense checkpoint, right or with one named fault."""

    checkpoint: DenseCheckpoint
    config: DenseConfig

    def __init__(self, checkpoint: DenseCheckpoint, broken: str | None = None, hidden_tap: str | None = None) -> None:
        self.checkpoint, self.config, self.broken = checkpoint, checkpoint.config, broken
        self.kind = checkpoint.head.kind if checkpoint.head else "plain"
        self.hidden_tap = DEFAULT_TAPS.get(self.kind) if hidden_tap is None else hidden_tap
        self._layers = [subset(checkpoint.target, f"layers.{i}.") for i in range(self.config.num_hidden_layers)]
        self._refuse_meaningless(hidden_tap)

    @property
    def depths(self) -> int:
        """How many trained depths the head has; 0 without a head."""
        return len(self.checkpoint.head.depths) if self.checkpoint.head else 0

    def initial_states(self) -> list[LayerState]:
        """The state of every layer before the first row."""
        return [_empty(self.config) for _ in self._layers]

    def extend(self, ids: Sequence[int], states: list[LayerState], start: int) -> Forward:
        """The target over `ids`, the first at position `start`, after what `states` has seen."""
        if len(ids) == 0:
            raise ValueError("There are no rows to run: ids is empty.")
        embeddings = self.checkpoint.target["embed_tokens.weight"][np.asarray(ids)]
        rows, layers, after = embeddings, [], []
        for weights, state in zip(self._layers, states, strict=True):
            run = run_dense_layer(rows, weights, self.config, state, start, self.broken)
            rows = run.second_residual
            layers.append(rows)
            after.append(run.state)
        hidden = norm(rows, self.checkpoint.target["norm.weight"], self.config.rms_norm_eps, self.broken)
        return Forward(embeddings, layers, rows, hidden, hidden @ self.checkpoint.lm_head.T, after)

    def head(
        self,
        next_ids: Sequence[int],
        hidden: Array,
        cache: FullState | None = None,
        start: int = 0,
        *,
        depth: int = 0,
    ) -> HeadForward:
        """The head over rows (t_{p+1}, h_p), p counted from `start`; RoPE uses position p.

        hidden: rows of `head_input`, or `out` of an earlier run for chained rows. EAGLE-3 tells
            the two apart by their width.
        depth: which depth of a MiMo head; depth k pairs t_{p+k+1} with row p of depth k - 1.

        `out` of the result is what a chained row or the next depth takes: MiMo after
        final_layernorm, EAGLE-1 and EAGLE-3 the residual stream. The stage "output" is what the
        output head reads, and EAGLE-3's logits are over the rows of its own head.
        """
        head = self._head()
        embedding = head.embedding[np.asarray(next_ids)]
        if self.broken == "position_zero_masked" and start == 0:
            embedding = np.concatenate([np.zeros_like(embedding[:1]), embedding[1:]])
        state = _empty(head.config) if cache is None else cache
        run = self._run(head, depth, embedding, hidden, state, start)
        return HeadForward(run.chain, run.output @ head.lm_head.T, run.state.key, run.state.value, run.stages)

    def head_input(self, forward: Forward) -> Array:
        """The target's rows that the head consumes; for EAGLE-3 its taps side by side."""
        if self.kind == "eagle3":
            inputs = [forward.embeddings, *forward.layers]
            shift = self.broken == "aux_layers_shifted"
            return np.concatenate([inputs[i + shift] for i in self._head().taps], axis=1)
        tap = self.broken.removesuffix("_hidden") if self.broken in _TAP_FAULTS else self.hidden_tap
        return forward.pre_norm if tap == "pre_norm" else forward.hidden

    def token(self, logits: Array) -> int:
        """The target id that a row of the head's logits proposes."""
        row, offsets = best(logits), self._head().token_offsets
        if offsets is None or self.broken == "d2t_ignored":
            return row
        return int(offsets[row]) if self.broken == "d2t_as_index" else row + int(offsets[row])

    def depths_over(self, ids: Sequence[int], drafts: Sequence[int] = ()) -> list[HeadForward]:
        """Every depth of a MiMo head over all T - 1 rows of a text, fed by the depth before it.

        Depth k needs k more tokens than the text has; `drafts` are those, and a depth without
        enough of them runs over fewer rows.
        """
        tokens, late = [*ids, *drafts], self.broken == "unshifted_ids"
        rows = self.head_input(self.forward(ids))[: len(ids) - 1]
        runs: list[HeadForward] = []
        for k in range(self.depths):
            next_ids, hidden = self.pair(list(ids), rows) if k == 0 else (tokens[k + 1 - late :], runs[-1].out)
            count = min(len(next_ids), len(hidden))
            if count < 1:
                break
            runs.append(self.head(next_ids[:count], hidden[:count], depth=k))
        return runs

    def speculate(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        draft_tokens: int,
        eos: Collection[int] = (),
    ) -> Speculation:
        """Greedy decoding with drafts of the head, verified by the target.

        Counted as in the Qwen3.5 oracle. A head of several depths drafts at most one token each.
        """
        result = Speculation([], [], [], [])
        if max_new_tokens < 1:
            return result
        result.ids.append(best(self.forward(prompt_ids).logits[-1]))
        while len(result.ids) < max_new_tokens and result.ids[-1] not in eos:
            count = min(draft_tokens, max_new_tokens - len(result.ids) - 1)
            known = [*prompt_ids, *result.ids]
            draft = self.draft(known, count) if count else []
            chosen = [best(row) for row in self.forward([*known, *draft]).logits[len(known) - 1 :]]
            kept = matching(draft, chosen)
            # Where a draft was right it is the target's own choice, so `chosen` holds it too.
            delivered = cut(chosen[: kept + 1], eos)
            result.ids.extend(delivered)
            result.drafted.append(count)
            result.accepted.append(min(kept, len(delivered)))
            result.drafts.append(draft)
        return result

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that the head proposes after `tokens`, run from scratch."""
        self._head()
        if self.depths > 1:
            return self._draft_by_depths(tokens, count)
        next_ids, rows = self.pair(list(tokens), self.head_input(self.forward(tokens[:-1])))
        run = self.head(next_ids, rows)
        drafts = [self.token(run.logits[-1])]
        for j in range(1, count):
            position = len(next_ids) - 1 + (0 if self.broken == "chain_position_kept" else j)
            run = self.head(drafts[-1:], run.out[-1:], run.cache, position)
            drafts.append(self.token(run.logits[-1]))
        return drafts

    def _draft_by_depths(self, tokens: Sequence[int], count: int) -> list[int]:
        if count > self.depths:
            raise ValueError(f"A head of {self.depths} depths cannot draft {count} tokens.")
        drafts: list[int] = []
        for k in range(count):
            run = self.depths_over(tokens, drafts)[k]
            drafts.append(self.token(run.logits[-1]))
        return drafts

    def _run(self, head: Head, depth: int, embedding: Array, hidden: Array, state: FullState, start: int) -> HeadRun:
        if self.kind == "mimo":
            depth = 0 if self.broken == "depth_reused" else depth
            return run_mimo(head, depth, embedding, hidden, state, start, self.broken)
        if self.kind == "eagle":
            final_norm = self.checkpoint.target["norm.weight"]
            return run_eagle(head, embedding, hidden, state, start, self.broken, final_norm)
        return run_eagle3(head, embedding, hidden, state, start, self.broken)

    def _head(self) -> Head:
        if self.checkpoint.head is None:
            raise ValueError("The checkpoint has no head and no draft was given, so there is none to run.")
        return self.checkpoint.head

    def _refuse_meaningless(self, hidden_tap: str | None) -> None:
        """Refuse a fault or a tap that could not change anything."""
        if hidden_tap is not None and (self.kind not in DEFAULT_TAPS or hidden_tap not in ("pre_norm", "post_norm")):
            raise ValueError(f"hidden_tap {hidden_tap!r} means nothing for {self.kind}.")
        if self.broken is None:
            return
        if self.broken not in FAULTS:
            raise ValueError(f"Unknown fault {self.broken!r}; the known ones are {sorted(FAULTS)}.")
        if self.kind not in FAULT_KINDS[self.broken] or not self._has_subject(self.broken):
            raise ValueError(f"The fault {self.broken!r} changes nothing for this {self.kind} checkpoint.")

    def _has_subject(self, fault: str) -> bool:
        """Whether the checkpoint has what the fault is about."""
        head = self.checkpoint.head
        names = [*self.checkpoint.target, *(name for depth in (head.depths if head else ()) for name in depth)]
        ropes = [config.rope for config in (self.config, head.config if head else self.config)]
        subjects = {
            "no_bias": any(name.endswith(".bias") for name in names),
            "query_norms_ignored": any("q_norm" in name for name in names),
            "rope_scaling_ignored": any(rope.frequencies is not rope.unscaled for rope in ropes),
            "depth_reused": self.depths > 1,
            "d2t_as_index": head is not None and head.token_offsets is not None,
            "d2t_ignored": head is not None and head.token_offsets is not None,
            "fc_on_chain": head is not None and head.config.hidden_size == self.config.hidden_size,
            f"{self.hidden_tap}_hidden": False,
        }
        return subjects.get(fault, True)


_TAP_FAULTS = ("pre_norm_hidden", "post_norm_hidden")


def _empty(config: DenseConfig) -> FullState:
    rows = np.zeros((0, config.num_key_value_heads, config.head_dim))
    return FullState("full", rows, rows)
