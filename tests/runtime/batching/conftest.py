"""Models that several tests of batching share; each is built and loaded once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mtp_runtime import Model
from tests.runtime.batching.parts import build_family

Families = Callable[[str], Model]


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    """By name: families("deep"); see `FAMILIES`."""
    models: dict[str, Model] = {}

    def get(name: str) -> Model:
        if name not in models:
            models[name] = build_family(name, tmp_path_factory.mktemp(name))
        return models[name]

    return get


@pytest.fixture(scope="session")
def hybrid(families: Families) -> Model:
    """Recurrent and attention layers, a head that is right sometimes, text."""
    return families("hybrid")
