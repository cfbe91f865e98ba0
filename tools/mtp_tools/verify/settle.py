"""Whether a difference from plain decoding is rounding, which may flip a near tie, or a fault.

A run is repeated call by call, and plain decoding follows the run's own text one row at a time, so that logits, hidden
rows and states of both paths lie side by side after every cycle, behind a flipped token too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mtp_engines.engine import Floats, Sequences
from mtp_runtime.api import Model
from mtp_tools.verify.runs import Call, Outcome, Plain, Wrap

Precision = Literal["fp32", "bf16", "fp16"]
_FRACTION_BITS: dict[Precision, int] = {"fp32": 23, "bf16": 7, "fp16": 10}
_HALF_STEPS = 8.0


@dataclass(frozen=True)
class Rounding:
    """What two correct ways of computing the same values may differ by, in steps of the type they are computed in.

    A step is the spacing of that type at the largest magnitude of the values compared. In float32 the sums themselves
    round, and a sum of n products goes astray by about the root of n: allowed are 4 times the root of the hidden size.
    Measured on the carried checkpoint in PyTorch on a CPU, hidden size 256, over 280 tokens: up to 13 steps of the 64.
    The half types are summed in float32, so that only what is stored rounds, whatever its width: allowed are 8. No
    device has confirmed that number yet.
    """

    precision: Precision
    hidden_size: int

    @property
    def allowed(self) -> float:
        """Steps that count as rounding."""
        return 4.0 * math.sqrt(self.hidden_size) if self.precision == "fp32" else _HALF_STEPS

    def step(self, magnitude: float) -> float:
        """The spacing of the type at a magnitude."""
        smallest = float(np.finfo(np.float32).tiny)
        return math.ldexp(1.0, math.frexp(max(magnitude, smallest))[1] - 1 - _FRACTION_BITS[self.precision])

    def steps(self, ours: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> float:
        """The largest difference of two arrays of one shape; infinite if the shapes differ."""
        if ours.shape != theirs.shape:
            return math.inf
        if not ours.size:
            return 0.0
        left, right = ours.astype(np.float64), theirs.astype(np.float64)
        return float(np.abs(left - right).max()) / self.step(max(float(np.abs(left).max()), float(np.abs(right).max())))


@dataclass(frozen=True)
class Flip:
    """A token that plain decoding, behind the same text, does not say.

    Attributes:
        index: of the token in the answer.
        said: by the run.
        first, second: the best two ids of plain decoding's logits.
        gap: between these two.
        behind: how far the token that was said is behind the best one.
        apart: the largest difference between both paths' logits there.
        step: of the type at their largest magnitude.
        allowed: steps that count as rounding.
        is_best: whether the run's own logits have no better token.
    """

    index: int
    said: int
    first: int
    second: int
    gap: float
    behind: float
    apart: float
    step: float
    allowed: float
    is_best: bool

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains it: two logits that each move by `apart` may change places across twice that."""
        return self.is_best and self.behind <= 2 * self.apart <= 2 * self.allowed * self.step

    def __str__(self) -> str:
        other = "" if self.said in (self.first, self.second) else f", and the run says {self.said}"
        return (
            f"token {self.index}: plain decoding's best two ids {self.first} and {self.second} are {self.gap:.2e} "
            f"apart{other}; the two paths' logits there differ by up to {self.apart:.2e}, "
            f"{self.apart / self.step:.3g} steps of {self.step:.2e}, {self.allowed:.0f} count as rounding: "
            f"{'near tie' if self.is_near_tie else 'bug'}"
        )


@dataclass(frozen=True)
class Settlement:
    """What became of a difference.

    Attributes:
        flips: the tokens that differ, up to the first fault.
        most: the largest difference that is rounding, in steps.
        fault: what is no rounding; None where all of it is.
    """

    flips: tuple[Flip, ...]
    most: float
    fault: str | None

    @property
    def is_rounding(self) -> bool:
        """Whether every difference is explained."""
        return self.fault is None

    def __str__(self) -> str:
        parts = [str(flip) for flip in self.flips]
        parts += [f"up to {self.most:.3g} steps of rounding"] if self.fault is None else []
        parts += [f"{self.fault}: bug"] if self.fault else []
        return "; ".join(parts)


def settle(model: Model, plain: Plain, outcome: Outcome, rounding: Rounding, wrap: Wrap | None = None) -> Settlement:
    """Repeat a run that differs from plain decoding, beside plain decoding of the same text.

    Args:
        wrap: the fault of that run, for controls.
    """
    flips: list[Flip] = []
    most, fault = 0.0, None
    for found in _differences(model, plain, outcome, rounding, wrap):
        if isinstance(found, Flip):
            flips.append(found)
            fault = fault or (None if found.is_near_tie else f"token {found.index} is no near tie")
        elif fault is None:
            what, steps = found
            if steps > rounding.allowed:
                fault = f"{what} differs by {steps:.3g} steps, {rounding.allowed:.0f} count as rounding"
            most = max(most, steps)
        if fault and (flips or outcome.first_token is None):
            # Behind a fault everything differs; the first token that does is told.
            break
    return Settlement(tuple(flips), most, fault or _unexplained(outcome, flips, most))


def _unexplained(outcome: Outcome, flips: list[Flip], most: float) -> str | None:
    """What the run did and its repetition did not."""
    if outcome.first_token is not None and all(flip.index != outcome.first_token for flip in flips):
        return f"token {outcome.first_token} differs, and does not when the run is repeated"
    if most == 0:
        return "the difference does not come back when the run is repeated"
    return None


def _differences(
    model: Model, plain: Plain, outcome: Outcome, rounding: Rounding, wrap: Wrap | None
) -> Iterator[Flip | tuple[str, float]]:
    """In the order of the text: what was compared and how many steps it is apart, and flipped tokens."""
    inner, alone = model.engine.sequences(), model.engine.sequences()
    together = wrap(inner) if wrap else inner
    for call in outcome.calls:
        start = int(alone.lengths[0])
        hidden, logits, _ = _ask(together, call)
        in_prompt = start < len(plain.prompt)
        rows = [call] if in_prompt else [Call(call.tokens[:, row : row + 1], 1, 1) for row in range(call.kept)]
        answers = [_ask(alone, row) for row in rows]
        expected = [row for answer in answers for row in answer[0]]
        scores = [row for answer in answers for row in answer[1]]
        choices = [choice for answer in answers for choice in answer[2]]
        if inner.lengths[0] != alone.lengths[0]:
            yield f"the number of committed rows, {inner.lengths[0]} after {alone.lengths[0]} emitted tokens,", math.inf
        for row in range(call.kept):
            yield f"the hidden state of position {start + row}", rounding.steps(hidden[row], expected[row])
        for ours, theirs, choice, place in zip(
            logits, scores, choices, range(start + call.kept - len(scores), start + call.kept), strict=True
        ):
            index = place - len(plain.prompt) + 1
            if choice != outcome.ids[index]:
                yield _flip(index, outcome.ids[index], choice, ours, theirs, rounding)
            yield f"the logits of position {place}", rounding.steps(ours, theirs)
        if plain.states and start + call.kept >= len(plain.prompt):
            states = inner.snapshot(0)
            for name, state in alone.snapshot(0).items():
                length = start + call.kept
                yield f"state {name} at {length} committed tokens", rounding.steps(states[name], state)


def _ask(sequences: Sequences, call: Call) -> tuple[Floats, list[Floats], list[int]]:
    """Hidden rows, logits and choices of the rows that a call kept; of a prompt fewer rows are scored than kept."""
    verified = sequences.verify(call.tokens, call.logit_rows, logits=call.logit_rows > 0)
    hidden = verified.hidden[0, : call.kept].copy()
    scored = max(call.logit_rows - (call.tokens.shape[1] - call.kept), 0)
    logits = [] if verified.logits is None else list(verified.logits[0, :scored].copy())
    choices: list[int] = verified.ids[0, :scored].tolist()
    sequences.commit(np.array([call.kept]))
    return hidden, logits, choices


def _flip(index: int, said: int, choice: int, ours: Floats, theirs: Floats, rounding: Rounding) -> Flip:
    """`ours` and `theirs` are float32[vocab_size] of the run and of plain decoding, which takes `choice`."""
    others = theirs.copy()
    others[choice] = -np.inf
    second = int(others.argmax())
    step = rounding.step(float(max(np.abs(ours).max(), np.abs(theirs).max())))
    return Flip(
        index,
        said,
        choice,
        second,
        float(theirs[choice] - theirs[second]),
        float(theirs[choice] - theirs[said]),
        float(np.abs(ours - theirs).max()),
        step,
        rounding.allowed,
        bool(ours[said] >= ours.max()),
    )
