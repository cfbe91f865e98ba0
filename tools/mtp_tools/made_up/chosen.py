"""Weights with which target and draft head follow a chosen `Successors`, at the size and cost of the shape.

Embedding row j is [code of j, code of the token before j for the target, code of the token before j for the draft],
each code a third of the width of random signs, and one constant column. The head has the same rows, so that it
may be tied. Every projection that writes into the residual stream is zero, so a token's hidden state is its embedding,
but for two wires:

* the last layer's MLP adds the first third, enlarged, to the second: the final norm lets the second third through
  alone, and the head row that has this code there is the target's next token;
* the draft head's fusion takes the first third of the embedding to the third one, and ignores the hidden state: the
  drafts of a chain depend on the token before them only, however long the chain.

Everything else is random as without a chosen acceptance, and every matrix is read and multiplied as always.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from mtp_engines.errors import BuildError
from mtp_tools.made_up.shapes import PublishedShape
from mtp_tools.made_up.successors import Successors, Tokens, keys, mix

Block = npt.NDArray[Any]
Random = Callable[[tuple[int, ...]], Iterator[Block]]
_BLOCK_VALUES = 1 << 22
_CODES = 3
_TOKEN_ROWS = ("embed_tokens.weight", "lm_head.weight")
_ZERO = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "mtp.fc.weight")
# Powers of two, so that bfloat16 holds the states that they lead to. An embedding is +-1/16; the wire adds
# 8 (what the SiLU of 8 leaves of it) times 1/8.
_POSITIVE, _NEGATIVE = 0x3D80, 0xBD80
_GATE, _WRITE = 8.0, 0.125
_ENLARGED = 16
# Two codes of a vocabulary may agree in this part (their correlation) before a logit can be the wrong way round.
_LIMIT = 1 - 2 / _ENLARGED
_RISK = 1e-3


@dataclass(frozen=True)
class Wire:
    """Rows of a matrix with one value each: row first_row + i has it in column first_column + i * step."""

    first_row: int
    first_column: int
    step: int
    value: float


class ChosenWeights:
    """Replaces tensors of a made-up checkpoint, block by block."""

    def __init__(self, shape: PublishedShape, successors: Successors, seed: int) -> None:
        """Target and draft head are to follow `successors`; the seed is that of the codes.

        Raises:
            BuildError: the shape is too narrow for its vocabulary, or its MLP too narrow for a code.
        """
        self._successors, self._hidden = successors, shape.hidden
        self.code = (shape.hidden - 1) // 3
        """Width of a code."""
        if (risk := clash_bound(successors.vocab, self.code)) > _RISK or shape.intermediate < self.code:
            raise BuildError(
                f"A width of {shape.hidden} with an MLP of {shape.intermediate} cannot tell {successors.vocab} tokens "
                f"apart: two clash with a probability of up to {min(risk, 1.0):.1g}, and the MLP must have {self.code} "
                "neurons. Take a wider shape."
            )
        self._key = keys(seed, _CODES, 1)[0]
        text, last = "model.language_model.", f"model.language_model.layers.{shape.layers - 1}."
        code, constant = self.code, shape.hidden - 1
        self._wires = {
            f"{last}mlp.gate_proj.weight": Wire(0, constant, 0, _GATE),
            f"{last}mlp.up_proj.weight": Wire(0, 0, 1, 1.0),
            f"{last}mlp.down_proj.weight": Wire(code, 0, 1, _WRITE),
            "mtp.fc.weight": Wire(2 * code, 0, 1, 1.0),
        }
        neutral = np.zeros(shape.hidden, ml_dtypes.bfloat16)
        second = np.full(shape.hidden, -1.0, ml_dtypes.bfloat16)
        second[code : 2 * code] = 0.0
        # Zero-centred: a gain is 1 + w.
        self._gains = {
            f"{last}post_attention_layernorm.weight": neutral,
            f"{text}norm.weight": second,
            "mtp.pre_fc_norm_embedding.weight": neutral,
            "mtp.norm.weight": neutral,
        }

    def blocks(self, name: str, axes: tuple[int, ...], random: Random) -> Iterator[Block]:
        """A tensor in pieces; `random` makes random ones of any shape on the same scale."""
        if name in self._gains:
            yield self._gains[name]
        elif name.endswith(_TOKEN_ROWS):
            step = max(1, _BLOCK_VALUES // self._hidden)
            for start in range(0, axes[0], step):
                yield self.rows(np.arange(start, min(start + step, axes[0])))
        else:
            base = _zeros if name.endswith(_ZERO) else random
            yield from self._wired(self._wires[name], axes, base) if name in self._wires else base(axes)

    def rows(self, tokens: Tokens) -> Block:
        """bfloat16[tokens, hidden]: the rows of embedding and head."""
        before = self._successors
        places = (tokens, before.before_target(tokens), before.before_draft(tokens))
        signs = np.zeros((len(tokens), self._hidden), np.uint8)
        for index, source in enumerate(places):
            signs[:, index * self.code : (index + 1) * self.code] = self._signs(source)
        return np.where(signs, np.uint16(_NEGATIVE), np.uint16(_POSITIVE)).view(ml_dtypes.bfloat16)

    def _signs(self, tokens: Tokens) -> Block:
        """uint8[tokens, code] of 0 and 1, always the same for a token."""
        words = -(-self.code // 64)
        counters = tokens.astype(np.uint64)[:, None] * np.uint64(words) + np.arange(words, dtype=np.uint64)
        return np.unpackbits(mix(counters + self._key).view(np.uint8), axis=1)[:, : self.code]

    def _wired(self, wire: Wire, axes: tuple[int, ...], base: Random) -> Iterator[Block]:
        rows, columns = axes
        yield from base((wire.first_row, columns))
        step = max(1, _BLOCK_VALUES // columns)
        for start in range(0, self.code, step):
            places = np.arange(start, min(start + step, self.code))
            block = np.zeros((len(places), columns), ml_dtypes.bfloat16)
            block[np.arange(len(places)), wire.first_column + places * wire.step] = wire.value
            yield block
        yield from base((rows - wire.first_row - self.code, columns))


def clash_bound(vocab: int, code: int, limit: float = _LIMIT) -> float:
    """Upper bound of the probability that any two of the codes agree beyond `limit`, after Hoeffding."""
    return vocab**2 * math.exp(-code * limit**2 / 2)


def _zeros(axes: tuple[int, ...]) -> Iterator[Block]:
    left = math.prod(axes)
    while left:
        size = min(left, _BLOCK_VALUES)
        yield np.zeros(size, ml_dtypes.bfloat16)
        left -= size
