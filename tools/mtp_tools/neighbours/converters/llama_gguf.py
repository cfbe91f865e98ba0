"""`python llama_gguf.py SOURCE MODEL OUT`: llama.cpp's own converter to GGUF in float32, the MTP head included.

SOURCE is llama.cpp's source. The converter knows tokenizers by a digest and refuses the made-up one, which is written
as a list of words instead; a tokenizer that it knows is left to it.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Convert."""
    source, model, out = sys.argv[1:]
    sys.path[:0] = [source, str(Path(source) / "gguf-py")]
    tokenizer = json.loads((Path(model) / "tokenizer.json").read_text(encoding="utf-8"))
    if tokenizer["model"]["type"] == "WordLevel":
        _take_words(importlib.import_module("conversion.base").TextModel)
    sys.argv[1:] = [model, "--outfile", out, "--outtype", "f32"]
    importlib.import_module("convert_hf_to_gguf").main()


def _take_words(text_model: Any) -> None:
    def set_vocab(self: Any) -> None:
        self._set_vocab_whitespace()
        # The loader wants merges of every tokenizer of words, and looks at none that does not occur.
        self.gguf_writer.add_token_merges(["t t"])

    text_model.get_vocab_base_pre = lambda self, tokenizer: "whitespace"
    text_model.set_vocab = set_vocab


if __name__ == "__main__":
    main()
