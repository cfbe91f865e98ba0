"""Whole cycles on the device: the same tokens for every K, with CUDA graphs and without, and what they cost."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from mtp_engines.backends.gpu.engine import DeviceEngine
from mtp_engines.backends.gpu.sequences import DeviceSequences
from mtp_engines.contracts.manifest import Limits
from mtp_engines.contracts.model import ModelSpec
from mtp_engines.engine import Ids
from mtp_engines.promise import measure_promise
from mtp_tools.device.models import Variant
from mtp_tools.device.results import Results

Tensor = torch.Tensor


class Model(Protocol):
    """What cycles are run with."""

    name: str
    spec: ModelSpec
    limits: Limits

    def engine(self, variant: Variant) -> DeviceEngine:
        """The model on the device."""


class Script:
    """Drafts from a list of known tokens in the place of the head's, some of them wrong on purpose.

    The head still runs, so that its time counts.
    """

    def __init__(self, tokens: list[int], acceptance: float, vocab_size: int, device: torch.device, seed: int) -> None:
        wrong = np.random.default_rng(seed).random(len(tokens)) >= acceptance
        drafts = np.where(wrong, (np.array(tokens) + 1) % vocab_size, tokens)
        self._drafts = torch.from_numpy(drafts).to(device)

    def __call__(self, lengths: Tensor, drafted: list[Tensor]) -> list[Tensor]:
        """Token lengths + 1 + j in the place of draft j."""
        last = len(self._drafts) - 1
        return [self._drafts[(lengths + 1 + j).long().clamp_max(last)] for j in range(len(drafted))]


@dataclass(frozen=True)
class Amount:
    """How much is run.

    Attributes:
        prompt, new_tokens: of every generation.
        text_rows: of the test whether rows depend on their number.
        widths: values of K beside 0.
        acceptances: forced ones, for speed.
        rounds: repetitions of a measured generation.
    """

    prompt: list[int]
    new_tokens: int
    text_rows: int
    widths: tuple[int, ...]
    acceptances: tuple[float, ...]
    rounds: int


class CycleChecks:
    """Checks and times of one model."""

    def __init__(self, model: Model, amount: Amount, device: torch.device, results: Results) -> None:
        self._model, self._amount, self._device, self._results = model, amount, device, results
        self._prompt, self._new = amount.prompt, amount.new_tokens

    def run(self, variant: Variant) -> list[int]:
        """Tokens for every K, with graphs and without; returns prompt and answer of plain decoding."""
        name = f"{self._model.name} {variant}"
        engine = self._model.engine(variant)
        text = np.resize(np.array(self._prompt, np.int64), self._amount.text_rows)
        promise = measure_promise(engine, text)
        self._results.measured("cycles", f"{name}: rows", f"{promise.promise} {promise.first_difference or ''}")
        plain = self._generate(engine.sequences(), 0)
        for k in self._amount.widths:
            sequences = engine.sequences()
            # Sequences inherit the graphs of those before them.
            before = sequences.captured
            tokens = self._generate(sequences, k)
            graphs = sequences.captured - before
            same = tokens == plain
            # Equality is promised only where rows were found not to depend on their number.
            where = "" if same else f"differs at token {_first_difference(tokens, plain)}"
            if promise.promise == "exact":
                self._results.claim("cycles", f"{name}: K={k} equals plain decoding", same, where)
            else:
                self._results.measured("cycles", f"{name}: K={k} equals plain decoding", where or "yes")
            if self._device.type == "cuda" and variant.graphs:
                self._results.claim("graphs", f"{name}: K={k} was captured", graphs > 0, f"{graphs} graphs")
        eager = self._model.engine(Variant(variant.precision, variant.skinny, graphs=False))
        for k in self._amount.widths:
            same = self._generate(eager.sequences(), k) == self._generate(engine.sequences(), k)
            self._results.claim("graphs", f"{name}: K={k} tokens equal without graphs", same)
        self._control(engine, plain)
        return self._prompt + plain

    def times(self, variant: Variant, known: list[int]) -> None:
        """Tokens a second at forced acceptance against plain decoding, in turns."""
        name = f"{self._model.name} {variant}"
        engine = self._model.engine(variant)
        for acceptance in self._amount.acceptances:
            script = Script(known, acceptance, self._model.spec.vocab_size, self._device, 5)
            rates: dict[int, list[float]] = {k: [] for k in (0, *self._amount.widths)}
            each: dict[int, float] = {}
            opened = {k: engine.sequences() for k in rates}
            warm = min(1, self._amount.rounds - 1)
            for number in range(self._amount.rounds + warm):
                for k, sequences in opened.items():
                    rate, each[k] = self._rate(sequences, k, script)
                    if number >= warm:  # The first round warms up and captures.
                        rates[k].append(rate)
            base = float(np.median(rates[0]))
            for k in self._amount.widths:
                rate, least, most = float(np.median(rates[k])), min(rates[k]), max(rates[k])
                value = f"{rate:.1f} tok/s ({least:.1f}..{most:.1f}), {rate / base:.2f}x of {base:.1f}"
                value += f", {each[k]:.2f} tokens a cycle"
                self._results.measured("speed", f"{name}: K={k}, {acceptance:.0%} of drafts right", value)

    def split(self, variant: Variant) -> None:
        """Time of a cycle by K; with one width, the difference to K = 0 is the head's."""
        name = f"{self._model.name} {variant}"
        engine = self._model.engine(variant)
        taken = {k: self._cycle_times(engine.sequences(), k) for k in (0, *self._amount.widths)}
        for k, times in taken.items():
            more = "" if k == 0 else f", {(np.median(times) - np.median(taken[0])) * 1e3:+.2f} ms to K=0"
            self._results.measured("split", f"{name}: cycle K={k}", f"{np.median(times) * 1e3:.2f} ms{more}")

    def _generate(self, sequences: DeviceSequences, draft_tokens: int) -> list[int]:
        first = sequences.prefill(self._ids(), drafting=draft_tokens > 0)
        tokens = [int(first[0])]
        while len(tokens) < self._new:
            tokens += sequences.cycle(draft_tokens).emitted[0]
        return tokens[: self._new]

    def _rate(self, sequences: DeviceSequences, draft_tokens: int, script: Script) -> tuple[float, float]:
        """Tokens a second after the prompt, and tokens a cycle."""
        sequences.reset()
        sequences.redraft(script if draft_tokens else None)
        sequences.prefill(self._ids(), drafting=draft_tokens > 0)
        emitted, cycles, start = 0, 0, time.perf_counter()
        while emitted < self._new - 1:
            emitted += len(sequences.cycle(draft_tokens).emitted[0])
            cycles += 1
        return emitted / (time.perf_counter() - start), emitted / cycles

    def _cycle_times(self, sequences: DeviceSequences, draft_tokens: int) -> list[float]:
        sequences.prefill(self._ids(), drafting=draft_tokens > 0)
        times = []
        # The first run is eager, and each of the two sets of staged rows is captured once.
        warm = min(5, self._amount.rounds - 1)
        for _ in range(2 * self._amount.rounds + warm):
            start = time.perf_counter()
            sequences.cycle(draft_tokens)
            times.append(time.perf_counter() - start)
        return times[warm:]

    def _control(self, engine: DeviceEngine, plain: list[int]) -> None:
        """Tokens of another prompt have to differ, or the comparison sees nothing."""
        prompt, self._prompt = self._prompt, self._prompt[::-1]
        try:
            other = self._generate(engine.sequences(), 0)
        finally:
            self._prompt = prompt
        self._results.claim("cycles", f"control: {self._model.name} answers another prompt otherwise", other != plain)

    def _ids(self) -> Ids:
        return np.array([self._prompt], np.int64)


def _first_difference(a: list[int], b: list[int]) -> int:
    return next(place for place, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
