"""The recipe of the carried checkpoint: reproducible steps, distinct sizes, pinned text."""

from __future__ import annotations

import importlib.util
import io
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed; the recipe trains with it", allow_module_level=True)

import torch

from mtp_tools.train_tiny import corpus
from mtp_tools.train_tiny.acceptance import measure
from mtp_tools.train_tiny.checkpoint import load_checkpoint
from mtp_tools.train_tiny.corpus import RecipeError, load_split
from mtp_tools.train_tiny.layout import text_fields
from mtp_tools.train_tiny.train import Schedule, train

ROOT = Path(__file__).resolve().parents[2]
SCHEDULE = Schedule(steps=2, seed=0, threads=1, batch=2, length=16)


@pytest.fixture(autouse=True)
def _threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(False)


def weights(schedule: Schedule) -> dict[str, torch.Tensor]:
    tokens = torch.arange(500) * 7 % 2176
    return train(tokens, schedule, report=lambda line: None).state_dict()


def test_the_same_seed_trains_the_same_weights_and_another_seed_others() -> None:
    first, second, other = weights(SCHEDULE), weights(SCHEDULE), weights(replace(SCHEDULE, seed=1))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first), "control: the seed matters"


def test_no_two_sizes_are_equal() -> None:
    text = text_fields()
    heads, kv = text["num_attention_heads"] * text["head_dim"], text["num_key_value_heads"] * text["head_dim"]
    key = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    value = text["linear_num_value_heads"] * text["linear_value_head_dim"]
    sizes = [text["hidden_size"], text["intermediate_size"], text["vocab_size"], heads, 2 * heads, kv, key, value]
    sizes += [2 * key + value, 2 * text["hidden_size"], text["head_dim"]]
    sizes += [text["linear_key_head_dim"], text["linear_value_head_dim"]]
    assert len(set(sizes)) == len(sizes)


def test_a_source_that_changed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = corpus.SOURCES[0]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("empty"))

    def download(source_: corpus.Source, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{source_.name.lower()}-{source_.version}.tar.gz").write_bytes(buffer.getvalue())

    monkeypatch.setattr(corpus, "_download", download)
    with pytest.raises(RecipeError, match="sha256"):
        load_split(tmp_path)
    assert source.sha256


def test_the_trained_head_is_better_than_an_untrained_one() -> None:
    prompts = torch.arange(8 * 24).view(8, 24) * 11 % 2176
    trained = load_checkpoint(ROOT / "checkpoints" / "tiny-mtp")
    untrained = train(torch.arange(500) % 2176, replace(SCHEDULE, steps=1), report=lambda line: None)
    rates = [measure(model, prompts, 12)[0].acceptance_rate for model in (trained, untrained)]
    assert rates[0] > 0.3
    assert rates[0] > rates[1] + 0.2, "control: an untrained head drafts worse"
