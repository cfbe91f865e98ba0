"""onnxruntime-genai: its generator loop on the model that its own builder made. It drafts nothing on a CPU."""

from __future__ import annotations

import importlib
import importlib.metadata
import time
from typing import Any


class Engine:
    """One model."""

    draft_tokens = (0,)

    def __init__(self, settings: dict[str, Any]) -> None:
        self._genai: Any = importlib.import_module("onnxruntime_genai")
        self._model = self._genai.Model(settings["model"])
        names = ("onnxruntime-genai", "onnxruntime")
        self.about = {name: importlib.metadata.version(name) for name in names}

    def answer(self, prompt: list[int], new_tokens: int, draft_tokens: int) -> dict[str, Any]:
        """Greedy; min_length keeps end tokens from ending it."""
        length = len(prompt) + new_tokens
        params = self._genai.GeneratorParams(self._model)
        params.set_search_options(max_length=length, min_length=length, do_sample=False)
        ids: list[int] = []
        start = time.perf_counter()
        generator = self._genai.Generator(self._model, params)
        generator.append_tokens([prompt])
        while not generator.is_done():
            generator.generate_next_token()
            ids.append(int(generator.get_next_tokens()[0]))
            if len(ids) == 1:
                first = time.perf_counter() - start
        return {"ids": ids, "first_s": first, "total_s": time.perf_counter() - start}


def load(settings: dict[str, Any]) -> Engine:
    """Settings: model, whose genai_config.json has the number of threads."""
    return Engine(settings)
