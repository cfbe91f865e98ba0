"""Which tokens end a generation: the union of every place that publishers use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtp_engines.contracts.manifest import EndToken
from mtp_exporter.reading.checkpoint import Checkpoint, read_json


def end_tokens(checkpoint: Checkpoint) -> tuple[EndToken, ...]:
    """End tokens of a checkpoint with the places that named them, in the order of their ids.

    The rule is the union of generation_config.json, config.json (top level and text_config) and the
    tokenizer's end-of-sequence string. An empty list or null adds nothing and takes nothing away.
    """
    places: dict[int, list[str]] = {}
    nested = checkpoint.config.get("text_config")
    sources: list[tuple[str, Any]] = [
        ("generation_config.json", checkpoint.generation_config.get("eos_token_id")),
        ("config.json", checkpoint.config.get("eos_token_id")),
        ("config.json text_config", nested.get("eos_token_id") if isinstance(nested, dict) else None),
        ("tokenizer_config.json", _tokenizer_end(checkpoint.directory)),
    ]
    for place, value in sources:
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int) and not isinstance(token, bool):
                places.setdefault(token, []).append(place)
    return tuple(EndToken(token, tuple(found)) for token, found in sorted(places.items()))


def _tokenizer_end(directory: Path) -> int | None:
    """Id of the tokenizer's end-of-sequence string, if both files know it."""
    config, tokenizer = directory / "tokenizer_config.json", directory / "tokenizer.json"
    text = read_json(config).get("eos_token") if config.is_file() else None
    if not tokenizer.is_file():
        return None
    text = text.get("content") if isinstance(text, dict) else text
    if not isinstance(text, str):
        return None
    content = read_json(tokenizer)
    for entry in content.get("added_tokens") or []:
        if entry.get("content") == text:
            return int(entry["id"])
    vocabulary = content.get("model", {}).get("vocab")
    return vocabulary.get(text) if isinstance(vocabulary, dict) else None
