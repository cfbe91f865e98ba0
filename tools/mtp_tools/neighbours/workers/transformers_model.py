"""transformers: `generate` on the text model, in float32. Assisted generation does not exist for such a hybrid."""

from __future__ import annotations

import importlib
import time
from typing import Any


class Engine:
    """One model."""

    draft_tokens = (0,)

    def __init__(self, settings: dict[str, Any]) -> None:
        self._torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        self._torch.set_num_threads(settings["threads"])
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=getattr(self._torch, settings["dtype"])
        ).eval()
        self.about = {"transformers": transformers.__version__, "torch": self._torch.__version__}

    def answer(self, prompt: list[int], new_tokens: int, draft_tokens: int) -> dict[str, Any]:
        """Greedy, without an end token."""
        watch, inputs = Watch(), self._torch.tensor([prompt])
        start = time.perf_counter()
        with self._torch.inference_mode():
            found = self._model.generate(
                inputs,
                attention_mask=self._torch.ones_like(inputs),
                max_new_tokens=new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                streamer=watch,
            )
        total = time.perf_counter() - start
        return {"ids": found[0, len(prompt) :].tolist(), "first_s": watch.times[1] - start, "total_s": total}


class Watch:
    """A streamer that notes when the prompt and each token were put."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """One more."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to write."""


def load(settings: dict[str, Any]) -> Engine:
    """Settings: model, dtype, threads."""
    return Engine(settings)
