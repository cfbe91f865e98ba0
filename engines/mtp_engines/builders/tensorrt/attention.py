"""What the parser of TensorRT-RTX 1.7.1 makes of a causal attention over caches with lengths, put right."""

from __future__ import annotations

from typing import Any

from mtp_engines.errors import BuildError
from mtp_engines.lowering.attention import KEY_VALUE_LENGTHS


def heed_lengths(trt: Any, network: Any) -> None:
    """Give every attention of a parsed network the lengths of its caches, and its rows their place at the end of them.

    The parser reads `is_causal` with `nonpad_kv_seqlen` as a mask aligned at the upper left and drops the lengths, and
    multiplies the whole cache by a scale, even if that is one. A version that does none of it lets this go.

    Args:
        trt: the module of the library.
        network: as parsed from a graph of `attend_by_length`; it is changed. Without attentions it stays as it is.

    Raises:
        BuildError: it has no lengths, or an attention over something else than a cache.
    """
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    boundaries = [layer for layer in layers if layer.type == trt.LayerType.ATTENTION_INPUT]
    if not boundaries:
        return
    sources = {layer.get_output(index).name: layer for layer in layers for index in range(layer.num_outputs)}
    if KEY_VALUE_LENGTHS not in sources:
        raise BuildError(f"the graph has an attention and no lengths of its caches under the name {KEY_VALUE_LENGTHS}")
    counted = sources[KEY_VALUE_LENGTHS].get_output(0)
    lengths = network.add_cast(counted, trt.int32).get_output(0)
    for layer in boundaries:
        # The bindings know a layer by its base class until they are told.
        layer.__class__ = trt.IAttentionInputLayer
        attention = layer.attention
        attention.set_input(1, _cache(trt, sources, attention.get_input(1)))
        attention.causal_kind = trt.CausalMaskKind.LOWER_RIGHT
        attention.key_value_lengths = lengths
        # No fused kernel takes float32 or the width of latent attention.
        attention.decomposable = True


def _cache(trt: Any, sources: dict[str, Any], key: Any) -> Any:
    """The cache that a key is, without the scale."""
    layer = sources[key.name]
    if layer.type == trt.LayerType.KV_CACHE_UPDATE:
        return key
    inputs = [layer.get_input(index) for index in range(layer.num_inputs)]
    for tensor in inputs:
        if tensor.name in sources and sources[tensor.name].type == trt.LayerType.KV_CACHE_UPDATE:
            return tensor
    raise BuildError(f"the attention over {key.name} has another key than a cache")
