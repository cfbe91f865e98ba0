"""A bundle of a chain, t + 1 after token t, whose end token is 12; and the model over it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mtp_runtime import Model
from mtp_serving.triton.backend import Backend
from tests.fixtures.checkpoints import markov_checkpoint, tinytext_tokenizer
from tests.serving.triton.fake import Utils, arguments, loaded
from tests.support import build_bundle, load_model

PIECES = tuple(chr(ord("0") + token) for token in range(64))


@pytest.fixture(scope="session")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle; its head is wrong at every third token."""
    place = tmp_path_factory.mktemp("chain")
    markov_checkpoint(place / "checkpoint", draft="third", eos=12, tokenizer=tinytext_tokenizer(PIECES))
    return build_bundle(place / "checkpoint", place / "bundle", draft_tokens=4, max_batch_size=3)


@pytest.fixture(scope="session")
def alone(chain: Path) -> Model:
    """The same bundle without a server."""
    return load_model(chain)


@pytest.fixture(scope="module")
def served(chain: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """The model inside of a server that is not there."""
    with loaded(arguments(chain, tmp_path_factory.mktemp("repository") / "m"), Utils()) as model:
        yield model
