"""The checkpoint folder: writing it in a release's layout, and reading it back into the network."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save
from torch import Tensor

from mtp_tools.train_tiny.layout import checkpoint_config, generation_config, model_config, tokenizer_config
from mtp_tools.train_tiny.model import TinyModel

BACKBONE_PREFIX = "language_model."
FP32_SUFFIXES = (".linear_attn.A_log", ".linear_attn.norm.weight")


def save_checkpoint(model: TinyModel, folder: Path) -> None:
    """Write weights and configuration; `tokenizer.json` is left to its own writer."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {_stored_name(name): _stored(name, value) for name, value in model.state_dict().items()}
    (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    version = transformers.__version__
    _write_json(folder / "config.json", checkpoint_config(version))
    _write_json(folder / "generation_config.json", generation_config(version))
    _write_json(folder / "tokenizer_config.json", tokenizer_config())


def load_checkpoint(folder: Path) -> TinyModel:
    """Read the stored, rounded weights into an fp32 network ready for evaluation."""
    model = TinyModel(model_config())
    tensors = load_file(folder / "model.safetensors")
    state = {name: tensors.pop(_stored_name(name)).float() for name in model.state_dict()}
    assert not tensors, f"every stored tensor belongs to the network, but these do not: {list(tensors)}"
    model.load_state_dict(state)
    return model.eval()


def transformers_difference(model: TinyModel, folder: Path, ids: Tensor) -> float:
    """Return the largest difference of logits to what transformers itself loads from the folder.

    Args:
        ids: int64[batch, length].
    """
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        theirs = loaded(input_ids=ids, use_cache=False).logits
        ours = model.logits(model.hidden(ids))
    return float((theirs - ours).abs().max())


def _stored_name(name: str) -> str:
    return f"model.{name}" if name.startswith(BACKBONE_PREFIX) else name


def _stored(name: str, value: Tensor) -> Tensor:
    dtype = torch.float32 if name.endswith(FP32_SUFFIXES) else torch.bfloat16
    return value.to(dtype).contiguous()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
