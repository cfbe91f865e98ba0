"""What config.json says about quantisation, as far as the files cannot say it themselves.

Lists of ignored or converted modules are not read at all: they are patterns that each library matches
in its own way, and the headers say the same without a doubt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mtp_exporter.quantised.stored import UnreadableError

_SECTIONS = ("quantization_config", "compression_config")
_DEFAULT_BLOCK = (128, 128)
# AutoRound writes the layouts of the others and says which one in a field of its own.
_AUTO_ROUND = {"auto_round:auto_gptq": ("gptq", "gptq"), "auto_round:auto_awq": ("awq", "gemm")}


@dataclass(frozen=True)
class Settings:
    """Statements of a quantisation section; empty or None where it says nothing."""

    method: str | None
    layout: str | None
    """Variant of the packing: "gptq", "gptq_v2", "gemm", and names that are refused."""
    bits: frozenset[int]
    """Of any module, overrides for single modules included."""
    group_sizes: frozenset[int]
    symmetric: frozenset[bool]
    reordered: bool
    """Columns were sorted by activation before they were grouped."""
    _blocks: tuple[Any, ...]

    @property
    def has_blocks(self) -> bool:
        """Whether a block size is stated."""
        return bool(self._blocks)

    def blocks(self) -> tuple[tuple[int, int], ...]:
        """Sizes [rows, columns] of the blocks that share an fp8 scale.

        Raises:
            UnreadableError: a stated size is not a pair of positive numbers.
        """
        for block in self._blocks:
            if not (isinstance(block, list) and len(block) == 2 and all(_is_count(size) for size in block)):
                raise UnreadableError(f"config.json states the block size {block!r}, expected two positive numbers")
        stated = dict.fromkeys((rows, columns) for rows, columns in self._blocks)
        return tuple(stated) or (_DEFAULT_BLOCK,)


def read_settings(config: Mapping[str, Any]) -> Settings:
    """The quantisation section of a configuration, or of its text part."""
    section = _section(config)
    groups = section.get("config_groups")
    schemes = list(_schemes(groups)) if isinstance(groups, Mapping) else []
    # Overrides for single modules have the same field names one or two levels deeper.
    stated = schemes or list(_mappings(section))
    method, layout = _method(section)
    return Settings(
        method=method,
        layout=layout,
        bits=frozenset(_numbers(stated, "bits", "num_bits", "w_bit")),
        group_sizes=frozenset(_numbers(stated, "group_size", "q_group_size")) | _whole_rows(schemes),
        symmetric=frozenset(v for s in stated for k in ("sym", "symmetric") if isinstance(v := s.get(k), bool)),
        reordered=any(s.get("desc_act") is True for s in stated),
        _blocks=tuple(
            s[k] for s in [section, *schemes] for k in ("weight_block_size", "block_structure") if s.get(k) is not None
        ),
    )


def _section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for owner in (config, config.get("text_config")):
        for key in _SECTIONS:
            if isinstance(owner, Mapping) and isinstance(owner.get(key), Mapping):
                section: Mapping[str, Any] = owner[key]
                return section
    return {}


def _method(section: Mapping[str, Any]) -> tuple[str | None, str | None]:
    method = _text(section.get("quant_method"))
    if method is not None and method.endswith("auto-round"):
        packing = _text(section.get("packing_format"))
        return _AUTO_ROUND.get(packing or "", (method, packing))
    layouts = [_text(section.get(key)) for key in ("checkpoint_format", "format", "version")]
    named = list(dict.fromkeys(layout for layout in layouts if layout is not None))
    return method, " and ".join(named) or None


def _schemes(groups: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            yield weights


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        yield value
        for inner in value.values():
            yield from _mappings(inner)


def _numbers(stated: list[Mapping[str, Any]], *keys: str) -> Iterator[int]:
    for section in stated:
        for key in keys:
            value = section.get(key)
            if isinstance(value, int) and not isinstance(value, bool):
                yield value


def _whole_rows(schemes: list[Mapping[str, Any]]) -> frozenset[int]:
    """-1 if a scheme has one group in a row, which it says by naming no size."""
    return frozenset(-1 for s in schemes if s.get("group_size") is None and s.get("strategy") in ("channel", "tensor"))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _text(value: Any) -> str | None:
    return value.lower() if isinstance(value, str) and value else None
