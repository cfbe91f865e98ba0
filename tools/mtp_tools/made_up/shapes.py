"""Published Qwen3.5 shapes as configuration fields and tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class PublishedShape:
    """Sizes of one released model; head width 256, delta heads of 128, vocabulary 248,320 in all of them."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    value_heads: int
    tied: bool


PUBLISHED = {
    "0.8B": PublishedShape(24, 1024, 3584, 8, 2, 16, True),
    "2B": PublishedShape(24, 2048, 6144, 8, 2, 16, True),
    "4B": PublishedShape(32, 2560, 9216, 16, 4, 32, True),
    "9B": PublishedShape(32, 4096, 12288, 16, 4, 32, False),
    "27B": PublishedShape(64, 5120, 17408, 24, 4, 48, False),
}
VOCAB, HEAD_DIM, DELTA_DIM, KEY_HEADS, KERNEL, INTERVAL = 248_320, 256, 128, 16, 4, 4
FLOAT32 = ("A_log", "linear_attn.norm.weight")


def config(shape: PublishedShape) -> dict[str, Any]:
    """config.json in the layout of the releases."""
    text = {
        "model_type": "qwen3_5_text",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": HEAD_DIM,
        "attn_output_gate": True,
        "full_attention_interval": INTERVAL,
        "linear_conv_kernel_dim": KERNEL,
        "linear_key_head_dim": DELTA_DIM,
        "linear_value_head_dim": DELTA_DIM,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": shape.value_heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
        "mtp_num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "max_position_embeddings": 262_144,
        "eos_token_id": 248_044,
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": shape.tied,
        "text_config": text,
    }


def tensors(shape: PublishedShape) -> Shapes:
    """Key and shape of every tensor, in file order."""
    prefix = "model.language_model."
    found: Shapes = {f"{prefix}embed_tokens.weight": (VOCAB, shape.hidden)}
    for index in range(shape.layers):
        found |= _layer(f"{prefix}layers.{index}.", shape, attention=(index + 1) % INTERVAL == 0)
    found[f"{prefix}norm.weight"] = (shape.hidden,)
    if not shape.tied:
        found["lm_head.weight"] = (VOCAB, shape.hidden)
    found["mtp.fc.weight"] = (shape.hidden, 2 * shape.hidden)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        found[f"mtp.{name}.weight"] = (shape.hidden,)
    return found | _layer("mtp.layers.0.", shape, attention=True)


def _layer(prefix: str, shape: PublishedShape, *, attention: bool) -> Shapes:
    hidden, size = shape.hidden, shape.intermediate
    found: Shapes = {f"{prefix}{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    found |= {f"{prefix}mlp.{name}_proj.weight": (size, hidden) for name in ("gate", "up")}
    found[f"{prefix}mlp.down_proj.weight"] = (hidden, size)
    if attention:
        query, kv = shape.heads * HEAD_DIM, shape.kv_heads * HEAD_DIM
        rows: dict[str, tuple[int, ...]] = {
            "q_proj": (2 * query, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "o_proj": (hidden, query),
        }
        rows |= {"q_norm": (HEAD_DIM,), "k_norm": (HEAD_DIM,)}
        return found | {f"{prefix}self_attn.{name}.weight": rows[name] for name in rows}
    key, value = KEY_HEADS * DELTA_DIM, shape.value_heads * DELTA_DIM
    linear = f"{prefix}linear_attn."
    return found | {
        f"{linear}in_proj_qkv.weight": (2 * key + value, hidden),
        f"{linear}in_proj_z.weight": (value, hidden),
        f"{linear}in_proj_b.weight": (shape.value_heads, hidden),
        f"{linear}in_proj_a.weight": (shape.value_heads, hidden),
        f"{linear}conv1d.weight": (2 * key + value, 1, KERNEL),
        f"{linear}A_log": (shape.value_heads,),
        f"{linear}dt_bias": (shape.value_heads,),
        f"{linear}norm.weight": (DELTA_DIM,),
        f"{linear}out_proj.weight": (hidden, value),
    }
