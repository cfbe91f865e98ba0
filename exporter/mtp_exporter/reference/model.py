"""The stages of a whole forward: residual streams of the target, named values of the draft head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mtp_engines.contracts import names
from mtp_engines.contracts.model import DenseMlpSpec, LayerSpec, Mlp, ModelSpec, MtpSpec
from mtp_exporter.graphs import head_role
from mtp_exporter.reading.source import Source
from mtp_exporter.reference.mixers import mix, rms_norm
from mtp_exporter.reference.mlps import Ids, dense_mlp, mixture_of_experts
from mtp_plugins.arrays import Array


@dataclass(frozen=True)
class Stage:
    """One value of the forward, float[rows, width], under the name that it has in the graph."""

    name: str
    value: Array


def layer_output(spec: ModelSpec, source: Source, index: int, x: Array, preferred: Ids | None = None) -> Array:
    """The residual stream after a layer of the target, from float[rows, hidden_size] before it.

    Rows are positions 0 .. rows - 1 of one sequence; `preferred` experts win near ties.
    """
    layer, weights = spec.layers[index], source.below(f"layers.{index}.")
    normed = rms_norm(x, weights("input_norm"), spec.norm_epsilon) if layer.input_norm else x
    x = x + mix(layer.mixer, weights.below("mixer."), normed, spec.norm_epsilon)
    normed = rms_norm(x, weights("post_norm"), spec.norm_epsilon)
    return np.asarray(x + mlp(layer.mlp, weights.below("mlp."), normed, preferred))


def final_hidden(spec: ModelSpec, source: Source, x: Array) -> Array:
    """The hidden state that the vocabulary head consumes, from the residual stream after the last layer."""
    return rms_norm(x, source("final_norm"), spec.norm_epsilon)


def head_stages(
    spec: ModelSpec, source: Source, depth: int, embeddings: Array, hidden: Array, preferred: Ids | None = None
) -> Iterator[Stage]:
    """One depth of the draft head over a whole sequence, from an empty cache.

    Args:
        embeddings: float[rows, width]; row p is the token after position p (depth j: the one j further on).
        hidden: float[rows, tap_width], the target's hidden states, or the output of the depth before.
        preferred: experts that win near ties.

    Yields:
        The stages that the head's layout has, in the order of `names.HEAD_STAGES`.
    """
    mtp = spec.mtp
    assert mtp is not None
    epsilon = mtp.norm_epsilon or spec.norm_epsilon
    weights = source.below(head_role(depth))
    if mtp.tap_projection:
        hidden = np.asarray(hidden @ weights("tap_projection").T)
        yield Stage(names.stage("projection"), hidden)
    normed = hidden
    if mtp.input_norms:
        embeddings = rms_norm(embeddings, weights("embedding_norm"), epsilon)
        normed = rms_norm(hidden, weights("hidden_norm"), epsilon)
        yield Stage(names.stage("embedding_norm"), embeddings)
        yield Stage(names.stage("hidden_norm"), normed)
    pair = [embeddings, normed] if mtp.concat == "embedding_first" else [normed, embeddings]
    joined: Array = np.concatenate(pair, axis=-1)
    yield Stage(names.stage("concatenation"), joined)
    if mtp.join == "projection":
        x = joined @ weights("projection").T + (weights("projection_bias") if mtp.join_bias else 0)
        yield Stage(names.stage("projection"), x)
        yield from _layer_stages(mtp, mtp.layers[depth], weights, epsilon, x, None, preferred)
    else:
        x = normed if mtp.residual_normed else hidden
        yield from _layer_stages(mtp, mtp.layers[depth], weights, epsilon, x, joined, preferred)


def _layer_stages(
    mtp: MtpSpec,
    layer: LayerSpec,
    weights: Source,
    epsilon: float,
    x: Array,
    attention_input: Array | None,
    preferred: Ids | None,
) -> Iterator[Stage]:
    inner = weights.below("layer.")
    if attention_input is None:
        attention_input = x
        if layer.input_norm:
            attention_input = rms_norm(x, inner("input_norm"), epsilon)
            yield Stage(names.stage("attention_input"), attention_input)
    mixed = mix(layer.mixer, inner.below("mixer."), attention_input, epsilon)
    yield Stage(names.stage("attention"), mixed)
    x = x + mixed
    yield Stage(names.stage("first_residual"), x)
    normed = rms_norm(x, inner("post_norm"), epsilon)
    yield Stage(names.stage("mlp_input"), normed)
    added = mlp(layer.mlp, inner.below("mlp."), normed, preferred)
    yield Stage(names.stage("mlp"), added)
    x = np.asarray(x + added)
    yield Stage(names.stage("second_residual"), x)
    if mtp.output_norm:
        yield Stage(names.stage("output"), rms_norm(x, weights("output_norm"), epsilon))


def mlp(spec: Mlp, weights: Source, x: Array, preferred: Ids | None) -> Array:
    """Gated MLP or mixture of experts over normed rows."""
    return dense_mlp(weights, x) if isinstance(spec, DenseMlpSpec) else mixture_of_experts(spec, weights, x, preferred)
