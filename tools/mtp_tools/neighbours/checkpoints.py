"""Copies of a checkpoint as the neighbours want it: another configuration, a tokenizer, and links to the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mtp_engines.errors import CheckpointError

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_END = "<|endoftext|>"
_MARKS = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "patch_size": 16,
    "deepstack_visual_indexes": [],
}
_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def read_config(checkpoint: Path) -> dict[str, Any]:
    """config.json of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is no JSON object.
    """
    try:
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{checkpoint} has no readable config.json ({error}); give a checkpoint.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{checkpoint / 'config.json'} holds no object; give a checkpoint.")
    return config


def claim(work: Path, checkpoint: Path) -> None:
    """Note in a work directory which checkpoint its models are made from.

    Raises:
        CheckpointError: they are made from another one, or this one has changed.
    """
    files = sorted(path for path in checkpoint.iterdir() if path.is_file())
    found = json.dumps([[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files])
    note = work / "made-from.json"
    if note.exists() and note.read_text(encoding="utf-8") != found:
        raise CheckpointError(
            f"{work} holds models of another checkpoint than {checkpoint}, or of what it was before; give another "
            f"--work, or remove {work / 'models'} and {note}."
        )
    note.write_text(found, encoding="utf-8")


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of the language model, wherever they stand."""
    text: dict[str, Any] = config.get("text_config", config)
    # The outer value counts for our exporter; the text model alone looks at its own.
    return {"tie_word_embeddings": config.get("tie_word_embeddings", False)} | text | {"rope_parameters": _rope(text)}


def _rope(text: dict[str, Any]) -> dict[str, Any]:
    """The positions with the three sections of the releases, which a text does not tell from having none.

    onnxruntime-genai feeds three rows of positions whatever the configuration says.
    """
    rope: dict[str, Any] = text.get("rope_parameters", {})
    pairs = int(text["head_dim"] * rope.get("partial_rotary_factor", 1.0)) // 2
    sections = [(pairs + rest) // 3 for rest in (2, 1, 0)]
    return {"mrope_section": sections, "mrope_interleaved": True} | rope


def write_copy(checkpoint: Path, folder: Path, *, text_only: bool = False) -> Path:
    """A directory with the checkpoint's weights as links, its configuration, and a tokenizer.

    A checkpoint without a tokenizer gets a made-up one, in which token 17 is written `t17`.

    Args:
        text_only: the configuration is that of the language model alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = read_config(checkpoint)
    text = text_config(config)
    if text_only:
        kinds = config.get("architectures", [])
        config = text | {"architectures": [kind.replace("ForConditionalGeneration", "ForCausalLM") for kind in kinds]}
    elif "text_config" in config:
        config["text_config"] = text
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    for file in sorted(checkpoint.iterdir()):
        link = folder / file.name
        if file.name != "config.json" and not link.exists():
            link.symlink_to(file.resolve())
    if not (folder / "tokenizer.json").exists():
        _write_tokenizer(folder, int(text["vocab_size"]))
    return folder


def write_vision_copy(checkpoint: Path, folder: Path) -> Path:
    """A copy of a whole model of texts and images, with the least tower of images where the checkpoint has none."""
    write_copy(checkpoint, folder)
    config = read_config(folder)
    text = text_config(config)
    first = int(text["vocab_size"]) - len(_MARKS) - 1
    tower = {"model_type": config["model_type"], "out_hidden_size": text["hidden_size"], **_TOWER}
    marks = {name: first + index for index, name in enumerate(_MARKS)}
    (folder / "config.json").write_text(json.dumps({"vision_config": tower, **marks} | config), encoding="utf-8")
    settings = folder / "preprocessor_config.json"
    if not settings.exists():
        settings.write_text(json.dumps(_IMAGES), encoding="utf-8")
    return folder


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A vocabulary of words that are never merged; the last one ends a text."""
    vocab = {f"t{token}": token for token in range(vocab_size - 1)} | {_END: vocab_size - 1}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=_END))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="")
    tokenizer.add_special_tokens([_END])
    tokenizer.save(str(folder / _TOKENIZER[0]))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END, "unk_token": _END}
    (folder / _TOKENIZER[1]).write_text(json.dumps(settings), encoding="utf-8")
