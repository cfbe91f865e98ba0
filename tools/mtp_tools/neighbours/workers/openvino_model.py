"""OpenVINO GenAI: its text pipeline, and, where its export has an MTP head, its speculative pipeline for every K."""

from __future__ import annotations

import importlib
import importlib.metadata
import time
from pathlib import Path
from typing import Any


class Engine:
    """One exported model."""

    draft_tokens: tuple[int, ...] = (0,)

    def __init__(self, settings: dict[str, Any]) -> None:
        numpy: Any = importlib.import_module("numpy")
        openvino: Any = importlib.import_module("openvino")
        self._genai: Any = importlib.import_module("openvino_genai")
        self._tensor: Any = lambda rows: openvino.Tensor(numpy.array(rows, dtype=numpy.int64))
        self._device = {"INFERENCE_NUM_THREADS": settings["threads"]}
        self._plain = self._genai.LLMPipeline(settings["model"], "CPU", **self._device)
        self.about = {name: importlib.metadata.version(name) for name in ("openvino-genai", "openvino")}
        self._drafting: Any = None
        if settings.get("mtp_model") and settings["draft_tokens"]:
            self._open_drafting(Path(settings["mtp_model"]), tuple(settings["draft_tokens"]))

    def answer(self, prompt: list[int], new_tokens: int, draft_tokens: int) -> dict[str, Any]:
        """Greedy, without end tokens; the streamer is told of every token."""
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new_tokens, True, False
        config.apply_chat_template = False
        if draft_tokens:
            config.num_assistant_tokens = draft_tokens
        watch = _watch(self._genai)
        start = time.perf_counter()
        if draft_tokens:
            text = " ".join(f"t{token}" for token in prompt)
            found = self._drafting.generate(text, images=[], generation_config=config, streamer=watch)
        else:
            inputs = self._genai.TokenizedInputs(self._tensor([prompt]), self._tensor([[1] * len(prompt)]))
            self._plain.generate(inputs, config, watch)
        total = time.perf_counter() - start
        reply = {"ids": watch.ids[:new_tokens], "first_s": watch.times[0] - start, "total_s": total}
        return reply | (_counts(found, draft_tokens) if draft_tokens else {})

    def _open_drafting(self, model: Path, widths: tuple[int, ...]) -> None:
        scheduler = self._genai.SchedulerConfig()
        scheduler.enable_prefix_caching, scheduler.cache_size, scheduler.max_num_seqs = False, 2, 1
        try:
            draft = self._genai.draft_model(str(model), "CPU", **self._device)
            self._drafting = self._genai.VLMPipeline(
                str(model), "CPU", scheduler_config=scheduler, draft_model=draft, **self._device
            )
        except RuntimeError as error:
            self.about["MTP"] = f"does not run: {' '.join(str(error).split())[:200]}"
            return
        self.draft_tokens = (0, *widths)
        self.about["memory"] = "of both of its pipelines, which are loaded together"


def _counts(found: Any, draft_tokens: int) -> dict[str, int]:
    """Of its cycles; the first token comes from the prompt, and every other run of the model checks K drafts."""
    metrics = found.extended_perf_metrics
    cycles = len(metrics.main_model_metrics.raw_metrics.m_durations) - 1
    return {"drafted": cycles * draft_tokens, "accepted": metrics.get_num_accepted_tokens()}


def _watch(genai: Any) -> Any:
    base: Any = genai.StreamerBase

    class Watch(base):  # type: ignore[misc]
        """Notes ids and times."""

        def __init__(self) -> None:
            base.__init__(self)
            self.ids: list[int] = []
            self.times: list[float] = []

        def write(self, token: Any) -> Any:
            """One token, or those of one cycle."""
            self.times.append(time.perf_counter())
            self.ids += [token] if isinstance(token, int) else list(token)
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            """Nothing is left to write."""

    return Watch()


def load(settings: dict[str, Any]) -> Engine:
    """Settings: model, mtp_model (a directory, if there is one), draft_tokens, threads."""
    return Engine(settings)
