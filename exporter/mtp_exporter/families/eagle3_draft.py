"""EAGLE-3 drafts: one layer whose attention takes embedding and hidden state side by side, over three taps.

The taps are residual streams of the target and go through one projection; chained steps take the head's own
residual stream without it. The vocabulary head may cover a part of the vocabulary: `d2t` says how far above
its row the id is.
"""

from __future__ import annotations

from typing import Any

from mtp_engines.contracts.model import AttentionSpec, DenseMlpSpec, ModelSpec, MtpSpec
from mtp_engines.errors import CheckpointError
from mtp_exporter.families.dense import dense_layer, full_attention_only
from mtp_exporter.families.description import Draft, Need
from mtp_exporter.families.drafts import draft_vocabulary, has_any, prefix_of
from mtp_exporter.families.needs import attention_needs, dense_mlp_needs
from mtp_exporter.reading.checkpoint import Checkpoint
from mtp_exporter.reading.config import Config

_UNSUPPORTED = ("norm_before_fc", "next_layer_regular", "fc_norm", "norm_output", "eh_proj_before_attn", "use_aux_norm")


def recognises(checkpoint: Checkpoint) -> bool:
    """By its tensors: a middle layer, or a layer 0 with a norm for the hidden state."""
    prefix = prefix_of(checkpoint)
    return has_any(checkpoint, f"{prefix}midlayer.") or checkpoint.names(f"{prefix}layers.0.hidden_norm.weight")


def describe_draft(checkpoint: Checkpoint, target: ModelSpec) -> Draft:
    """Describe an EAGLE-3 draft of a target.

    Raises:
        CheckpointError: it was made for another width or vocabulary, or has a variant that is not built.
    """
    config = Config(checkpoint.config, str(checkpoint.directory / "config.json"))
    prefix = prefix_of(checkpoint)
    key = f"{prefix}midlayer." if has_any(checkpoint, f"{prefix}midlayer.") else f"{prefix}layers.0."
    eagle = config.text.get("eagle_config")
    eagle = eagle if isinstance(eagle, dict) else {}
    _refuse_variants(config, eagle)
    hidden = config.positive("hidden_size")
    taps = _taps(config, eagle, len(target.layers))
    trained_on = config.text.get("target_hidden_size") or hidden
    if trained_on != target.hidden_size:
        raise CheckpointError(
            f"{checkpoint.directory} drafts for targets of hidden size {trained_on}, the target has "
            f"{target.hidden_size}. Name the draft that was trained for this target."
        )
    layer, notes = dense_layer(config, qk_norm=False, bias=checkpoint.names(f"{key}self_attn.q_proj.bias"))
    vocabulary = draft_vocabulary(checkpoint, config, target, prefix)
    mtp = MtpSpec(
        (layer,),
        hidden,
        kind="eagle3",
        join="attention",
        residual_normed=bool(_either(config, eagle, "norm_before_residual")),
        taps=taps,
        tap_projection=True,
        chain="output" if _either(config, eagle, "return_hidden_post_norm") else "residual",
        norm_epsilon=config.number("rms_norm_eps", 1e-6),
        **vocabulary.fields,
    )
    assert isinstance(layer.mixer, AttentionSpec) and isinstance(layer.mlp, DenseMlpSpec)
    wide = mtp.tap_width(target.hidden_size)
    needs = [
        Need("mtp.tap_projection", f"{prefix}fc.weight", (hidden, wide)),
        Need("mtp.embedding_norm", f"{key}input_layernorm.weight", (hidden,)),
        Need("mtp.hidden_norm", f"{key}hidden_norm.weight", (hidden,)),
        Need("mtp.layer.post_norm", f"{key}post_attention_layernorm.weight", (hidden,)),
        Need("mtp.output_norm", f"{prefix}norm.weight", (hidden,)),
        *attention_needs("mtp.layer.mixer.", f"{key}self_attn.", layer.mixer, hidden, input_width=2 * hidden),
        *dense_mlp_needs("mtp.layer.mlp.", f"{key}mlp.", layer.mlp.intermediate_size, hidden),
    ]
    return Draft(mtp, (*needs, *vocabulary.needs), vocabulary.ignored, notes)


def _either(config: Config, eagle: dict[str, Any], name: str) -> Any:
    """A field of eagle_config or of the level above.

    Raises:
        CheckpointError: the two disagree.
    """
    inner, outer = eagle.get(name), config.text.get(name)
    if inner is not None and outer is not None and inner != outer:
        raise CheckpointError(
            f"{config.path} has {name} = {outer!r} and eagle_config.{name} = {inner!r}; the two must agree. Mend the "
            "file."
        )
    return outer if inner is None else inner


def _refuse_variants(config: Config, eagle: dict[str, Any]) -> None:
    full_attention_only(config)
    config.fixed("num_hidden_layers", 1)
    if _either(config, eagle, "use_aux_hidden_state") is False:
        raise CheckpointError(
            f"{config.path} has use_aux_hidden_state = False, a draft over one hidden state; this release builds "
            "EAGLE-3 over several taps. Use a draft without it."
        )
    for name in _UNSUPPORTED:
        if _either(config, eagle, name):
            raise CheckpointError(
                f"{config.path} has {name} = {_either(config, eagle, name)!r}, a variant of EAGLE-3 that this release "
                "does not build. Use a draft without it."
            )


def _taps(config: Config, eagle: dict[str, Any], layers: int) -> tuple[int, ...]:
    """Residual streams by the layer that they enter.

    Inside eagle_config id k is what layer k puts out (SGLang, SpecForge), one level above it is what layer k
    takes in (vLLM, speculators); without either it is layers 2, n / 2 and n - 3.

    Raises:
        CheckpointError: an id is no layer of the target, or the two places disagree.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    found = []
    for given, shift in ((eagle.get(name), 1), (config.text.get(name), 0)):
        if given is None:
            continue
        if not isinstance(given, list) or not given or not all(_is_layer(i, shift, layers) for i in given):
            raise CheckpointError(
                f"{config.path} has {name} = {given!r}, expected layers 0 to {layers - 1} of the target. Name the "
                "draft that was trained for this target."
            )
        found.append(tuple(i + shift for i in given))
    if len(set(found)) > 1:
        raise CheckpointError(
            f"{config.path} names the taps twice, as inputs of layers {found[1]} and as outputs before layers "
            f"{found[0]}; the two must agree. Mend the file."
        )
    if found:
        return found[0]
    if layers < 4:
        raise CheckpointError(
            f"{config.path} names no {name}, and the usual ones do not exist in a target of {layers} layers. Name the "
            "draft that was trained for this target."
        )
    return (2, layers // 2, layers - 3)


def _is_layer(index: object, shift: int, layers: int) -> bool:
    return isinstance(index, int) and not isinstance(index, bool) and 0 <= index < layers + (1 - shift)
