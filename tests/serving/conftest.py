"""Models and servers that several tests share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import pytest

from mtp_runtime import Model
from mtp_runtime.batching.options import BatchOptions
from tests.fixtures.checkpoints import markov_checkpoint, tinytext_tokenizer, write_tokenizer
from tests.serving.server import Running, serving
from tests.support import build_bundle, load_model

CARRIED = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-mtp"
TEMPLATE = (
    "{% for tool in tools %}t{% endfor %}{% for message in messages %}"
    "{% for call in message.tool_calls %}c{% for name, value in call.function.arguments|items %}{{ name }}{% endfor %}"
    "{% endfor %}u{{ message.content }}{% endfor %}a{% if thinking %}<think>{% endif %}"
)
"""Ends in the token whose successor begins the answer; writes what it was told of before that."""


class Speaker(Protocol):
    """Makes a model that says one text, token by token."""

    def __call__(self, pieces: Sequence[str], template: str = TEMPLATE, draft: str = "perfect") -> Model: ...


@pytest.fixture(scope="session")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The checkpoint that the repository carries, four answers at once."""
    place = tmp_path_factory.mktemp("carried") / "bundle"
    return load_model(build_bundle(CARRIED, place, max_model_len=256, max_batch_size=4))


@pytest.fixture(scope="session")
def server(carried: Model) -> Iterator[Running]:
    """A server of it without a prefix cache, so that tests do not see each other's texts."""
    with serving(carried, BatchOptions(prefix_bytes=0)) as running:
        yield running


@pytest.fixture(scope="session")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Speaker:
    """Each is built once."""
    models: dict[tuple[tuple[str, ...], str, str], Model] = {}

    def make(pieces: Sequence[str], template: str = TEMPLATE, draft: str = "perfect") -> Model:
        key = (tuple(pieces), template, draft)
        if key not in models:
            place = tmp_path_factory.mktemp("speaker")
            # The prompt's last token, the answer, its end; then what prompts are made of.
            vocabulary = ["a", *pieces, "<eos>", *"ctuy"]
            end = 1 + len(pieces)
            markov_checkpoint(place / "checkpoint", eos=end, draft=draft)
            write_tokenizer(place / "checkpoint", tinytext_tokenizer(vocabulary), eos=end, chat_template=template)
            bundle = build_bundle(place / "checkpoint", place / "bundle", draft_tokens=4, max_batch_size=2)
            models[key] = load_model(bundle)
        return models[key]

    return make
