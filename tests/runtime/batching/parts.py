"""What the tests of batching share: models in several shapes, mixed requests, and runs round by round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtp_engines.backends.gpu.engine import DeviceEngine
from mtp_engines.backends.options import EngineOptions
from mtp_runtime import Emitted, Finished, Model, load
from mtp_runtime.batching.scheduler import BatchOptions, Scheduler
from mtp_runtime.batching.tickets import Failed, Ticket, Told
from mtp_runtime.batching.watch import Watch
from mtp_runtime.request import AUTO, Request, request_from
from tests.fixtures import moe_families
from tests.fixtures.checkpoints import partial_checkpoint, tinytext_tokenizer, write_tokenizer
from tests.fixtures.dense_markov import partial_mimo_checkpoint
from tests.runtime.parts import counts
from tests.support import build_bundle, load_model

SLOTS, K, LENGTH, CHUNK = 4, 4, 128, 16
EOS = 33
PIECES = (b"\xc3", b"\xa4", *"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789")
FAMILIES = ("hybrid", "full", "deep", "latent", "experts")


def build_family(name: str, place: Path) -> Model:
    """A small model with room for four answers, text, and prompts in chunks of 16 rows."""
    checkpoint = place / "checkpoint"
    if name == "deep":
        partial_mimo_checkpoint(checkpoint, depths=2)
    elif name in ("latent", "experts"):
        moe_families.partial_checkpoint({"latent": "deepseek_v3", "experts": "qwen3_5_moe"}[name], checkpoint)
    else:
        # Few layers on PyTorch, where the body of a recurrence takes long.
        types = {"full": ["full_attention"] * 2, "torch": ["linear_attention", "full_attention"]}
        partial_checkpoint(checkpoint, eos=EOS, **({"layer_types": types[name]} if name in types else {}))
        write_tokenizer(checkpoint, tinytext_tokenizer(PIECES))
    drafts = 2 if name == "deep" else K
    options = {"max_batch_size": SLOTS, "draft_tokens": drafts, "max_model_len": LENGTH}
    bundle = build_bundle(checkpoint, place / "bundle", **options)
    model = on_torch(bundle) if name == "torch" else load_model(bundle)
    model.engine.limits = replace(model.engine.limits, prefill_chunk=CHUNK)
    return model


def on_torch(bundle: Path) -> Model:
    """The runner of the GPUs, by PyTorch on a CPU."""
    before = torch.get_num_threads()
    model = load(bundle, options=EngineOptions(backend="torch", device="cpu", threads=1))
    # They are those of the whole process.
    torch.set_num_threads(before)
    return model


def is_exact(model: Model) -> bool:
    """Whether rows do not depend on others to the last bit; PyTorch's products on a CPU round by their size."""
    return not isinstance(model.engine, DeviceEngine)


def said(finished: Finished) -> tuple[Any, ...]:
    """Everything but times and what was cached."""
    return (
        finished.token_ids,
        finished.text,
        finished.finish_reason,
        finished.prompt_tokens,
        finished.completion,
        finished.logprobs,
        finished.prompt_logprobs,
        finished.constraint,
        counts(finished),
    )


def request(**values: Any) -> Request:
    """A request by names, checked as one from outside would be."""
    return request_from(values, "the request")


def alone(model: Model, asked: Request) -> list[tuple[Any, ...]]:
    """What a request says by itself; where it would run in whole cycles, which count otherwise, in a slot."""
    if is_exact(model):
        return _repeatable(asked, [said(finished) for finished in model.complete_all(asked)])
    one = scheduler(model, slots=1)
    ticket = one.submit(asked)
    drive(one)
    return told_in(ticket)


def told_in(ticket: Ticket) -> list[tuple[Any, ...]]:
    """What a finished ticket was told."""
    return _repeatable(ticket.request, [said(finished) for finished in ticket.results()])


def _repeatable(asked: Request, told: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Without the statistics where K follows from measured times; tokens never do."""
    return [one[:-1] for one in told] if asked.draft_tokens == AUTO else told


def scheduler(model: Model, watch: Watch | None = None, **options: Any) -> Scheduler:
    """Without a thread; its rounds are steps of the test."""
    return Scheduler(model, BatchOptions(**{"prefix_bytes": 0, "prefill_budget": CHUNK, **options}), watch)


def drive(scheduler: Scheduler, most: int = 5000) -> int:
    """Steps until nothing is left to do; how many they were."""
    for count in range(1, most):
        if not scheduler.step():
            return count
    raise AssertionError(f"still not done after {most} rounds")


def staggered(
    scheduler: Scheduler, requests: Sequence[Request], gaps: Callable[[int], int] = lambda index: index % 3
) -> list[Ticket]:
    """Submit requests, `gaps(i)` rounds before the i-th, and run them to their ends."""
    tickets = []
    for index, asked in enumerate(requests):
        for _ in range(gaps(index)):
            scheduler.step()
        tickets.append(scheduler.submit(asked))
    drive(scheduler)
    return tickets


@dataclass
class Heard:
    """A listener that remembers everything, and may do something at each event."""

    then: Callable[[Told], None] = lambda told: None
    all: list[Told] = field(default_factory=list)

    def __call__(self, told: Told) -> None:
        self.all.append(told)
        self.then(told)

    @property
    def ids(self) -> list[int]:
        return [token for event in self.all if isinstance(event, Emitted) for token in event.token_ids]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.all if isinstance(event, Emitted))

    @property
    def ends(self) -> list[Finished | Failed]:
        return [event for event in self.all if isinstance(event, Finished | Failed)]

    @property
    def finished(self) -> Finished:
        (end,) = self.ends
        assert isinstance(end, Finished)
        return end


def mixed(count: int, *, seed: int, size: int, most: int = K, text: bool = True, exact: bool = True) -> list[Request]:
    """Requests in which everything varies that may vary inside a batch; if not `exact`, nothing shows roundings."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(count):
        depth: Any = [0, 1, 2, 3, 4, "auto" if exact else 4][int(rng.integers(0, 6))]
        depth = depth if depth == "auto" else min(depth, most)
        prompt = rng.integers(0, size, int(rng.choice([1, 2, 5, 15, 16, 17, 21, 40]))).tolist()
        values: dict[str, Any] = {
            "prompt_ids": prompt,
            "max_new_tokens": int(rng.choice([0, 1, 2, 5, 12, 25])),
            "draft_tokens": depth,
            "ignore_eos": bool(rng.integers(0, 2)),
        }
        drafter = ["mtp", "mtp", "ngram", "mtp+ngram", "none"][int(rng.integers(0, 5))]
        if drafter == "none":
            values["draft_tokens"] = 0
        values["drafter"] = drafter
        kind = index % 8
        if kind in (1, 5):
            values |= {"temperature": 0.9, "seed": index, "top_p": 0.9, "logprobs": 2}
        if kind == 2:
            values |= {"repetition_penalty": 1.4, "logit_bias": {3: 2.0}, "bad_words": [[4]]}
        if kind == 3 and depth != "auto":
            values |= {"verify": "step"}
        if kind == 4 and drafter.startswith("mtp") and depth:
            values |= {"draft_confidence": 0.4}
        if kind == 5:
            values |= {"n": 2}
        if kind == 6:
            values |= {"prompt_logprobs": 1, "logprobs": 0}
        if kind == 7:
            values |= {"temperature": 1.1, "seed": index, "acceptor": ["rejection", "typical"][index % 16 > 7]}
        if text and kind in (0, 5):
            values |= {"stop": ["ab", "Q", "tu"]}
        if text and kind == 6:
            values |= {"regex": "[a-p]+(,[A-Z]{3})?[0-9]{2,9}x"}
        if not exact:
            values |= {"logprobs": None, "prompt_logprobs": None}
        made.append(request(**values))
    return made
