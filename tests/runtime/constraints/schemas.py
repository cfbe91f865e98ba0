"""Small JSON schemas from a seed, of every kind that answers of a few tokens can satisfy."""

from __future__ import annotations

from typing import Any

import numpy as np

NAMES = ("a", "name", "größe", "键", "x y", 'q"t', "😀", "n_1")
PATTERNS = ("^[a-c]{2,4}$", "^(on|off)$", "^[A-Z][0-9]{2}$", "^x?y*z$")
COMPACT = {"whitespace_flexible": False}
CONSTANTS: tuple[Any, ...] = (0, -7, 2.5, True, None, "", "ja", "naïve ☃", 'a"b\\c', [1, "b"], {"k": 1})


def schema(seed: int) -> dict[str, Any]:
    """The schema of a seed: three times out of four an object; every second one without blanks, so that more fits."""
    rng = np.random.default_rng(seed)
    made = _object(rng, 2) if rng.random() < 0.75 else _any(rng, 2)
    return made | ({"x-guidance": COMPACT} if seed % 2 else {})


def _any(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    leaves = [_integer, _number, _word, _string, _enum, _const, _plain]
    inner = [_object, _array, _any_of]
    if depth and rng.random() < 0.5:
        return inner[rng.integers(len(inner))](rng, depth - 1)
    return leaves[rng.integers(len(leaves))](rng)


def _object(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    names = [str(name) for name in rng.permutation(NAMES)[: rng.choice(4, p=[0.1, 0.4, 0.4, 0.1])]]
    made: dict[str, Any] = {"type": "object", "properties": {name: _any(rng, depth) for name in names}}
    if names:
        made["required"] = names[: len(names) - rng.choice(2, p=[0.7, 0.3])]
    made["additionalProperties"] = _integer(rng) if rng.random() < 0.1 else False
    return made


def _array(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    least = int(rng.integers(0, 3))
    return {"type": "array", "items": _any(rng, depth), "minItems": least, "maxItems": least + int(rng.integers(0, 2))}


def _any_of(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth) for _ in range(rng.integers(1, 4))]}


def _integer(rng: np.random.Generator) -> dict[str, Any]:
    least = int(rng.integers(-20, 20))
    made = {"type": "integer", "minimum": least, "maximum": least + int(rng.integers(3, 2000))}
    return made | ({"multipleOf": 3} if rng.random() < 0.3 else {})


def _number(rng: np.random.Generator) -> dict[str, Any]:
    return {"type": "number", "minimum": int(rng.integers(-5, 1)), "exclusiveMaximum": int(rng.integers(2, 9))}


def _word(rng: np.random.Generator) -> dict[str, Any]:
    least = int(rng.integers(0, 3))
    return {"type": "string", "minLength": least, "maxLength": least + int(rng.integers(0, 9))}


def _string(rng: np.random.Generator) -> dict[str, Any]:
    return {"type": "string", "pattern": PATTERNS[rng.integers(len(PATTERNS))]}


def _enum(rng: np.random.Generator) -> dict[str, Any]:
    return {"enum": [CONSTANTS[place] for place in rng.permutation(len(CONSTANTS))[: rng.integers(1, 5)]]}


def _const(rng: np.random.Generator) -> dict[str, Any]:
    return {"const": CONSTANTS[rng.integers(len(CONSTANTS))]}


def _plain(rng: np.random.Generator) -> dict[str, Any]:
    return {"type": ("boolean", "null")[rng.integers(2)]}
