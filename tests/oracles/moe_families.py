"""A float64 model of Qwen3-Next, Qwen3.5 MoE, DeepSeek-V3 and GLM-4.5 checkpoints.

Written from the families' equations in NumPy only. `open_oracle` reads a directory; what it returns
decodes, drafts and speculates as the dense oracle does, and can be broken on purpose so that a test
can show that it would notice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tests.oracles.float64 import Forward, HeadForward, Oracle, Speculation
from tests.oracles.float64_checkpoint import Array, TextConfig, subset
from tests.oracles.float64_layers import FullState, LayerRun, LayerState, LinearState
from tests.oracles.moe_families_checkpoint import FamilyCheckpoint, Head, load_family_checkpoint
from tests.oracles.moe_families_layers import delta_net_weights, first_state, norm, run_family_layer
from tests.oracles.moe_families_routing import Route, route

__all__ = [
    "FAULTS",
    "FamilyOracle",
    "Forward",
    "FullState",
    "HeadForward",
    "LinearState",
    "Route",
    "Speculation",
    "open_oracle",
]

_HEAD_FAULTS = {
    "swap_concat": "the head projects [hidden, embedding]",
    "pre_norm_hidden": "the head gets the residual stream before the target's final norm",
    "unshifted_ids": "row p of the head pairs t_p, not t_{p+1}, with h_p",
    "hidden_row_off_by_one": "row p of the head gets h_{p-1}",
    "position_zero_masked": "the head zeroes the embedding at position 0",
    "mtp_rejected_rows_kept": "the head's cache keeps the rows of rejected drafts",
    "chained_rows_kept": "the head's cache keeps the rows made from its own output; needs K >= 2",
    "pre_norm_chain": "the head's next row gets its residual stream before its last norm; needs K >= 2",
}
_EXPERT_FAULTS = {
    "no_topk_norm": "the chosen experts' weights are not made to sum to 1",
    "no_shared_expert": "the shared expert adds nothing",
    "up_gate_swapped": "the routed experts' gate and up rows are taken for each other",
}
_QWEN_FAULTS = {
    **_HEAD_FAULTS,
    **_EXPERT_FAULTS,
    "plain_gain": "every zero-centred norm multiplies by w, not by 1 + w",
    "shared_gate_ungated": "the shared expert is not multiplied by its gate",
    "sigmoid_scores": "scores are sigmoids",
    "flat_q_gate": "q_proj is split into two halves, not per head",
    "linear_norm_zero_centred": "linear_attn.norm multiplies by 1 + w",
    "repeat_not_interleave": "key heads are tiled over the value heads",
    "conv_state_post_silu": "the conv state keeps convolved rows; seen only across two runs",
    "read_before_update": "the delta net reads the state before the row's own update",
    "no_decay": "the delta net never forgets",
    "state_not_rolled_back": "recurrent and conv states stay where the whole verify left them",
    "rope_full": "RoPE rotates the whole head",
    "unscaled_scores": "attention scores are not scaled by head_dim ** -0.5",
}
_PLAIN_FAULTS = {
    **_HEAD_FAULTS,
    **_EXPERT_FAULTS,
    "one_plus_gain": "every norm multiplies by 1 + w, not by w",
    "no_correction_bias": "experts are chosen by their scores alone",
    "bias_in_weights": "the correction bias is part of the weights",
    "softmax_scores": "scores are a softmax",
    "no_groups": "experts are chosen from all groups; seen where not all groups are chosen",
    "group_by_best": "a group is as good as its best expert, not its best two; as above",
    "groups_ruled_out_by_zero": "experts outside the chosen groups get 0, not minus infinity; as above",
    "no_scaling": "weights are not multiplied by routed_scaling_factor; seen where it is not 1",
    "shared_expert_scaled": "the shared expert is multiplied by routed_scaling_factor; as above",
    "own_head_ignored": "the head embeds and scores with the trunk's tensors; seen where its own differ",
}
FAULTS: dict[str, dict[str, str]] = {
    "qwen3_next": {
        **_QWEN_FAULTS,
        "qkvz_flat": "in_proj_qkvz is read as four blocks, not by key head",
        "ba_flat": "in_proj_ba is read as two blocks, not by key head",
        "softmax_after_topk": "softmax over the chosen only; seen where norm_topk_prob is false",
    },
    "qwen3_5_moe": _QWEN_FAULTS,
    "deepseek_v3": {
        **_PLAIN_FAULTS,
        "mla_split": "kv_b_proj is read as [value, key] within every head",
        "kv_b_flat": "kv_b_proj is read as all keys, then all values",
        "rotated_part_first": "a query head is read as [rotated, not rotated]",
        "rope_half_split": "pairs (i, i + half) are rotated; seen where rope_interleave is not false",
        "latent_norm_eps": "the latent norms use rms_norm_eps; seen where that is not 1e-6",
        "scale_of_nope": "scores are scaled by the width without the rotated part",
        "yarn_ignored": "frequencies are not stretched; seen with YaRN",
        "yarn_factor_ignored": "cosine and sine have no factor; seen where mscale and mscale_all_dim differ",
        "mscale_ignored": "the score scale has no mscale; seen with YaRN",
        "mscale_once": "the score scale has mscale once, not squared; seen with YaRN",
    },
    "glm4_moe": {
        **_PLAIN_FAULTS,
        "rope_full": "RoPE rotates the whole head",
        "rope_interleaved": "pairs (2i, 2i + 1) are rotated",
        "no_attention_bias": "query, key and value have no bias; seen where they have",
        "no_qk_norm": "query and key are not normed; seen where they are",
        "heads_tiled": "query head i reads key head i modulo their number",
        "unscaled_scores": "attention scores are not scaled by head_dim ** -0.5",
    },
}


def open_oracle(directory: str | Path, broken: str | None = None) -> FamilyOracle:
    """The float64 model of a checkpoint directory, right or with one fault of its family."""
    return FamilyOracle(load_family_checkpoint(directory), broken)


class FamilyOracle(Oracle):
    """The float64 model of one checkpoint: forward, extend, head, greedy, speculate and the rest.

    States and the head's cache are the dense oracle's; for latent attention see `first_state`.
    """

    def __init__(self, checkpoint: FamilyCheckpoint, broken: str | None = None) -> None:
        config = checkpoint.config
        known = FAULTS[config.family]
        if broken is not None and broken not in known:
            raise ValueError(f"Unknown fault {broken!r} of {config.family}; the known ones are {sorted(known)}.")
        self.checkpoint, self.config, self.broken = checkpoint, config, broken
        self._layers = [subset(checkpoint.target, f"layers.{i}.") for i in range(len(config.layer_types))]
        for layer, sparse in zip(self._layers, config.sparse, strict=True):
            if sparse != ("mlp.gate.weight" in layer):
                raise ValueError("The configuration and the tensors disagree on which layers are sparse.")
        if isinstance(config.attention, TextConfig):
            self._layers = [delta_net_weights(layer, config.attention, broken) for layer in self._layers]

    def initial_states(self) -> list[LayerState]:
        """The state of every layer before the first row."""
        return [first_state(kind, self.config) for kind in self.config.layer_types]

    def extend(self, ids: Sequence[int], states: list[LayerState], start: int) -> Forward:
        """The target over `ids`, the first at position `start`, after what `states` has seen."""
        if len(ids) == 0:
            raise ValueError("There are no rows to run: ids is empty.")
        embeddings = self.checkpoint.target["embed_tokens.weight"][np.asarray(ids)]
        runs = list(self._runs(embeddings, states, start))
        rows = runs[-1].second_residual
        hidden = self._norm(rows, self.checkpoint.target["norm.weight"])
        layers, after = [run.second_residual for run in runs], [run.state for run in runs]
        return Forward(embeddings, layers, rows, hidden, hidden @ self.checkpoint.lm_head.T, after)

    def head(
        self, next_ids: Sequence[int], hidden: Array, cache: FullState | None = None, start: int = 0
    ) -> HeadForward:
        """The head over rows (t_{p+1}, h_p), p counted from `start`; RoPE uses position p."""
        head, target = self._head(), self.checkpoint.target
        own = self.broken != "own_head_ignored"
        table = head.embedding if own else target["embed_tokens.weight"]
        embedding = table[np.asarray(next_ids)]
        if self.broken == "position_zero_masked" and start == 0:
            embedding = np.concatenate([np.zeros_like(embedding[:1]), embedding[1:]])
        embedding_norm = self._norm(embedding, head.embedding_gain)
        hidden_norm = self._norm(hidden, head.hidden_gain)
        # Embedding first: both halves are equally wide, so the swap runs and drafts noise.
        halves = [embedding_norm, hidden_norm]
        concatenation = np.concatenate(halves[::-1] if self.broken == "swap_concat" else halves, axis=1)
        projection = concatenation @ head.projection.T
        state = first_state("full_attention", self.config) if cache is None else cache
        run = run_family_layer(projection, head.layer, self.config, state, start, self.broken)
        output = self._norm(run.second_residual, head.output_gain)
        stages = {
            "embedding_norm": embedding_norm,
            "hidden_norm": hidden_norm,
            "concatenation": concatenation,
            "projection": projection,
            **{name: value for name, value in vars(run).items() if name != "state"},
            "output": output,
        }
        logits = output @ (head.lm_head if own else self.checkpoint.lm_head).T
        out = run.second_residual if self.broken == "pre_norm_chain" else output
        _, key, value = run.state
        return HeadForward(out, logits, key, value, stages)

    def routes(self, ids: Sequence[int]) -> list[Route]:
        """Where the tokens of a text go in every sparse layer: the trunk's, then the head's.

        The head, if there is one, sees the text's T - 1 rows.
        """
        states = self.initial_states()
        embeddings = self.checkpoint.target["embed_tokens.weight"][np.asarray(ids)]
        found = [
            self._route(run.mlp_input, layer)
            for run, layer in zip(self._runs(embeddings, states, 0), self._layers, strict=True)
            if "mlp.gate.weight" in layer
        ]
        if self.checkpoint.head is not None and len(ids) > 1:
            found.append(self._route(self.head_over(ids).stages["mlp_input"], self.checkpoint.head.layer))
        return found

    def routing_margin(self, ids: Sequence[int]) -> float:
        """The least distance, over a text and all layers, between a choice and the next best.

        Far below the precision of another implementation's scores, that one may choose otherwise.
        """
        return min((float(found.margin.min()) for found in self.routes(ids)), default=np.inf)

    def _head(self) -> Head:
        if self.checkpoint.head is None:
            raise ValueError("The checkpoint has no tensors of a head, so there is no head to run.")
        return self.checkpoint.head

    def _route(self, rows: Array, layer: dict[str, Array]) -> Route:
        return route(rows, subset(layer, "mlp."), self.config.routing, self.broken)

    def _norm(self, rows: Array, weight: Array) -> Array:
        return norm(rows, weight, self.config, self.broken)

    def _runs(self, rows: Array, states: list[LayerState], start: int) -> Iterator[LayerRun]:
        for layer, state in zip(self._layers, states, strict=True):
            run = run_family_layer(rows, layer, self.config, state, start, self.broken)
            rows = run.second_residual
            yield run
