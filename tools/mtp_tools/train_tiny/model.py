"""The network to train: transformers' Qwen3.5 text model and an MTP head over it."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

ChainKeys = tuple[tuple[Tensor, Tensor], ...]
"""Keys and values of the chained steps so far, each [batch, num_key_value_heads, length, head_dim]."""


class MtpHead(nn.Module):
    """One full-attention layer that reads [embedding, hidden] and returns its own post-norm hidden.

    The attributes are named as the checkpoint's `mtp.*` tensors.
    """

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        layer_config = copy.deepcopy(config)
        layer_config.layer_types = ["full_attention"]
        layer_config.num_hidden_layers = 1
        self.pre_fc_norm_embedding = qwen.Qwen3_5RMSNorm(size, eps)
        self.pre_fc_norm_hidden = qwen.Qwen3_5RMSNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([qwen.Qwen3_5DecoderLayer(layer_config, 0)])
        self.norm = qwen.Qwen3_5RMSNorm(size, eps)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=config.initializer_range)

    def forward(
        self, embedding: Tensor, hidden: Tensor, rotary: nn.Module, chain: ChainKeys
    ) -> tuple[Tensor, ChainKeys]:
        """Run chained step j = len(chain) for all rows at once.

        Step j of row t stands at position t + j. It sees the first step's keys of rows 0..t, which
        came from the target's hiddens, and its own earlier steps of row t: what the head's cache
        holds when row t starts a cycle.

        Args:
            embedding: [batch, length, hidden_size], of token t + 1 + j.
            hidden: [batch, length, hidden_size], the target's final-norm hidden of token t for
                j = 0, afterwards what the step before returned.
            rotary: the backbone's rotary module.
            chain: what the step before returned; empty for j = 0.

        Returns:
            [batch, length, hidden_size], both the output head's input and the next step's hidden,
            and the extended chain.
        """
        fused = torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], -1)
        # Embedding first: Qwen3.5 trains the fusion weight on [embedding, hidden].
        stream = self.fc(fused)
        layer: Any = self.layers[0]
        mixed, chain = _attend(layer.self_attn, layer.input_layernorm(stream), rotary, chain)
        stream = stream + mixed
        stream = stream + layer.mlp(layer.post_attention_layernorm(stream))
        return self.norm(stream), chain


class TinyModel(nn.Module):
    """Backbone, MTP head and the output head tied to the embedding."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        self.language_model = qwen.Qwen3_5TextModel(config)
        self.mtp = MtpHead(config)

    def hidden(self, ids: Tensor) -> Tensor:
        """Return the final-norm hidden [batch, length, hidden_size] of int64[batch, length] ids."""
        output: Tensor = self.language_model(input_ids=ids, use_cache=False).last_hidden_state
        return output

    def embed(self, ids: Tensor) -> Tensor:
        """Return [batch, length, hidden_size] for int64[batch, length] ids."""
        embedding: Tensor = self.language_model.embed_tokens(ids)
        return embedding

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [..., vocab_size] for a final-norm or post-`mtp.norm` hidden [..., hidden_size]."""
        return F.linear(hidden, self.language_model.embed_tokens.weight)

    def chain_step(self, ids: Tensor, hidden: Tensor, chain: ChainKeys) -> tuple[Tensor, ChainKeys]:
        """Run one chained MTP step; see MtpHead.forward. ids: int64[batch, length]."""
        result: tuple[Tensor, ChainKeys] = self.mtp(self.embed(ids), hidden, self.language_model.rotary_emb, chain)
        return result


def _attend(attention: Any, x: Tensor, rotary: nn.Module, chain: ChainKeys) -> tuple[Tensor, ChainKeys]:
    """Gated attention over the first step's causal keys and each later step's own row."""
    batch, length, _ = x.shape
    shape = (batch, length, -1, attention.head_dim)
    query, gate = attention.q_proj(x).view(batch, length, -1, 2 * attention.head_dim).chunk(2, -1)
    query = attention.q_norm(query).transpose(1, 2)
    key = attention.k_norm(attention.k_proj(x).view(shape)).transpose(1, 2)
    value = attention.v_proj(x).view(shape).transpose(1, 2)
    positions = torch.arange(length) + len(chain)
    cos, sin = rotary(x, positions.view(1, 1, -1).expand(3, batch, -1))
    query, key = qwen.apply_rotary_pos_emb(query, key, cos, sin)  # type: ignore[no-untyped-call]
    chain = (*chain, (key, value))
    own_row = torch.eye(length, dtype=torch.bool)
    visible = torch.cat([torch.ones_like(own_row).tril(), *[own_row] * (len(chain) - 1)], 1)
    mixed = F.scaled_dot_product_attention(
        query,
        torch.cat([k for k, _ in chain], 2),
        torch.cat([v for _, v in chain], 2),
        attn_mask=visible,
        enable_gqa=True,
    )
    gated = mixed.transpose(1, 2).reshape(batch, length, -1) * gate.reshape(batch, length, -1).sigmoid()
    return attention.o_proj(gated), chain
