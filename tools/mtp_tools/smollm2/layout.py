"""From GGUF's names, order of rows and metadata to those of a Hugging Face Llama checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_tools.smollm2.wheel import ModelError

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LONG_NAMES = {"pad": "padding", "unk": "unknown"}
_ROTATED = (".attn_q.weight", ".attn_k.weight")


def tensor_name(name: str) -> str:
    """The checkpoint's name of a GGUF tensor.

    Raises:
        ModelError: a tensor that a plain Llama does not have, such as a bias or a table of frequencies.
    """
    if name in _WHOLE:
        return _WHOLE[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in _LAYER and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.weight"
    raise ModelError(f"The GGUF file has the tensor {name!r}, which a plain Llama does not have; use another file.")


def is_rotated(name: str) -> bool:
    """Whether a GGUF tensor makes queries or keys, whose rows GGUF keeps in another order."""
    return name.endswith(_ROTATED)


def paired_to_halves(rows: npt.NDArray[Any], head_dim: int) -> npt.NDArray[Any]:
    """Rows of a query or key matrix in the order of a Hugging Face checkpoint.

    llama.cpp rotates neighbours (rows 2i and 2i + 1 of a head), transformers rows i and i + head_dim / 2.

    Args:
        rows: any[heads * head_dim, ...] in GGUF's order.
        head_dim: rows of one head.
    """
    heads = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def model_config(metadata: Mapping[str, Any], tied: bool, dtype: str) -> dict[str, Any]:
    """config.json for the metadata of a Llama in GGUF.

    Raises:
        ModelError: another architecture, scaled or partial rotation, or a field that is missing.
    """
    architecture = require(metadata, "general.architecture")
    if architecture != "llama":
        raise ModelError(f"The GGUF file is of the architecture {architecture!r}, expected 'llama'; use another file.")
    if scaled := [name for name in metadata if name.startswith("llama.rope.scaling.")]:
        raise ModelError(f"The GGUF file scales rotary positions ({scaled[0]}), which is not converted; use another.")
    hidden, heads = require(metadata, "llama.embedding_length"), require(metadata, "llama.attention.head_count")
    head_dim = hidden // heads
    if metadata.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise ModelError(
            f"The GGUF file rotates {metadata['llama.rope.dimension_count']} of {head_dim} dimensions of a head, "
            "expected all; use another file."
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": require(metadata, "llama.feed_forward_length"),
        "num_hidden_layers": require(metadata, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": require(metadata, "llama.context_length"),
        "rms_norm_eps": _shortest(require(metadata, "llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(require(metadata, "llama.rope.freq_base")),
        "tie_word_embeddings": tied,
        "vocab_size": len(require(metadata, "tokenizer.ggml.tokens")),
        "dtype": dtype,
        **special_ids(metadata),
    }


def special_ids(metadata: Mapping[str, Any], *more: str) -> dict[str, int]:
    """bos_token_id, eos_token_id and pad_token_id, and `more` of their kind, each if the file names it."""
    found = {}
    for name in ("bos", "eos", "pad", *more):
        place = f"tokenizer.ggml.{_LONG_NAMES.get(name, name)}_token_id"
        if place in metadata:
            found[f"{name}_token_id"] = int(metadata[place])
    return found


def require(metadata: Mapping[str, Any], name: str) -> Any:
    """A field of the metadata.

    Raises:
        ModelError: it is missing.
    """
    if name not in metadata:
        raise ModelError(f"The GGUF file has no field {name!r}, which a conversion needs; use another file.")
    return metadata[name]


def _shortest(value: float) -> float:
    """The shortest decimal number with the same float32 value, as a publisher would have written it."""
    return float(str(np.float32(value)))
