"""References for the dense families composed from transformers' own classes, in float64.

Importing this needs torch and transformers, which only some installations have.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from tests.fixtures.files import read_tensors

CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mimo": (Qwen2Config, Qwen2ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
# How transformers' generic multi-token prediction names the tensors of a MiMo depth.
MIMO_NAMES = {
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "input_proj": "eh_proj",
    "final_layernorm": "post_norm",
}


@contextlib.contextmanager
def double_everywhere() -> Iterator[None]:
    """Turn the explicit float32 casts inside the models into float64 ones."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def double_tensors(directory: Path) -> dict[str, Tensor]:
    """Every tensor of numbers in float64."""
    arrays = {name: array for name, array in read_tensors(directory).items() if name not in ("d2t", "t2d")}
    return {name: torch.tensor(array.astype("float64")) for name, array in arrays.items()}


def backbone(directory: Path) -> Any:
    """The target; MiMo's is a Qwen2 with other names around it. Call it in `double_everywhere`."""
    fields = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config_class, model_class = CLASSES[fields.pop("model_type")]
    config = config_class(**{k: v for k, v in fields.items() if k not in ("architectures", "auto_map", "torch_dtype")})
    model = model_class._from_config(config, attn_implementation="eager").eval().double()
    tensors = {k: v for k, v in double_tensors(directory).items() if ".mtp_layers." not in k}
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, strict=True)
    # Made anew, because the frequencies were computed in float32.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model


def run_backbone(model: Any, ids: list[int]) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """The input of every layer and the last output, that output normed, and the logits."""
    outputs: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: outputs.append(args[0][0].clone()))
    run = model.model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    hook.remove()
    streams = [*(rows[0] for rows in run.hidden_states[:-1]), outputs[0]]
    return streams, run.last_hidden_state[0], model.lm_head(run.last_hidden_state)[0]


def mimo_head(directory: Path, model: Any, depths: int) -> tuple[MtpModel, MtpCache]:
    """The generic head, hidden rows first, around the layer and norm classes of the target."""
    model.config.num_mtp_layers = depths
    model.config.mtp_layer_types = ["full_attention"] * depths
    model.config.mtp_hidden_states_first = True
    head = MtpModel(model, depths).eval().double()
    tensors = {}
    for name, tensor in double_tensors(directory).items():
        if ".mtp_layers." in name:
            depth, _, rest = name.split(".mtp_layers.")[1].partition(".")
            own = MIMO_NAMES.get(rest.split(".")[0])
            tensors[f"{depth}.{own}.weight" if own else f"{depth}.mtp_block.{rest}"] = tensor
    head.layers.load_state_dict(tensors, strict=True)
    return head, MtpCache(config=model.config.get_mtp_config())


class EagleReference(nn.Module):
    """A draft of version 1 or 3 without a cache, composed of the pieces of Llama."""

    def __init__(self, directory: Path, model: Any, version: int) -> None:
        super().__init__()
        fields = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        dropped = ("architectures", "bias", "draft_vocab_size", "eagle_config", "model_type", "torch_dtype")
        config = LlamaConfig(**{k: v for k, v in fields.items() if k not in dropped})
        config._attn_implementation = "eager"
        tensors = double_tensors(directory)
        hidden, head_dim = config.hidden_size, config.head_dim
        self.version, self.norm_before_residual = version, bool(fields.get("norm_before_residual"))
        self.fc = nn.Linear(tensors["fc.weight"].shape[1], hidden, bias="fc.bias" in tensors)
        self.layer = LlamaDecoderLayer(config, 0)
        embedding = tensors.pop("embed_tokens.weight", model.model.embed_tokens.weight)
        head = tensors.pop("lm_head.weight", model.lm_head.weight)
        if version == 1:
            self.layer.input_layernorm = nn.Identity()
        else:
            self.hidden_norm, self.norm = (LlamaRMSNorm(hidden, eps=config.rms_norm_eps) for _ in range(2))
            for name, heads in (("q", config.num_attention_heads), *((n, config.num_key_value_heads) for n in "kv")):
                setattr(self.layer.self_attn, f"{name}_proj", nn.Linear(2 * hidden, heads * head_dim, bias=False))
        renamed = {k.replace("layers.0.", "layer."): v for k, v in tensors.items()}
        renamed = {k.replace("midlayer.", "layer."): v for k, v in renamed.items()}
        renamed = {k.replace("layer.hidden_norm", "hidden_norm"): v for k, v in renamed.items()}
        self.double().load_state_dict(renamed, strict=True)
        self.rotary = LlamaRotaryEmbedding(config)
        self.embedding, self.head = embedding, head
        self.eval()

    def start(self, hidden: Tensor) -> Tensor:
        """The hidden rows that `forward` takes, from those of the target."""
        return self.fc(hidden) if self.version == 3 else hidden

    def forward(self, next_ids: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What a chained row takes, and the logits; positions are those of the tokens, not of the rows."""
        embedding = self.embedding[next_ids][None]
        hidden = hidden[None]
        count = len(next_ids)
        positions = torch.arange(1, count + 1)[None]
        options = {
            "attention_mask": torch.full((count, count), float("-inf")).triu(1)[None, None].double(),
            "position_embeddings": self.rotary(embedding, positions),
        }
        if self.version == 1:
            rows = self.layer(self.fc(torch.cat([embedding, hidden], dim=-1)), **options)
            return rows[0], (rows @ self.head.T)[0]
        normed = self.hidden_norm(hidden)
        joined = torch.cat([self.layer.input_layernorm(embedding), normed], dim=-1)
        rows = (normed if self.norm_before_residual else hidden) + self.layer.self_attn(joined, **options)[0]
        rows = rows + self.layer.mlp(self.layer.post_attention_layernorm(rows))
        return rows[0], (self.norm(rows) @ self.head.T)[0]
