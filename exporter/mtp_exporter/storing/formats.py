"""How matrices are stored: which take the format that was asked for, and what their values are then."""

from __future__ import annotations

from mtp_engines.contracts.manifest import WeightFormat, WeightFormats
from mtp_exporter.families.description import Claimed, Need
from mtp_exporter.reading.source import Floats, Source, Values
from mtp_exporter.storing.blocks import four_bits
from mtp_exporter.storing.rotated import eight_bits, widened
from mtp_plugins.block_weight.reference import block_weight, turning

FORMATS: tuple[WeightFormat, ...] = ("fp32", "int8", "int4")
_UNIT = 32
_VOCABULARY = ("embedding", "head", "mtp.embedding", "mtp.head")
_WIDE = ("a", "b", "router", "shared_gate")
"""Small matrices that decide: decays and write strengths of a recurrence, which experts a row goes to."""


def format_of(formats: WeightFormats, need: Need) -> WeightFormat:
    """The format of a value.

    Integers have matrices of two axes whose columns are a multiple of 32 and more than 32, but for those of `_WIDE`.
    """
    name = need.role.rsplit(".", 1)[-1]
    if len(need.shape) != 2 or need.transform != "none" or name in _WIDE:
        return "fp32"
    if need.shape[1] % _UNIT or need.shape[1] == _UNIT:
        return "fp32"
    if need.role in _VOCABULARY:
        return formats.head
    return formats.mtp if need.role.startswith("mtp.") else formats.target


def is_gathered(need: Need) -> bool:
    """Whether single rows of the matrix are read, or may be: embeddings, and heads that can be tied to them."""
    return need.role in _VOCABULARY


def rounded(values: Floats, kind: WeightFormat) -> Floats:
    """float32[rows, columns] as a bundle holds them."""
    if kind == "int4":
        return block_weight(*four_bits(values), turning(), values.shape[1])
    if kind == "int8":
        return widened(*eight_bits(values))
    return values


class StoredSource(Source):
    """The values of a checkpoint as a bundle of some formats holds them."""

    def __init__(self, claimed: Claimed, formats: WeightFormats, prefix: str = "") -> None:
        super().__init__(claimed, prefix)
        self._formats = formats

    def below(self, prefix: str) -> StoredSource:
        """The values whose role starts with `prefix`."""
        return StoredSource(self._claimed, self._formats, self._prefix + prefix)

    def rows(self, role: str, start: int, count: int) -> Values:
        """Some entries of the first axis, rounded where the bundle rounds them."""
        values = super().rows(role, start, count)
        return rounded(values, format_of(self._formats, self.need(role)))
