"""The same checkpoints in transformers: its own models and its generic head, for tests of the oracle.

float32 inside the models is made float64, so that a difference of 1e-10 is a difference in meaning.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.oracles.float64_checkpoint import Array

CLASSES = {
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
}


class Run(NamedTuple):
    """What a target gives: the residual stream after every layer but the last, and the rest."""

    layers: list[Array]
    hidden: Array
    logits: Array


class Reference:
    """One checkpoint's target and head."""

    def __init__(self, family: str, directory: Path) -> None:
        for package in ("torch", "transformers"):
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"{package} is not installed; the comparison needs it")
        import torch
        import transformers

        self.torch, self.family = torch, family
        # Experts one after the other: the other ways of running them need kernels for float64.
        options = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
        loader = getattr(transformers, CLASSES[family])
        self.model = loader.from_pretrained(directory, **options).eval()

    def float32_logits(self, ids: Sequence[int]) -> Array:
        """The target over a whole text, in the precision it was written for."""
        with self.torch.no_grad():
            return self.model(input_ids=self._tensor(ids)).logits[0].numpy()

    def whole(self, ids: Sequence[int]) -> Run:
        """The target over a whole text."""
        with self._double():
            run = self.model.model(input_ids=self._tensor(ids), output_hidden_states=True, use_cache=False)
            logits = self.model.lm_head(run.last_hidden_state)
        layers = [rows[0].numpy() for rows in run.hidden_states[1:-1]]
        return Run(layers, run.last_hidden_state[0].numpy(), logits[0].numpy())

    def decoded(self, ids: Sequence[int], prompt: int) -> tuple[Array, list[tuple[Array, Array]]]:
        """Logits of a text of which all after `prompt` rows come one by one, and the last states.

        A state is (key, value), or (conv, recurrent), as the oracle has them but for the batch.
        """
        from transformers import DynamicCache

        with self._double():
            cache = DynamicCache(config=self.model.config)
            blocks = [ids[:prompt], *([token] for token in ids[prompt:])]
            rows = [self.model(input_ids=self._tensor(b), cache=cache, use_cache=True).logits[0] for b in blocks]
            states = [self._state(layer) for layer in cache.layers]
        return self.torch.cat(rows).numpy(), states

    def head(self, table: Array, next_ids: Sequence[int], hidden: Array, blocks: Sequence[int] = ()) -> Array:
        """The head's output over rows (t_{p+1}, h_p), with a cache, cut into blocks at `blocks`.

        table: what its ids are embedded with; transformers always takes the target's.
        """
        from transformers.cache_utils import MtpCache

        head = self._head()
        bounds = [0, *blocks, len(next_ids)]
        with self._double():
            cache = MtpCache(config=self.model.config.get_mtp_config())
            rows = [
                head.forward_layer(
                    0,
                    self.torch.tensor(hidden[start:end])[None],
                    # Its positions begin with 1; only their differences matter.
                    self.torch.arange(start + 1, end + 1)[None],
                    cache,
                    inputs_embeds=self.torch.tensor(table[list(next_ids[start:end])])[None],
                )[0]
                for start, end in pairwise(bounds)
            ]
        return self.torch.cat(rows).numpy()

    def _head(self) -> Any:
        from transformers.modeling_layers import MtpModel

        config = self.model.config
        if self.family in ("deepseek_v3", "glm4_moe"):
            # Its own patterns know the depths of the releases alone.
            self.model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{config.num_hidden_layers}\..*"]
        else:
            # Attributes that these families do not set turn the generic head on.
            config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
            # It would read the trunk's fields for its own layer 0, which is sparse whatever they say.
            config.mlp_only_layers, config.decoder_sparse_step = [], 1
        return self._widened(MtpModel.from_pretrained(self.model))

    def _state(self, layer: Any) -> tuple[Array, Array]:
        if hasattr(layer, "conv_states"):
            # It keeps one more column than the convolution reads.
            return layer.conv_states[0][0, :, 1:].T.numpy(), layer.recurrent_states[0][0].numpy()
        return layer.keys[0].transpose(0, 1).numpy(), layer.values[0].transpose(0, 1).numpy()

    def _tensor(self, ids: Sequence[int]) -> Any:
        return self.torch.tensor([list(ids)])

    def _widened(self, module: Any) -> Any:
        module = module.eval().double()
        owner = getattr(module, "model", module)
        with self._patched():
            # Made anew, because its frequencies were made in float32.
            owner.rotary_emb = type(owner.rotary_emb)(module.config)
        return module

    @contextlib.contextmanager
    def _double(self) -> Iterator[None]:
        self._widened(self.model)
        with self._patched(), self.torch.no_grad():
            yield

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        """Turn the explicit float32 casts inside the models into float64 ones."""
        torch = self.torch
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "float32", torch.float64)
            patch.setattr(torch, "float", torch.float64)
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            yield
