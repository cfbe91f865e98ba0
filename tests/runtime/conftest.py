"""Bundles that several tests of the runtime share; each is built and loaded once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtp_runtime import Model
from tests.fixtures.checkpoints import markov_checkpoint, partial_checkpoint, random_checkpoint, tinytext_tokenizer
from tests.runtime.decoding import TARGET
from tests.support import build_bundle, load_model

Models = Callable[..., Model]
CARRIED = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-mtp"


@pytest.fixture(scope="session")
def markov(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Chains: markov(draft="third", eos=12, pieces=(...)); build holds options of the build."""
    return _cached(tmp_path_factory, markov_checkpoint)


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Random hybrids: hybrid(seed=30)."""
    return _cached(tmp_path_factory, random_checkpoint)


@pytest.fixture(scope="session")
def partial(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A hybrid whose own head is right sometimes, room for 128 tokens, K to 8, batches to 5."""
    options = {"max_model_len": 128, "draft_tokens": 8, "max_batch_size": 5}
    return _cached(tmp_path_factory, partial_checkpoint)(build=options)


@pytest.fixture(scope="session")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The checkpoint that the repository carries."""
    return load_model(build_bundle(CARRIED, tmp_path_factory.mktemp("carried") / "bundle", max_model_len=256))


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Six tokens whose laws are those of `tests.runtime.decoding.TARGET`; the head says what follows another token."""
    options = {"table": TARGET, "size": len(TARGET), "draft": lambda token: (token + 1) % len(TARGET), "eos": 0}
    place = tmp_path_factory.mktemp("world")
    checkpoint = markov_checkpoint(place / "checkpoint", layer_types=["full_attention"], **options)
    return load_model(build_bundle(checkpoint, place / "bundle", draft_tokens=4, max_batch_size=3))


def _cached(factory: pytest.TempPathFactory, make: Callable[..., Any]) -> Models:
    models: dict[str, Model] = {}

    def get(*, build: dict[str, Any] | None = None, pieces: tuple[bytes | str, ...] = (), **options: Any) -> Model:
        key = repr((sorted((build or {}).items()), pieces, sorted(options.items())))
        assert "\n" not in key, "arrays are cut short by repr, so they cannot be told apart here"
        if key not in models:
            place = factory.mktemp("bundle")
            if pieces:
                options["tokenizer"] = tinytext_tokenizer(pieces)
            make(place / "checkpoint", **options)
            bundle = build_bundle(place / "checkpoint", place / "bundle", **{"draft_tokens": 8, **(build or {})})
            models[key] = load_model(bundle)
        return models[key]

    return get
